"""Forward and backward passes under ZeRO-2 and ZeRO-3: what is gathered and reduced when."""

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
from realrl.families.tensors import TensorSpec
from realrl.layout.layout import group_stacks
from realrl.layout.local_tensors import LocalTensor, count_shard_rows
from realrl.layout.shard import Shard
from realrl.model.group import Group, all_gather, reduce_scatter
from realrl.model.transformer import Section

Stack = tuple[LocalTensor, ...]
"""Tensors of one parameter of the transformer, with all rows that a TP rank computes with."""


def list_sections(shard: Shard) -> tuple[Section, ...]:
    """List the sections of a stage, in the order in which they are computed."""
    layers = range(len(shard.layers))
    return (*(("embedding",) if shard.first else ()), *layers, *(("head",) if shard.last else ()))


def find_section(shard: Shard, spec: TensorSpec) -> Section:
    """Find the section that a tensor of a stage belongs to."""
    if spec.layer is not None:
        return spec.layer - shard.layers.start
    return "embedding" if shard.first and spec.parameter in ("embedding", "positions") else "head"


def group_by_section(shard: Shard, tensors: tuple[LocalTensor, ...]) -> dict[Section, list[Stack]]:
    """Group the tensors of a parameter set by their sections."""
    found: defaultdict[Section, list[Stack]] = defaultdict(list)
    for stack in group_stacks(tensors):
        found[find_section(shard, stack[0].spec)].append(stack)
    return dict(found)


class SectionBuffer:
    """All rows of a section of a parameter set, each parameter padded to equal rows for data-parallel ranks."""

    def __init__(self, stacks: Iterable[Stack], parts: int, dtype: torch.dtype, device: torch.device) -> None:
        """`parts`: number of data-parallel ranks."""
        tensors: list[TensorSpec] = []
        self.stacks: list[tuple[str, ...]] = []
        """Names of the tensors of each parameter."""
        for stack in stacks:
            stored = [tensor.stored for tensor in stack]
            padding = parts * count_shard_rows(stack, parts) - sum(spec.shape[0] for spec in stored)
            first = stored[0]
            end = replace(first, name=_name_padding(first.name), shape=(padding, *first.shape[1:]))
            tensors += [*stored, end]
            self.stacks.append(tuple(spec.name for spec in stored))
        self.buffer = FlatBuffer(tensors, dtype, device)
        free(self.buffer.data)

    @property
    def resident(self) -> bool:
        """Whether the buffer of the section has device memory, and is not freed."""
        return self.buffer.data.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Take memory, of undefined content."""
        allocate(self.buffer.data)

    def free(self) -> None:
        """Give the memory back."""
        free(self.buffer.data)

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors as one (`FlatBuffer.fused`), with values while the section has memory."""
        if self.resident:
            return self.buffer.fused(*names)
        self.allocate()  # views are only made of memory that is there
        found = self.buffer.fused(*names)
        self.free()
        return found

    def view_stack(self, names: Sequence[str]) -> Tensor:
        """View the rows of a parameter, padding included, as a flat tensor that autograd does not watch.

        What is written to it leaves tensors valid that a backward pass will use: they get the same values again.
        """
        return self.buffer.fused(*names, _name_padding(names[0])).view(-1).data


def _name_padding(first: str) -> str:
    return f"{first} padding"


class GatheredParameters:
    """Parameters of all sections of a stage, each of which has memory from its gathering until it is freed."""

    def __init__(self, sets: Mapping[str, LocalSet], shard: Shard, rank: int, group: Group) -> None:
        """`sets`: parameter sets of a model as this global rank stores them; `group`: its data-parallel ranks."""
        self._group = group
        self._sections: dict[Section, list[tuple[SectionBuffer, LocalSet]]] = {}
        self._of: dict[str, SectionBuffer] = {}
        for held in sets.values():
            stored = held.buffer.data
            for section, stacks in group_by_section(shard, held.layout.gathered_tensors(rank)).items():
                buffer = SectionBuffer(stacks, group.size, stored.dtype, stored.device)
                self._sections.setdefault(section, []).append((buffer, held))
                self._of |= {name: buffer for names in buffer.stacks for name in names}
        self._arriving: dict[Section, list[dist.Work | None]] = {}

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors as one, all rows; it has values while its section is gathered."""
        return self._of[names[0]].fused(*names)

    def start(self, section: Section) -> None:
        """Start to gather a section, unless it is gathered or about to be."""
        if section in self._arriving:
            return
        works = self._arriving[section] = []
        for buffer, held in self._sections.get(section, ()):
            buffer.allocate()
            for names in buffer.stacks:
                mine = held.buffer.fused(*names).view(-1)
                works.append(all_gather(buffer.view_stack(names), mine, self._group, async_op=True))

    def gather(self, section: Section) -> None:
        """Gather a section, and wait until it has its values."""
        self.start(section)
        for work in self._arriving[section]:
            if work is not None:
                work.wait()
        self._arriving[section] = []

    def store(self, section: Section) -> None:
        """Take this rank's rows from a section that is gathered and has changed."""
        for buffer, held in self._sections.get(section, ()):
            for names in buffer.stacks:
                mine = held.buffer.fused(*names).view(-1)
                mine.copy_(buffer.view_stack(names).view(self._group.size, -1)[self._group.index])

    def free(self, section: Section) -> None:
        """Give the memory of a section back, if it has any."""
        if section in self._arriving:
            self.gather(section)
            for buffer, _ in self._sections.get(section, ()):
                buffer.free()
            del self._arriving[section]

    def free_all(self) -> None:
        """Give the memory of all sections back."""
        for section in [*self._arriving]:
            self.free(section)


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


