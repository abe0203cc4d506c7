"""Flat buffers: one rank's tensors of a parameter set, back to back in one allocation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from realrl.engine.offload import Offloadable, allocate, free
from realrl.families.tensors import TensorSpec
from realrl.layout.layout import Layout
from realrl.layout.limits import bucket_count


@dataclass(frozen=True)
class FlatRun:
    """Tensors that are stored back to back."""

    tensors: tuple[TensorSpec, ...]
    size: int
    """Number of elements with padding."""

    @cached_property
    def used(self) -> int:
        """Number of elements of the tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def buckets(self) -> int:
        """Number of equal parts that are communicated one by one."""
        return bucket_count(self.used)


class FlatBuffer:
    """Tensors stored back to back in `data` [N]; N is rounded up to a multiple of `multiple_of`, and the padding
    stays zero."""

    runs: tuple[FlatRun, ...]

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        multiple_of: int = 1,
    ) -> None:
        used = sum(tensor.numel for tensor in tensors)
        size = -(-used // multiple_of) * multiple_of
        self._store([FlatRun(tuple(tensors), size)], dtype, device)

    @classmethod
    def of_runs(
        cls, runs: "Sequence[FlatRun]", dtype: torch.dtype, device: torch.device | str
    ) -> "FlatBuffer":
        """Store several runs of tensors; each of them is padded."""
        made = cls.__new__(cls)
        made._store(runs, dtype, device)
        return made

    def _store(self, runs: "Sequence[FlatRun]", dtype: torch.dtype, device: torch.device | str) -> None:
        self.runs = tuple(runs)
        self.tensors = tuple(tensor for run in runs for tensor in run.tensors)
        self._specs = {tensor.name: tensor for tensor in self.tensors}
        assert len(self._specs) == len(self.tensors), "two tensors have the same name"
        self._offsets: dict[str, int] = {}
        start = 0
        for run in runs:
            at = start
            for tensor in run.tensors:
                self._offsets[tensor.name] = at
                at += tensor.numel
            start += run.size
        self.data = torch.zeros(start, dtype=dtype, device=device)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> Tensor:
        """View a tensor in its own shape."""
        spec, start = self._specs[name], self._offsets[name]
        return self.data[start : start + spec.numel].view(spec.shape)

    def zero_padding(self) -> None:
        """Set the elements after the tensors of each run to zero."""
        start = 0
        for run in self.runs:
            self.data[start + run.used : start + run.size].zero_()
            start += run.size

    def offset(self, name: str) -> int:
        """Index in `data` of a tensor's first element."""
        return self._offsets[name]

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors of equal trailing shape as one tensor, stacked by rows. [sum of rows, ...]"""
        specs = [self._specs[name] for name in names]
        end = start = self._offsets[names[0]]
        for spec in specs:
            assert self._offsets[spec.name] == end, f"{spec.name} does not follow {names} in storage"
            assert spec.shape[1:] == specs[0].shape[1:], f"{spec.name} has other columns than {names[0]}"
            end += spec.numel
        return self.data[start:end].view(sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])


class LocalSet:
    """A rank's part of a parameter set in one flat buffer, whose memory can be freed and allocated again."""

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """`rank` is global. The buffer is padded so that ranks with the same tensors can divide each bucket
        equally."""
        self.layout, self._rank = layout, rank
        runs = [
            FlatRun(tuple(tensor.stored for tensor in run.tensors), run.size) for run in layout.runs(rank)
        ]
        self.buffer = FlatBuffer.of_runs(runs, dtype, device)
        self.memory = Offloadable([self.buffer.data])

    @property
    def resident(self) -> bool:
        """Whether the parameters are in device memory, neither freed nor offloaded."""
        return self.buffer.data.untyped_storage().nbytes() >= self.buffer.data.nbytes

    def free(self) -> None:
        free(self.buffer.data)

    def allocate(self) -> None:
        """Allocate the memory again. Padding is zero; the parameters are undefined until they are filled in."""
        allocate(self.buffer.data)
        self.buffer.zero_padding()
        for tensor in self.layout.tensors(self._rank):
            if tensor.region.size != tensor.shape:
                self.buffer[tensor.region.tensor][tensor.region.size[0] :].zero_()


class Parameters:
    """Tensors of several buffers, found by name."""

    def __init__(self, buffers: Mapping[str, FlatBuffer]) -> None:
        """`buffers` maps each parameter set to its buffer. No two buffers hold the same tensor."""
        self._of = {tensor.name: buffer for buffer in buffers.values() for tensor in buffer.tensors}
        self.tensors: tuple[TensorSpec, ...] = tuple(t for b in buffers.values() for t in b.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __getitem__(self, name: str) -> Tensor:
        """View a tensor in its own shape."""
        return self._of[name][name]

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors of one set as one tensor; see `FlatBuffer.fused`."""
        buffer = self._of[names[0]]
        assert all(name in buffer for name in names), f"{names} are not all in one parameter set"
        return buffer.fused(*names)
