"""Offloading of tensors from device to host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor


def free(tensor: Tensor) -> None:
    """Release the memory of a tensor. It and its views stay valid, but must not be touched until `allocate`."""
    tensor.untyped_storage().resize_(0)


def allocate(tensor: Tensor) -> None:
    """Allocate memory for a freed tensor, of undefined content. The tensor must fill its storage."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


class Offloadable:
    """Tensors that move between device and pinned host memory, each in one copy; their views stay valid."""

    def __init__(self, persistent: Sequence[Tensor], workspace: Sequence[Tensor] = ()) -> None:
        """Each tensor must fill its storage. `workspace` is zero whenever it is not in use and
        therefore need not be copied."""
        self._persistent = tuple(persistent)
        self._workspace = tuple(workspace)
        self._host: list[Tensor] = []
        self.resident = True
        """Whether the tensors are in device memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the tensors take now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self._persistent, *self._workspace))

    def find_values(self, tensor: Tensor) -> Tensor:
        """Find the values of a persistent tensor: itself or, while it is offloaded, its copy in host memory.

        The copy stays as it is until the tensors are offloaded again.
        """
        if self.resident:
            return tensor
        place = next(i for i, known in enumerate(self._persistent) if known is tensor)
        return self._host[place]

    def offload(self, *, changed: bool = True) -> None:
        """Move to host memory. Unless something has `changed` since it was loaded, nothing is copied."""
        assert self.resident, "offloaded already"
        if not self._host:
            self._host = [
                torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                for tensor in self._persistent
            ]
            changed = True
        for tensor, host in zip(self._persistent, self._host, strict=True):
            if changed:
                host.copy_(tensor)
            free(tensor)
        for tensor in self._workspace:
            free(tensor)
        self.resident = False

    @torch.no_grad()
    def load(self) -> None:
        """Move back to device memory."""
        assert not self.resident, "loaded already"
        for tensor, host in zip(self._persistent, self._host, strict=True):
            allocate(tensor)
            tensor.copy_(host)
        for tensor in self._workspace:
            allocate(tensor)
            tensor.zero_()
        self.resident = True
