"""Host memory that devices copy from and to, of exactly the size that is needed.

torch's own pinned memory is rounded up to a power of two: 35 GB would take 64.
"""

import ctypes
import mmap
import warnings
import weakref
from contextlib import suppress

import torch
from torch import Tensor

_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every context of the process."""


class PinnedMemory:
    """Page-locked memory of the host; pages stay locked as long as this object lives.

    Where CUDA refuses to lock pages, they are not, which a warning says: copies are then slower, and the host waits
    for them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: bytes; `device`: one of those that copy from and to it."""
        # The mapping lives as long as tensors that lie in it.
        self._bytes = torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8)
        self.pinned = _lock(self._bytes, device)
        """Whether pages are locked, so that copies can go on beside the host."""
        if self.pinned:
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._bytes.data_ptr())

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Make a tensor in this memory, of the shape and type of another one that fills it."""
        return self._bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def view_bytes(values: Tensor) -> memoryview:
    """View a contiguous tensor in host memory as its bytes, as long as it lives.

    Not through numpy: memory that it has seen cannot be given back for offloading.
    """
    if not values.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())).cast("B")


def _lock(memory: Tensor, device: torch.device) -> bool:
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if error:
        _clear_error(device)
        warnings.warn(
            f"{memory.nbytes:,} bytes of host memory cannot be locked (cudaHostRegister: error {error}), so that"
            " offloading is slower; has the host as much memory, and may its processes lock it (ulimit -l)?",
            RuntimeWarning,
            stacklevel=2,
        )
    return not error


def _clear_error(device: torch.device) -> None:
    """Have torch report the error that CUDA remembers now, and not at the next kernel."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
