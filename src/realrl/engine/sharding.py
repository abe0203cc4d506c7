"""ZeRO-2 and ZeRO-3: parameters are gathered, and gradients reduced, section by section during passes."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from realrl.engine.buffers import FlatBuffer, LocalSet
from realrl.engine.offload import allocate, free
from realrl.engine.parallel_groups import ParallelGroups
from realrl.families.tensors import TensorSpec
from realrl.layout.layout import group_stacks
from realrl.layout.local_tensors import LocalTensor, count_shard_rows
from realrl.layout.shard import Shard
from realrl.model.group import Group, all_gather, reduce_scatter
from realrl.model.transformer import Section, SectionHooks

Stack = tuple[LocalTensor, ...]
"""Tensors of one parameter of the transformer, with all rows that a TP rank computes with."""


def list_sections(shard: Shard) -> tuple[Section, ...]:
    """List the sections of a stage in the order of computation."""
    layers = range(len(shard.layers))
    return (*(("embedding",) if shard.first else ()), *layers, *(("head",) if shard.last else ()))


def find_section(shard: Shard, spec: TensorSpec) -> Section:
    if spec.layer is not None:
        return shard.layers.index(spec.layer)
    return "embedding" if shard.first and spec.parameter in ("embedding", "positions") else "head"


def group_by_section(shard: Shard, tensors: tuple[LocalTensor, ...]) -> dict[Section, list[Stack]]:
    found: defaultdict[Section, list[Stack]] = defaultdict(list)
    for stack in group_stacks(tensors):
        found[find_section(shard, stack[0].spec)].append(stack)
    return dict(found)


class SectionBuffer:
    """All rows of one section (the embedding, a layer or the head) of a parameter set. Each parameter is padded, so
    that ranks with the same parameters have equal parts of it.

    The buffer has memory only while it is in use.
    """

    def __init__(
        self, stacks: Iterable[Stack], groups: ParallelGroups, dtype: torch.dtype, device: torch.device
    ) -> None:
        tensors: list[TensorSpec] = []
        self.stacks: dict[tuple[str, ...], Group] = {}
        """Names of the tensors of each parameter, and the ranks that divide its rows."""
        for stack in stacks:
            group = groups.copies_of(stack[0].spec)
            ranks = group.size
            stored = [tensor.stored for tensor in stack]
            padding = ranks * count_shard_rows(stack, ranks) - sum(spec.shape[0] for spec in stored)
            first = stored[0]
            end = replace(first, name=_name_padding(first.name), shape=(padding, *first.shape[1:]))
            tensors += [*stored, end]
            self.stacks[tuple(spec.name for spec in stored)] = group
        self.buffer = FlatBuffer(tensors, dtype, device)
        free(self.buffer.data)

    @property
    def resident(self) -> bool:
        return self.buffer.data.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        allocate(self.buffer.data)

    def free(self) -> None:
        free(self.buffer.data)

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors as one tensor (`FlatBuffer.fused`). It has values only while the section has
        memory."""
        if self.resident:
            return self.buffer.fused(*names)
        self.allocate()  # torch makes views only of allocated memory
        found = self.buffer.fused(*names)
        self.free()
        return found

    def view_stack(self, names: Sequence[str]) -> Tensor:
        """View the rows of a parameter, padding included, as a flat tensor that autograd does not track.

        Gathering a section again writes to this memory. Autograd must not treat this as a change, because it only
        restores the values of tensors that were saved for the backward pass.
        """
        return self.buffer.fused(*names, _name_padding(names[0])).view(-1).data


def _name_padding(first: str) -> str:
    return f"{first} padding"


