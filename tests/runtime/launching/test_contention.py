"""OpenMP threads sleep at barriers as long as they wait for cores that other processes keep busy."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from realrl.model.cpu.rows import load_openmp
from realrl.runtime.processes import contention
from realrl.runtime.processes.contention import (
    QUIET,
    BarrierWatch,
    Relaxed,
    read_thread_waits,
    watch_barriers,
)
from realrl.runtime.processes.process import connect

needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or load_openmp() is None, reason="torch here comes without GNU's OpenMP library"
)


class StandIn:
    """Stands for relaxed barriers, and counts how many there are."""

    count = 0

    def __init__(self) -> None:
        StandIn.count += 1

    def end(self) -> None:
        StandIn.count -= 1


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def waits_per_second(*shares: dict[int, float]) -> Iterator[dict[int, int]]:
    """Waits of threads as they are read each second, from the seconds that each one waited in that second."""
    total: dict[int, int] = {}
    yield {}
    for share in shares:
        total = {thread: total.get(thread, 0) + round(1e9 * seconds) for thread, seconds in share.items()}
        yield total


def relaxed_after(*shares: dict[int, float]) -> list[bool]:
    waits = waits_per_second(*shares)
    watch = BarrierWatch(lambda: next(waits), StandIn)  # type: ignore[arg-type, return-value]
    start = watch._time
    states = []
    for second in range(len(shares)):
        watch.look(start + second + 1)
        states.append(watch.relaxed)
        assert StandIn.count == watch.relaxed
    watch.close()
    assert StandIn.count == 0
    return states


def test_barriers_are_relaxed_while_threads_wait_for_cores() -> None:
    quiet, busy = {1: 0.01, 2: 0.02}, {1: 0.25, 2: 0.3}
    assert relaxed_after(quiet, busy, busy, quiet) == [False, True, True, True]
    # Waits of all threads count together.
    assert relaxed_after({1: 0.15, 2: 0.15}) == [True]


def test_threads_spin_again_only_after_a_quiet_while() -> None:
    quiet, busy = {1: 0.0}, {1: 0.5}
    states = relaxed_after(busy, *[quiet] * (QUIET - 1), busy, *[quiet] * QUIET)
    assert states == [True] * (2 * QUIET) + [False]


def test_a_thread_that_has_ended_takes_nothing_from_what_others_waited() -> None:
    assert relaxed_after({1: 0.0, 2: 0.1}, {1: 0.3}) == [False, True]


def test_waits_are_those_that_the_kernel_counts(tmp_path: Path) -> None:
    for thread, text in {"7": "100 2500 3\n", "8": "1 20 1\n", "9": ""}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "10").mkdir()
    assert read_thread_waits(tmp_path) == {7: 2500, 8: 20}
    assert read_thread_waits(tmp_path / "missing") == {}


@needs_openmp
def test_relaxed_barriers_keep_a_team_larger_than_the_cores_and_every_bit(two_threads: None) -> None:
    openmp = load_openmp()
    assert openmp is not None
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(257, 129, generator=generator) for _ in range(2))

    def compute() -> torch.Tensor:
        return torch.softmax(x @ weight.T, -1).sum(0)

    before, threads = compute(), set(read_thread_waits())
    relaxed = Relaxed(openmp)
    # The thread that keeps the team is one of the team.
    assert len(set(read_thread_waits()) - threads) == openmp.omp_get_num_procs() + 1
    assert torch.equal(compute(), before)
    relaxed.end()
    assert torch.equal(compute(), before)


@needs_openmp
def test_a_process_with_several_threads_watches_its_barriers_until_it_ends(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.runtime.processes.process.count_threads", lambda processes: 2)
    with connect("cpu") as process:
        assert process.barriers is not None
        assert "barrier-watch" in [thread.name for thread in threading.enumerate()]
    assert "barrier-watch" not in [thread.name for thread in threading.enumerate()]


@needs_openmp
@pytest.mark.parametrize(("left", "relaxed"), [(None, True), (1000000, True), (3, False)])
def test_barriers_stay_as_they_are_where_no_team_could_be_started(
    two_threads: None, monkeypatch: pytest.MonkeyPatch, left: int | None, relaxed: bool
) -> None:
    monkeypatch.setattr(contention, "free_group_threads", lambda: left)
    monkeypatch.setattr(contention.Relaxed, "__init__", lambda self, openmp: None)
    monkeypatch.setattr(contention.Relaxed, "end", lambda self: None)
    watch = watch_barriers(2)
    assert watch is not None
    watch._read_waits = lambda: {1: 10**12}
    watch.look(watch._time + 1)
    assert watch.relaxed == relaxed
    watch.close()


@needs_openmp
@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_users_who_say_how_threads_wait_are_left_alone(
    two_threads: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    assert watch_barriers(2) is None


def test_one_thread_and_other_libraries_are_left_alone(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch_barriers(1) is None
    monkeypatch.setattr(contention, "load_openmp", lambda: None)
    assert watch_barriers(2) is None
