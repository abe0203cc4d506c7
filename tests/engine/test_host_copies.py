"""Offloading from GPUs, on stand-ins for CUDA's streams and its registration of host memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from realrl.engine.buffers.host_memory import PinnedMemory
from realrl.engine.buffers.offload import Offloadable, StreamCopies

CPU = torch.device("cpu")


@dataclass
class Cudart:
    """CUDA's registration of host memory, by its documentation: regions must not overlap, and only what is
    registered can be unregistered."""

    limit: int = 1 << 40
    regions: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert flags == 1, "portable"
        if size == 0:
            return 1  # cudaErrorInvalidValue
        if any(p < pointer + size and pointer < p + s for p, s in self.regions.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if sum(self.regions.values()) + size > self.limit:
            return 2  # cudaErrorMemoryAllocation
        self.regions[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0 if self.regions.pop(pointer, 0) else 713  # cudaErrorHostMemoryNotRegistered


@dataclass
class Cuda:
    """Streams: what they do goes into a log, in the order in which the host asks for it."""

    cudart: Cudart = field(default_factory=Cudart)
    log: list[str] = field(default_factory=list)
    events: int = 0


@dataclass
class Stream:
    cuda: Cuda
    name: str

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "Event") -> None:
        self.cuda.log.append(f"{self.name} waits for event {event.number}")

    def record_event(self) -> "Event":
        self.cuda.events += 1
        self.cuda.log.append(f"{self.name} records event {self.cuda.events}")
        return Event(self.cuda, self.cuda.events)


@dataclass
class Event:
    cuda: Cuda
    number: int

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for event {self.number}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    copy = Tensor.copy_

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.log.append(f"on {stream.name}:")
        yield
        found.log.append("done")

    def noted(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        found.log.append(f"copy {source.numel()}{'' if non_blocking else ', waiting'}")
        return copy(target, source)

    def keep(tensor: Tensor, stream: Stream) -> None:
        found.log.append(f"keep {tensor.numel()} for {stream.name}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: found.cudart)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(found, "computing"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Tensor, "copy_", noted)
    monkeypatch.setattr(Tensor, "record_stream", keep)
    return found


def test_locked_memory_is_as_large_as_asked_for_and_given_back(cuda: Cuda) -> None:
    memory = PinnedMemory(3_000_001, CPU)
    assert memory.pinned and list(cuda.cudart.regions.values()) == [3_000_001]
    values = memory.empty_like(torch.empty(3_000_001, dtype=torch.uint8))
    values.fill_(7)
    del memory
    gc.collect()
    assert not cuda.cudart.regions
    assert values.sum() == 7 * 3_000_001, "tensors outlive the lock"


def test_memory_that_cannot_be_locked_is_used_as_it_is_with_a_warning(cuda: Cuda) -> None:
    cuda.cudart.limit = 1000
    with pytest.warns(
        RuntimeWarning, match=r"4,000 bytes of host memory cannot be locked .*error 2.*ulimit -l"
    ):
        memory = PinnedMemory(4000, CPU)
    assert not memory.pinned
    assert memory.empty_like(torch.empty(10, 100)).shape == (10, 100)
    del memory
    gc.collect()
    assert not cuda.cudart.regions


def test_values_return_and_neither_host_nor_computing_waits_for_saving(cuda: Cuda) -> None:
    first, second, scratch = torch.randn(6), torch.randn(2, 4).bfloat16(), torch.zeros(3)
    expected = first.clone(), second.clone()
    memory = Offloadable([first, second], [scratch], copies=StreamCopies(CPU))
    memory.offload()
    assert cuda.log == [
        "copies waits for computing",
        "on copies:",
        "copy 6",
        "keep 6 for copies",
        "copy 8",
        "keep 8 for copies",
        "done",
        "copies records event 1",
    ]
    assert memory.nbytes == 0
    cuda.log.clear()
    assert torch.equal(memory.find_values(first), expected[0])
    assert cuda.log == ["host waits for event 1"]
    cuda.log.clear()
    memory.load()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1]) and not scratch.any()
    assert cuda.log == [
        "copies waits for computing",
        "on copies:",
        "copy 6",
        "copy 8",
        "done",
        "copies records event 2",
        "computing waits for event 2",
    ]


def test_a_load_that_has_begun_is_only_waited_for(cuda: Cuda) -> None:
    tensor = torch.arange(5.0)
    memory = Offloadable([tensor], [torch.zeros(2)], copies=StreamCopies(CPU))
    memory.prefetch()  # nothing is offloaded
    memory.offload()
    cuda.log.clear()
    memory.prefetch()
    memory.prefetch()
    assert not memory.resident and memory.nbytes == 28
    assert cuda.log.count("copy 5") == 1 and "computing waits for event 2" not in cuda.log
    cuda.log.clear()
    memory.load()
    assert cuda.log == ["computing waits for event 2"] and memory.resident
    assert torch.equal(tensor, torch.arange(5.0))
    cuda.log.clear()
    memory.offload(changed=False)
    assert not cuda.log and memory.nbytes == 0
    memory.load()
    assert torch.equal(tensor, torch.arange(5.0))


def test_loads_on_a_cpu_do_not_begin_early() -> None:
    tensor = torch.arange(5.0)
    memory = Offloadable([tensor])
    memory.offload()
    memory.prefetch()
    assert memory.nbytes == 0
    memory.load()
    assert torch.equal(tensor, torch.arange(5.0))


def test_tensors_of_a_gpu_are_copied_in_a_stream(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake device, whose tensors have shapes, types and devices, but no values."""
    made: list[Any] = []

    class Memory(PinnedMemory):
        def __init__(self, size: int, device: torch.device) -> None:
            made.append((size, device))

        def empty_like(self, tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device="cpu")

    monkeypatch.setattr("realrl.engine.buffers.offload.PinnedMemory", Memory)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    # Without CUDA, torch does not copy to fake devices either.
    monkeypatch.setattr(Tensor, "copy_", lambda target, source, non_blocking: cuda.log.append("copy"))
    with FakeTensorMode():
        tensor = torch.empty(10, dtype=torch.bfloat16, device="cuda:1")
        memory = Offloadable([tensor], [torch.empty(4, device="cuda:1")])
        memory.offload()
        assert memory.nbytes == 0
        memory.load()
        assert memory.nbytes == 36 and tensor.device == torch.device("cuda:1")
    assert made == [(20, torch.device("cuda:1"))]
    assert cuda.log.count("copy") == 2 and cuda.log[-1] == "computing waits for event 2"