class GatheredParameters:
    """Parameters of a stage under ZeRO-3. A section has memory from the time it is gathered until it is freed."""

    def __init__(self, sets: Mapping[str, LocalSet], shard: Shard, rank: int, groups: ParallelGroups) -> None:
        """`sets` has this rank's part of each parameter set of a model. `rank` is global; `groups` are its
        groups."""
        self._sections: dict[Section, list[tuple[SectionBuffer, LocalSet]]] = {}
        self._of: dict[str, SectionBuffer] = {}
        for held in sets.values():
            stored = held.buffer.data
            for section, stacks in group_by_section(shard, held.layout.gathered_tensors(rank)).items():
                buffer = SectionBuffer(stacks, groups, stored.dtype, stored.device)
                self._sections.setdefault(section, []).append((buffer, held))
                self._of |= {name: buffer for names in buffer.stacks for name in names}
        self._arriving: dict[Section, list[dist.Work | None]] = {}

    def fused(self, *names: str) -> Tensor:
        """View all rows of neighbouring tensors as one tensor, which has values while their section is gathered."""
        return self._of[names[0]].fused(*names)

    def start(self, section: Section) -> None:
        """Start to gather a section, unless it is gathered already or being gathered."""
        if section in self._arriving:
            return
        works = self._arriving[section] = []
        for buffer, held in self._sections.get(section, ()):
            buffer.allocate()
            for names, group in buffer.stacks.items():
                mine = held.buffer.fused(*names).view(-1)
                works.append(all_gather(buffer.view_stack(names), mine, group, async_op=True))

    def gather(self, section: Section) -> None:
        """Gather a section, and wait until it has its values."""
        self.start(section)
        for work in self._arriving[section]:
            if work is not None:
                work.wait()
        self._arriving[section] = []

    def store(self, section: Section) -> None:
        """Copy this rank's rows of a gathered section, which has changed, to the memory that stores them."""
        for buffer, held in self._sections.get(section, ()):
            for names, group in buffer.stacks.items():
                mine = held.buffer.fused(*names).view(-1)
                mine.copy_(buffer.view_stack(names).view(group.size, -1)[group.index])

    def free(self, section: Section) -> None:
        """Free the memory of a section, if it has any."""
        if section in self._arriving:
            self.gather(section)
            for buffer, _ in self._sections.get(section, ()):
                buffer.free()
            del self._arriving[section]

    def free_all(self) -> None:
        for section in [*self._arriving]:
            self.free(section)


@dataclass(frozen=True, eq=False)
class _Reduction:
    """Reduce-scatter of a section in progress: the buffers for its sums, and the rows to which the sums are
    added."""

    section: SectionBuffer
    works: list[dist.Work | None]
    sums: list[Tensor]
    rows: list[Tensor]


class SectionGradients:
    """Float32 gradients of a parameter set; a rank accumulates only its own rows.

    Gradients of all rows exist only from a section's backward pass until they are summed over the ranks with the
    same parameters. Sections are reduced in a fixed order, from the head to the embedding, so that ranks agree.
    """

    def __init__(
        self,
        updated: LocalSet,
        shard: Shard,
        rank: int,
        groups: ParallelGroups,
        complete: Callable[[FlatBuffer], None],
    ) -> None:
        """`updated` has the rows that this rank updates; `rank` is global. `complete(buffer)` is called after a
        section's backward pass, with the gradients of all rows of the section. This function sums gradients that
        are only partial on each TP rank."""
        self._complete = complete
        device = updated.buffer.data.device
        self.rows = FlatBuffer.of_runs(updated.buffer.runs, torch.float32, device)
        """Gradients of the rows that this rank updates."""
        whole = group_by_section(shard, updated.layout.gathered_tensors(rank))
        self._sections = {
            section: SectionBuffer(whole[section], groups, torch.float32, device)
            for section in reversed(list_sections(shard))
            if section in whole
        }
        """Gradients of all rows of each section, in the order of reduction."""
        self._waiting: deque[Section] = deque()
        self._under_way: _Reduction | None = None

    @property
    def sections(self) -> tuple[Section, ...]:
        """Sections with gradients, in the order of reduction."""
        return tuple(self._sections)

    def fused(self, *names: str) -> Tensor:
        """View the gradients of all rows of neighbouring tensors as one tensor."""
        found = next(section for section in self._sections.values() if names[0] in section.buffer)
        return found.fused(*names)

    def start_pass(self) -> None:
        self._waiting = deque(self._sections)

    def begin(self, section: Section) -> None:
        """Allocate zero gradients for a section, unless they exist already."""
        found = self._sections.get(section)
        if found is not None and not found.resident:
            found.allocate()
            found.buffer.data.zero_()

    def reduce(self, section: Section) -> None:
        """Start to sum a section's complete gradients over the ranks with the same parameters."""
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
            reduce_scatter(into, found.view_stack(names), group, async_op=True)
            for into, (names, group) in zip(sums, found.stacks.items(), strict=True)
        ]
        # The previous reduction has run during this section's backward pass.
        self._finish_reduction()
        self._under_way = _Reduction(found, works, sums, rows)

    def finish_pass(self) -> None:
        """End a backward pass: wait until its gradients are summed and added to the rows of each rank."""
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


