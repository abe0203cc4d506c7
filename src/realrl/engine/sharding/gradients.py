"""Gradients of ZeRO-2 and ZeRO-3: reduced section by section into the rows that data-parallel ranks update."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.engine.buffers.flat import FlatBuffer
from realrl.engine.buffers.local_set import LocalSet
from realrl.engine.sharding.section_buffers import SectionBuffer, group_by_section, list_sections
from realrl.layout.shard import Shard
from realrl.model.parallel.group import Group, reduce_scatter
from realrl.model.parallel.sections import Section


@dataclass(frozen=True, eq=False)
class _Reduction:
    """Reduce-scatter of a section under way: where its sums arrive, and the rows that they are added to."""

    section: SectionBuffer
    works: list[dist.Work | None]
    sums: list[Tensor]
    rows: list[Tensor]


class SectionGradients:
    """Float32 gradients of a parameter set, of which a rank accumulates its own rows.

    All rows of a section's gradients are there only from the section's backward pass until they are added up over
    data-parallel ranks. Sections are reduced in one order, from the head to the embedding, so that ranks agree.
    """

    def __init__(
        self,
        updated: LocalSet,
        shard: Shard,
        rank: int,
        group: Group,
        complete: Callable[[FlatBuffer], None],
    ) -> None:
        """`updated`: the rows that this global rank updates. `complete` is called with all rows of a section whose
        backward pass is over, and changes what is not this rank's alone."""
        self._group, self._complete = group, complete
        device = updated.buffer.data.device
        multiple = updated.buffer.buckets
        self.rows = FlatBuffer(updated.buffer.tensors, torch.float32, device, multiple_of=multiple)
        """Gradients of the rows that this rank updates."""
        whole = group_by_section(shard, updated.layout.gathered_tensors(rank))
        self._sections = {
            section: SectionBuffer(whole[section], group.size, torch.float32, device)
            for section in reversed(list_sections(shard))
            if section in whole
        }
        """In the order in which they are reduced."""
        self._waiting: deque[Section] = deque()
        self._under_way: _Reduction | None = None

    @property
    def sections(self) -> tuple[Section, ...]:
        """Sections with gradients, in the order in which they are reduced."""
        return tuple(self._sections)

    def fused(self, *names: str) -> Tensor:
        """View the gradients of neighbouring tensors as one, all rows."""
        found = next(section for section in self._sections.values() if names[0] in section.buffer)
        return found.fused(*names)

    def start_pass(self) -> None:
        """Begin a backward pass."""
        self._waiting = deque(self._sections)

    def begin(self, section: Section) -> None:
        """Make room for the gradients of a section, which are zero then; it may have been made already."""
        found = self._sections.get(section)
        if found is not None and not found.resident:
            found.allocate()
            found.buffer.data.zero_()

    def reduce(self, section: Section) -> None:
        """Start to add up a section's gradients, which are complete, over data-parallel ranks."""
        if section not in self._sections:
            return
        assert self._waiting and self._waiting[0] == section, f"{section} is not next in {self._waiting}"
        self._waiting.popleft()
        self.begin(section)
        found = self._sections[section]
        self._complete(found.buffer)
        rows = [self.rows.fused(*names).view(-1) for names in found.stacks]
        sums = [torch.empty_like(part) for part in rows]
        works = [
            reduce_scatter(into, found.view_stack(names), self._group, async_op=True)
            for into, names in zip(sums, found.stacks, strict=True)
        ]
        self._finish_reduction()
        self._under_way = _Reduction(found, works, sums, rows)

    def finish_pass(self) -> None:
        """End a backward pass: what it has computed is in the rows of all ranks."""
        while self._waiting:
            self.reduce(self._waiting[0])
        self._finish_reduction()

    @torch.no_grad()
    def _finish_reduction(self) -> None:
        if self._under_way is None:
            return
        for work in self._under_way.works:
            if work is not None:
                work.wait()
        for part, total in zip(self._under_way.rows, self._under_way.sums, strict=True):
            part += total
        self._under_way.section.free()
        self._under_way = None
