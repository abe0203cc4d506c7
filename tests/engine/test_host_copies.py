"""Offloading from GPUs, on stand-ins for CUDA's streams and its registration of host memory."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from realrl.engine.offload import Offloadable, PinnedMemory, StreamCopies, lock_in_background

CPU = torch.device("cpu")


@dataclass
class Cudart:
    """CUDA's registration of host memory, by its documentation: regions must not overlap, and only what is
    registered can be unregistered."""

    limit: int = 1 << 40
    regions: dict[int, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    gate: threading.Event | None = None
    """Registration waits for it."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert flags == 1, "portable"
        assert self.gate is None or self.gate.wait(60)
        self.log.append(f"lock {size}")
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
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(found, "computing"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Tensor, "copy_", noted)
    monkeypatch.setattr(Tensor, "record_stream", keep)
    return found


def test_locked_memory_is_as_large_as_asked_for_and_given_back(cuda: Cuda) -> None:
    memory = PinnedMemory(3_000_001, CPU)
    assert memory.lock() and list(cuda.cudart.regions.values()) == [3_000_001]
    values = memory.empty_like(torch.empty(3_000_001, dtype=torch.uint8))
    values.fill_(7)
    del memory
    gc.collect()
    assert not cuda.cudart.regions
    assert values.sum() == 7 * 3_000_001, "tensors outlive the lock"


def test_memory_that_cannot_be_locked_is_used_as_it_is_with_a_warning(cuda: Cuda) -> None:
    cuda.cudart.limit = 1000
    memory = PinnedMemory(4000, CPU)
    with pytest.warns(
        RuntimeWarning, match=r"4,000 bytes of host memory cannot be locked .*error 2.*ulimit -l"
    ) as warned:
        assert not memory.lock()
        assert not memory.lock()
    assert len(warned) == 1
    assert memory.empty_like(torch.empty(10, 100)).shape == (10, 100)
    del memory
    gc.collect()
    assert not cuda.cudart.regions


def test_memory_is_locked_in_the_background_and_offloading_waits_for_what_is_not(cuda: Cuda) -> None:
    first, second = torch.randn(6), torch.randn(2, 4)
    expected = first.clone(), second.clone()
    memory = Offloadable([first, second], copies=StreamCopies(CPU))
    cuda.cudart.log, cuda.cudart.gate = cuda.log, threading.Event()
    memory.reserve()
    memory.reserve()
    cuda.log.append("reserved")
    cuda.cudart.gate.set()
    memory.offload(changed=False)  # the first time, values are copied anyway
    assert cuda.log.index("reserved") < cuda.log.index("lock 24") < cuda.log.index("copy 6")
    assert cuda.log.index("lock 32") < cuda.log.index("copy 8")
    assert sum(line.startswith("lock") for line in cuda.log) == 2
    memory.load()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_a_refusal_in_the_background_is_warned_of_once_and_copies_are_made(cuda: Cuda) -> None:
    values = torch.randn(1000)
    expected = values.clone()
    cuda.cudart.limit = 1000
    memory = Offloadable([values], copies=StreamCopies(CPU))
    with pytest.warns(RuntimeWarning, match="4,000 bytes of host memory cannot be locked") as warned:
        memory.reserve()
        memory.offload()
    assert len(warned) == 1
    memory.load()
    assert torch.equal(values, expected)


def test_memory_stays_while_it_is_being_locked(cuda: Cuda) -> None:
    cuda.cudart.gate = threading.Event()
    memory = PinnedMemory(5000, CPU)
    there = weakref.ref(memory)
    before = set(threading.enumerate())
    lock_in_background([memory])
    (thread,) = set(threading.enumerate()) - before
    del memory
    gc.collect()
    assert there() is not None and not cuda.cudart.regions
    cuda.cudart.gate.set()
    thread.join(60)
    gc.collect()
    assert there() is None and cuda.cudart.log == ["lock 5000"] and not cuda.cudart.regions


ENDING = """
import threading
from contextlib import nullcontext
import torch
from realrl.engine.offload import PinnedMemory, lock_in_background

class Cudart:
    def cudaHostRegister(self, pointer, size, flags):
        threading.main_thread().join()
        print(size)
        return 0

    def cudaHostUnregister(self, pointer):
        return 0

torch.cuda.cudart = Cudart
torch.cuda.device = lambda device: nullcontext()
lock_in_background([PinnedMemory(size, torch.device("cpu")) for size in (1, 2, 3)])
"""


def test_a_process_that_ends_does_not_wait_for_all_memory_to_be_locked() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


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


def test_no_memory_is_reserved_for_a_cpu() -> None:
    memory = Offloadable([torch.arange(5.0)])
    memory.reserve()
    assert not memory._host


def test_tensors_of_a_gpu_are_copied_in_a_stream(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake device, whose tensors have shapes, types and devices, but no values."""
    made: list[Any] = []

    class Memory(PinnedMemory):
        def __init__(self, size: int, device: torch.device) -> None:
            made.append((size, device))

        def lock(self) -> bool:
            return True

        def empty_like(self, tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device="cpu")

    monkeypatch.setattr("realrl.engine.offload.PinnedMemory", Memory)
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
