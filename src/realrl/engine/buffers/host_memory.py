"""Host memory that devices copy from and to, of exactly the size that is needed.

torch's own pinned memory is rounded up to a power of two: 35 GB would take 64.
"""

import ctypes
import mmap
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every context of the process."""


class PinnedMemory:
    """Memory of the host whose pages `lock` locks; they stay locked as long as this object lives.

    If CUDA refuses to lock pages, they are not locked, and a warning says so: copies are then slower, and the host
    waits for them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: bytes; `device`: one of those that copy from and to it."""
        # The mapping lives as long as tensors that lie in it.
        self._bytes = torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8)
        self._device = device
        self._mutex = threading.Lock()
        self._pinned: bool | None = None

    def lock(self) -> bool:
        """Lock the pages at the first call, and tell whether they are locked.

        This takes a second for 2 to 4 GB, since the system fills pages with zeros first. A thread that calls it
        meanwhile waits.
        """
        with self._mutex:
            if self._pinned is None:
                self._pinned = _lock(self._bytes, self._device)
                if self._pinned:
                    weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._bytes.data_ptr())
            return self._pinned

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


def lock_in_background(memories: Sequence[PinnedMemory]) -> None:
    """Start a thread that locks memories one after the other, and keeps them alive meanwhile.

    At the end of the process the thread ends after the memory that it is locking.
    """

    def work() -> None:
        for memory in memories:
            if threading.main_thread().is_alive():
                memory.lock()

    threading.Thread(target=work, name="lock-host-memory").start()


def _lock(memory: Tensor, device: torch.device) -> bool:
    # In another thread than the main one, CUDA would make a context on the first GPU of the node.
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if error:
            _clear_error(device)
    if error:
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
