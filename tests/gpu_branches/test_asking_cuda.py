"""What asks CUDA itself: names, clocks, memory, streams and choices, on a stand-in for one GPU."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("there is a GPU, which answers itself", allow_module_level=True)

from realrl.checkpoint import storage
from realrl.config.errors import UserError
from realrl.engine.dtypes import find_products
from realrl.families.sizes import SHAPES
from realrl.model.arithmetic.ops import PLAIN, Products
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.program.instructions import Run
from realrl.runtime.doctor import ranks
from realrl.runtime.measure.step_timer import StepTimer
from realrl.runtime.prepare.gpu import Gpu, ask_machine, count_visible_gpus
from realrl.runtime.processes.process import Process, use_cuda
from realrl.runtime.profiler.driver import _device_name
from realrl.runtime.profiler.machine import _moment
from realrl.runtime.profiler.points import Clock

GPU = torch.device("cuda", 0)
PLACE = Placement(Mesh(0, 1), Strategy())
NAME, MEMORY = "NVIDIA H100 80GB HBM3", 80 << 30


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU that answers has been asked to do, in order."""
    found: list[str] = []
    seconds = iter(range(100))

    class Stream:
        def __init__(self, device: torch.device, name: str = "own") -> None:
            self.name = f"{name} stream of {device}"

        def synchronize(self) -> None:
            found.append(f"wait for the {self.name}")

        def wait_stream(self, other: "Stream") -> None:
            found.append(f"the {self.name} waits for the {other.name}")

    class Event:
        def __init__(self, *, enable_timing: bool, external: bool) -> None:
            assert enable_timing and not external

        def record(self) -> None:
            self.at = 1000.0 * next(seconds)

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda _: SimpleNamespace(name=NAME, total_memory=MEMORY),
        "get_device_name": lambda _: NAME,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: found.append("wait for all"),
        "reset_peak_memory_stats": lambda _: found.append("forget the peak"),
        "max_memory_allocated": lambda _: 700,
        "max_memory_reserved": lambda _: 1000,
        "current_stream": lambda device: Stream(device, "current"),
        "default_stream": lambda device: Stream(device, "default"),
        "stream": lambda stream: nullcontext(),
        "Stream": Stream,
        "Event": Event,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return found


def test_a_gpu_multiplies_by_its_library_or_exactly_and_takes_no_mixed_models() -> None:
    assert find_products("bfloat16", GPU) is PLAIN
    assert find_products("float32", GPU, exact=True) == Products(exact=True)
    with pytest.raises(UserError, match="dtype=mixed is for CPUs; on a GPU, choose bfloat16 or float32"):
        find_products("mixed", GPU)


def test_steps_are_measured_when_the_device_has_ended_them(log: list[str]) -> None:
    timer = StepTimer(GPU, held=lambda: 0, staged=lambda: 100)
    with timer.step(), timer.instruction(Run("actor.train", "actor", PLACE)):
        log.append("compute")
    (step,) = timer.take()
    assert [span.bytes for span in step.spans] == [600] and timer.reserved == 1000
    waits = "wait for the current stream of cuda:0"
    assert log == ["forget the peak", "compute", waits, "forget the peak", waits]


def test_moments_on_a_gpu_are_events(log: list[str]) -> None:
    clock = Clock(GPU)
    assert clock.between(clock.now(), clock.now(), clock.now()) == [1.0, 1.0]
    assert log == ["wait for all"]


def test_a_device_is_named_as_its_built_in_kind_or_by_its_driver(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request: Any = SimpleNamespace(group=None)
    assert _device_name(request, GPU) == "h100"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce GTX 1080 Ti")
    assert _device_name(request, GPU) == "gtx-1080-ti"


def test_ranks_on_gpus_do_not_compute_between_measured_collectives() -> None:
    assert _moment(Process(0, 1, GPU)) == 0


def test_a_rank_knows_its_gpu(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert Process(0, 1, GPU).gpu == Gpu(NAME, MEMORY) and Process(0, 1, torch.device("cpu")).gpu is None
    assert use_cuda("cuda") and use_cuda("auto") and not use_cuda("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not use_cuda("auto")
    with pytest.raises(UserError, match="device=cuda, but torch finds no GPU here"):
        use_cuda("cuda")


def test_groups_of_ranks_on_gpus_are_those_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(place: Any, rank_sets: Any, *, with_node_pairs: bool) -> dict[Any, Any]:
        return {"place": place, "sets": rank_sets, "pairs": with_node_pairs}

    monkeypatch.setattr("realrl.runtime.processes.process.make_nccl_groups", make)
    sets: Any = {(0, 1): frozenset({"data"})}
    made: Any = Process(1, 2, GPU).groups(sets, moves=True)
    assert made["sets"] is sets and made["pairs"] and made["place"].device == GPU


def test_another_process_asks_for_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter((f'a warning\n["{NAME}", {MEMORY}]\n', "", "a warning\nGPUs 3\n", "GPUs 0\n"))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:2] == [sys.executable, "-c"]
        compile(command[2], "question", "exec")
        return subprocess.CompletedProcess(command, 0, next(said), "")

    monkeypatch.setattr(subprocess, "run", run)
    assert ask_machine("cuda") == Gpu(NAME, MEMORY)
    assert ask_machine("auto") == "cpu"
    assert count_visible_gpus("cuda") == 3 and count_visible_gpus("auto") is None
    assert ask_machine("cpu") == "cpu" and count_visible_gpus("cpu") is None


def test_the_doctor_describes_gpus_and_their_all_reduce(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    found = ranks.describe_torch()
    assert found["devices"] == [[NAME, MEMORY]] and found["nccl"] == "2.28.9"
    group = SimpleNamespace(sum=lambda values: log.append(f"sum {values.numel()}"))
    everyone: Any = SimpleNamespace(
        device=torch.device("cpu"), world=4, groups=lambda sets: dict.fromkeys(sets, group)
    )
    monkeypatch.setattr(ranks, "_LARGE_ON_GPU", 4096)
    assert ranks._reduce(everyone) > 0
    assert log == 4 * ["wait for all", "sum 1024", "wait for all"]


def test_state_on_a_gpu_is_written_through_a_pinned_buffer(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGpu(Tensor):
        """Host memory that says it is a GPU's."""

        is_cuda = True  # type: ignore[assignment]

    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **options: plain(*sizes, **options))
    monkeypatch.setattr(storage, "BUFFER_BYTES", 24)
    values = torch.arange(10.0)
    parts = [bytes(part) for part in storage._HostBytes().read(values.as_subclass(OnGpu))]
    assert [len(part) for part in parts] == [24, 16] and b"".join(parts) == values.numpy().tobytes()
    waits = "wait for the own stream of cpu"
    assert log == ["the own stream of cpu waits for the default stream of cpu", waits, waits]


def test_samples_are_drawn_in_the_type_of_the_model_on_a_gpu(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from realrl.runtime.evaluation import generate as sampling

    seen: list[str] = []

    def read_dtype(directory: str) -> torch.dtype:
        seen.append(directory)
        raise UserError("enough")

    monkeypatch.setattr(sampling.model_files, "read_dtype", read_dtype)
    monkeypatch.setattr(sampling.model_files, "read_shape", lambda *_: SHAPES["gpt2"])
    settings = SimpleNamespace(top_k=0, max_new_tokens=3, stop_token_ids=None)
    job: Any = SimpleNamespace(model_dir="model", family=None, sampling=settings)
    with pytest.raises(UserError, match="enough"):
        sampling.make_sampling_recipe(job)
    assert seen == ["model"]