class ShardedPasses(SectionHooks):
    """Hooks that gather the parameters of each section while the previous section computes.

    Parameters are freed after the forward pass of their section, and gathered again for its backward pass. After
    the backward pass, the section's gradients are reduced and its parameters are freed. The head's parameters stay
    from its forward to its backward pass, which follows immediately.
    """

    def __init__(self, shard: Shard, gathered: GatheredParameters | None, *, tied: bool) -> None:
        """`gathered` is None if parameters stay in memory (ZeRO-2). `tied` says whether the head uses the
        embedding's parameters in the same stage."""
        self._sections = list_sections(shard)
        self._gathered, self._tied = gathered, tied
        self._gradients: SectionGradients | None = None
        self._backward = range(0)
        """Layers that gradients flow through."""

    def train(self, gradients: SectionGradients, layers: range) -> None:
        """Make backward passes reduce `gradients`. Gradients flow through these `layers` of the stage."""
        self._gradients, self._backward = gradients, layers

    def enter(self, section: Section, x: Tensor) -> Tensor:
        self._gather(section)
        place = self._sections.index(section)
        if self._gathered is not None and place + 1 < len(self._sections):
            for needed in self._list_needed(self._sections[place + 1]):
                self._gathered.start(needed)
        return _call_backward(x, lambda: self._end_backward(section))

    def leave(self, section: Section, x: Tensor) -> Tensor:
        self._free(section)
        return _call_backward(x, lambda: self._begin_backward(section))

    def release(self) -> None:
        """Free gathered parameters at the end of a pass that has no backward pass."""
        if self._gathered is not None:
            self._gathered.free_all()

    def start_backward(self) -> None:
        assert self._gradients is not None, "only training has backward passes"
        self._gradients.start_pass()
        if self._sections[-1] == "head":
            for section in self._list_needed("head"):
                self._gradients.begin(section)
        if self._gathered is not None and self._backward:
            self._gathered.start(self._backward[-1])

    def finish_backward(self) -> None:
        """End a backward pass: finish the sums of gradients, and free gathered parameters."""
        assert self._gradients is not None, "only training has backward passes"
        self._gradients.finish_pass()
        self.release()

    def _begin_backward(self, section: Section) -> None:
        """Prepare the backward pass of a section; the embedding's backward pass needs no parameters."""
        if self._gradients is None:  # a backward pass outside training
            self._gather(section)
            return
        if section != "embedding":
            self._gather(section)
            assert isinstance(section, int), "the head is not left"
            if self._gathered is not None and section - 1 in self._backward:
                self._gathered.start(section - 1)
        self._gradients.begin(section)

    def _end_backward(self, section: Section) -> None:
        if self._gradients is not None:
            self._gradients.reduce(section)
        self._free(section)

    def _gather(self, section: Section) -> None:
        if self._gathered is not None:
            for needed in self._list_needed(section):
                self._gathered.gather(needed)

    def _free(self, section: Section) -> None:
        if self._gathered is not None:
            for needed in self._list_needed(section):
                self._gathered.free(needed)

    def _list_needed(self, section: Section) -> tuple[Section, ...]:
        """List the sections whose parameters a section needs."""
        return ("head", "embedding") if section == "head" and self._tied else (section,)


class _Border(Function):
    """Identity whose backward pass first calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def _call_backward(x: Tensor, call: Callable[[], None]) -> Tensor:
    """Make the backward pass call a function when it reaches `x`."""
    return _Border.apply(x, call) if torch.is_grad_enabled() and x.requires_grad else x
