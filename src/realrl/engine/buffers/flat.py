"""Flat buffer that holds many tensors as views."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realrl.families.tensors import TensorSpec
from realrl.layout.limits import bucket_count


class FlatBuffer:
    """Tensors stored back to back in `data` [N]; N is rounded up to `multiple_of`, the rest stays zero."""

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        multiple_of: int = 1,
    ) -> None:
        self.tensors = tuple(tensors)
        self._specs = {tensor.name: tensor for tensor in self.tensors}
        assert len(self._specs) == len(self.tensors), "two tensors have the same name"
        self._offsets: dict[str, int] = {}
        used = 0
        for tensor in self.tensors:
            self._offsets[tensor.name] = used
            used += tensor.numel
        self._used = used
        self.data = torch.zeros(-(-used // multiple_of) * multiple_of, dtype=dtype, device=device)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> Tensor:
        """Find a tensor as a view, in its own shape."""
        spec, start = self._specs[name], self._offsets[name]
        return self.data[start : start + spec.numel].view(spec.shape)

    @property
    def buckets(self) -> int:
        """Parts of equal size that are communicated one by one."""
        return bucket_count(self._used)

    @property
    def padding(self) -> Tensor:
        """Elements after the last tensor."""
        return self.data[self._used :]

    def offset(self, name: str) -> int:
        """Find the index in `data` of a tensor's first element."""
        return self._offsets[name]

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors of equal trailing shape as one, stacked by rows. [sum of rows, ...]"""
        specs = [self._specs[name] for name in names]
        end = start = self._offsets[names[0]]
        for spec in specs:
            assert self._offsets[spec.name] == end, f"{spec.name} does not follow {names} in storage"
            assert spec.shape[1:] == specs[0].shape[1:], f"{spec.name} has other columns than {names[0]}"
            end += spec.numel
        return self.data[start:end].view(sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])
