"""Flat buffers of sections of a stage, which have memory only while they are used."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from realrl.engine.buffers.flat import FlatBuffer
from realrl.engine.buffers.offload import allocate, free
from realrl.families.tensors import TensorSpec
from realrl.layout.layout import group_stacks
from realrl.layout.local_tensors import LocalTensor, count_shard_rows
from realrl.layout.shard import Shard
from realrl.model.parallel.sections import Section

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