class ShardedPasses:
    """Hooks that gather the parameters of a section, and those of the next one while it is computed.

    They are freed after it, gathered again for its backward pass, and freed when that is over; then its gradients
    are reduced. The parameters of the head stay from its forward to its backward pass, which follows. A rank
    that has fewer micro-batches than others idles: it takes part in what is gathered and reduced, and computes
    nothing.
    """

    def __init__(self, shard: Shard, gathered: GatheredParameters | None, *, tied: bool) -> None:
        """`gathered`: None where parameters are in memory anyway; `tied`: whether the head computes with the
        parameters of the embedding in the same stage."""
        self._sections = list_sections(shard)
        self._gathered, self._tied = gathered, tied
        self._gradients: SectionGradients | None = None
        self._backward = range(0)
        """Layers that gradients flow through."""

    def train(self, gradients: SectionGradients, layers: range) -> None:
        """Have backward passes reduce gradients, which flow through these layers of the stage."""
        self._gradients, self._backward = gradients, layers

    def enter(self, section: Section, x: Tensor) -> Tensor:
        """See `SectionHooks`."""
        self._gather(section)
        place = self._sections.index(section)
        if self._gathered is not None and place + 1 < len(self._sections):
            for needed in self._list_needed(self._sections[place + 1]):
                self._gathered.start(needed)
        return _call_backward(x, lambda: self._end_backward(section))

    def leave(self, section: Section, x: Tensor) -> Tensor:
        """See `SectionHooks`."""
        self._free(section)
        return _call_backward(x, lambda: self._begin_backward(section))

    def release(self) -> None:
        """End a pass that is followed by no backward pass."""
        if self._gathered is not None:
            self._gathered.free_all()

    def start_backward(self) -> None:
        """Begin a backward pass."""
        assert self._gradients is not None, "only training has backward passes"
        self._gradients.start_pass()
        if self._sections[-1] == "head":
            for section in self._list_needed("head"):
                self._gradients.begin(section)
        if self._gathered is not None and self._backward:
            self._gathered.start(self._backward[-1])

    def finish_backward(self) -> None:
        """End a backward pass: gradients are in the rows of all ranks, and gathered parameters are freed."""
        assert self._gradients is not None, "only training has backward passes"
        self._gradients.finish_pass()
        self.release()

    def idle_forward(self, *, last: bool) -> None:
        """Take part in a forward pass; `last` where no backward pass follows."""
        nothing = torch.empty(0)
        for section in self._sections:
            self.enter(section, nothing)
            if section != "head":
                self.leave(section, nothing)
        if last:
            self.release()

    def idle_backward(self) -> None:
        """Take part in a backward pass."""
        self.start_backward()
        if self._sections[-1] == "head":
            self._end_backward("head")
        for layer in reversed(self._backward):
            self._begin_backward(layer)
            self._end_backward(layer)
        self.finish_backward()

    def _begin_backward(self, section: Section) -> None:
        """Prepare the backward pass of a section; that of the embedding needs no parameters."""
        if self._gradients is None:  # a backward pass outside of training
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
        """List the sections whose parameters a section computes with."""
        return ("head", "embedding") if section == "head" and self._tied else (section,)


class _Border(Function):
    """Identity whose backward pass calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def _call_backward(x: Tensor, call: Callable[[], None]) -> Tensor:
    """Have a backward pass call a function where it comes to `x`."""
    return _Border.apply(x, call) if torch.is_grad_enabled() and x.requires_grad else x
