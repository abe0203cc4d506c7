"""Offloading of tensors from device to host memory.

Host memory is mapped here, in exactly the size that is needed. torch would round pinned memory up to a power of
two, so that 35 GB would take 64 GB.
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
"""`cudaHostRegisterPortable`: pinned for every CUDA context of the process."""


class PinnedMemory:
    """Host memory whose pages `lock` pins; they stay pinned as long as this object lives.

    If CUDA refuses to pin pages, a warning appears. Copies are then slower, and the host waits for them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size` in bytes; `device` is one of the devices that copy from and to the memory."""
        # Tensors that use the mapping keep it alive.
        self._bytes = torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8)
        self._device = device
        self._mutex = threading.Lock()
        self._pinned: bool | None = None

    def lock(self) -> bool:
        """Pin the pages at the first call; return whether they are pinned.

        Pinning 2 to 4 GB takes a second, because the system first fills the pages with zeros. If another thread
        calls `lock` meanwhile, it waits.
        """
        with self._mutex:
            if self._pinned is None:
                self._pinned = _lock(self._bytes, self._device)
                if self._pinned:
                    weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._bytes.data_ptr())
            return self._pinned

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Make a tensor with the shape and type of `tensor` that fills this memory."""
        return self._bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def view_bytes(values: Tensor) -> memoryview:
    """View a contiguous tensor in host memory as bytes, which are valid as long as the tensor lives.

    This avoids numpy, because torch cannot resize storage that numpy has seen, and offloading frees storage by
    resizing it.
    """
    if not values.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())).cast("B")


def lock_in_background(memories: Sequence[PinnedMemory]) -> None:
    """Start a thread that pins memories one after the other, and keeps them alive meanwhile.

    When the process ends, the thread stops after the memory that it is pinning.
    """

    def work() -> None:
        for memory in memories:
            if threading.main_thread().is_alive():
                memory.lock()

    threading.Thread(target=work, name="lock-host-memory").start()


def _lock(memory: Tensor, device: torch.device) -> bool:
    # A new thread's current device is GPU 0, and CUDA would make a context there.
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
    """Make torch report CUDA's pending error now instead of at the next kernel."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def free(tensor: Tensor) -> None:
    """Free the memory of a tensor. The tensor and its views stay valid; do not touch them until `allocate`."""
    tensor.untyped_storage().resize_(0)


def allocate(tensor: Tensor) -> None:
    """Allocate memory for a freed tensor, with undefined content. The tensor must fill its storage."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


class HostCopies:
    """Copies of tensors in host memory, made synchronously, for devices that share the host's memory."""

    asynchronous = False
    """Whether copying runs while the device computes."""

    def make(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Allocate the copies of all tensors, in one call."""
        return [torch.empty_like(tensor) for tensor in tensors]

    def save(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start to copy the tensor of each (tensor, host copy) pair to its host copy. The tensors may be freed
        immediately."""
        for tensor, host in pairs:
            host.copy_(tensor)

    def restore(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start to copy the host copy of each (tensor, host copy) pair to its tensor."""
        for tensor, host in pairs:
            tensor.copy_(host)

    def wait_saved(self) -> None:
        """Wait until host copies have their values."""

    def wait_restored(self) -> None:
        """Make later computation wait until tensors have their values."""


class StreamCopies(HostCopies):
    """Copies in their own stream, from and to pinned memory; neither the host nor computation waits for them."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._memory: list[PinnedMemory] = []
        self._saved: torch.cuda.Event | None = None
        self._restored: torch.cuda.Event | None = None

    def make(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Allocate the copies. Their memory is pinned in the background, and the first `save` waits until it is
        pinned."""
        self._memory = [PinnedMemory(tensor.nbytes, self._device) for tensor in tensors]
        lock_in_background(self._memory)
        return [memory.empty_like(of) for memory, of in zip(self._memory, tensors, strict=True)]

    def save(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream = self._begin()
        with torch.cuda.stream(stream):
            for memory, (tensor, host) in zip(self._memory, pairs, strict=True):
                memory.lock()  # earlier tensors are copied while it waits
                host.copy_(tensor, non_blocking=True)
                # The allocator reuses the freed memory only after the copy.
                tensor.record_stream(stream)
        self._saved = stream.record_event()

    def restore(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream = self._begin()
        with torch.cuda.stream(stream):
            for tensor, host in pairs:
                tensor.copy_(host, non_blocking=True)
        self._restored = stream.record_event()

    def _begin(self) -> torch.cuda.Stream:
        """Return the copy stream, after making it wait for all work queued so far.

        That work may compute the values to save, or still read memory that is now allocated again.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._stream

    def wait_saved(self) -> None:
        if self._saved is not None:
            self._saved.synchronize()

    def wait_restored(self) -> None:
        if self._restored is not None:
            torch.cuda.current_stream(self._device).wait_event(self._restored)


class Offloadable:
    """Tensors that move between device and host memory, with one host copy each; their views stay valid.

    On a GPU, copies run while the device computes. Memory is freed once it has been copied. The device waits for
    loaded tensors before its next computation; the host does not wait.
    """

    def __init__(
        self,
        persistent: Sequence[Tensor],
        workspace: Sequence[Tensor] = (),
        *,
        copies: HostCopies | None = None,
    ) -> None:
        """Each tensor must fill its storage. `workspace` is zero whenever it is not in use, so it need not be
        copied. `copies` can replace the usual copies, for tests."""
        self._persistent = tuple(persistent)
        self._workspace = tuple(workspace)
        on_gpu = [tensor.device for tensor in self._persistent if tensor.is_cuda]
        self._copies = copies or (StreamCopies(on_gpu[0]) if on_gpu else HostCopies())
        self._host: list[Tensor] = []
        self._saved = False
        """Whether the host copies have been filled at least once."""
        self._arriving = False
        """Whether tensors are being loaded, and must not be used yet."""
        self.resident = True
        """Whether the tensors are in device memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the tensors take now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self._persistent, *self._workspace))

    def find_values(self, tensor: Tensor) -> Tensor:
        """Return a persistent tensor or, while it is offloaded, its copy in host memory.

        The copy does not change until the tensors are offloaded again.
        """
        if self.resident:
            return tensor
        self._copies.wait_saved()
        place = next(i for i, known in enumerate(self._persistent) if known is tensor)
        return self._host[place]

    def reserve(self) -> None:
        """Start to allocate host memory for the first `offload`, if copies are asynchronous."""
        if self._copies.asynchronous and not self._host:
            self._host = self._copies.make(self._persistent)

    def offload(self, *, changed: bool = True) -> None:
        """Move the tensors to host memory. If they have not `changed` since the last load, nothing is copied."""
        assert self.resident, "offloaded already"
        if not self._host:
            self._host = self._copies.make(self._persistent)
        if changed or not self._saved:
            self._copies.save(self._pairs)
            self._saved = True
        for tensor in (*self._persistent, *self._workspace):
            free(tensor)
        self.resident = False

    @torch.no_grad()
    def prefetch(self) -> None:
        """Start to move the tensors back to device memory, if copies are asynchronous. `load` completes the
        move."""
        if self._copies.asynchronous and not self.resident and not self._arriving:
            self._start_loading()

    def load(self) -> None:
        """Move the tensors back to device memory."""
        assert not self.resident, "loaded already"
        if not self._arriving:
            self._start_loading()
        self._copies.wait_restored()
        self._arriving, self.resident = False, True

    @torch.no_grad()
    def _start_loading(self) -> None:
        for tensor in (*self._persistent, *self._workspace):
            allocate(tensor)
        self._copies.restore(self._pairs)
        for tensor in self._workspace:
            tensor.zero_()
        self._arriving = True

    @property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._persistent, self._host, strict=True))
