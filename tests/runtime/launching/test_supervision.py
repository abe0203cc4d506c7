"""Frozen ranks, stuck functions and stuck collectives are told apart by signs of life; restarts are counted."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.plan.cluster import Cluster
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.launcher.launch import _shrunken
from realrl.runtime.launcher.local_ranks import RanksEnd, Start, _visible
from realrl.runtime.launcher.restarts import RestartCounter, Slots
from realrl.runtime.monitor.activity import Activity
from realrl.runtime.monitor.rank_status import RankStatus, name_status_file, read_statuses
from realrl.runtime.monitor.sign import FileBoard, Sign
from realrl.runtime.monitor.watch import GAP, SignWatch, Verdict, WatchLimits, describe_waiting
from realrl.runtime.monitor.work_probe import WorkProbe, is_alive
from realrl.runtime.processes.error_reports import DEATH, Failure

LIMITS = WatchLimits(freeze_seconds=5, stall_seconds=60)


class Ranks:
    """Ranks that beat every second before a watcher, by a clock of their own."""

    def __init__(self, *signs: Sign) -> None:
        self.now = 100.0
        self.signs = dict(enumerate(signs))
        self.watch = SignWatch(LIMITS, lambda: self.now)

    def live(
        self, seconds: int, *, frozen: tuple[int, ...] = (), busy: tuple[int, ...] = ()
    ) -> Verdict | None:
        """Let time pass without progress."""
        for _ in range(seconds):
            self.now += 1
            for rank, sign in self.signs.items():
                cpu = sign.cpu_seconds + (rank in busy)
                if rank not in frozen:
                    self.signs[rank] = replace(sign, beats=sign.beats + 1, cpu_seconds=cpu)
            verdict = self.watch.look(self.signs)
            if verdict is not None:
                return verdict
        return None


def at(rank: int, position: int, instruction: str = "run actor.train", **more: object) -> Sign:
    """A rank in the second step, at the instruction of this position."""
    sign = Sign(rank=rank, machine="m", pid=rank, step=1, doing="train", position=position)
    return replace(sign, instruction=instruction, **more)  # type: ignore[arg-type]


def test_a_rank_without_signs_of_life_is_frozen_whatever_others_do() -> None:
    ranks = Ranks(at(0, 3, "receive #2"), at(1, 2))
    assert ranks.live(30) is None
    verdict = ranks.live(30, frozen=(1,))
    assert verdict is not None and verdict.frozen
    assert verdict.message == (
        "rank 1 is frozen: no sign of life for 5 seconds; last seen in step 2, run actor.train"
    )


def test_a_suspended_machine_is_not_frozen() -> None:
    ranks = Ranks(at(0, 3), at(1, 2))
    ranks.live(10)
    ranks.now += GAP + 3600
    assert ranks.live(1, frozen=(0, 1)) is None
    assert ranks.live(20) is None, "nor is it stuck"


def test_a_stuck_function_is_named() -> None:
    ranks = Ranks(
        at(0, 4, "lengths scores", function="my.py:score", function_seconds=70.0), at(1, 4, "lengths scores")
    )
    verdict = ranks.live(100)
    assert verdict is not None and not verdict.frozen
    assert verdict.message.startswith(
        "rank 0 is stuck in my.py:score, which has run for 70 seconds, in step 2"
    )


def test_the_rank_that_is_furthest_behind_keeps_the_others_waiting() -> None:
    verdict = Ranks(at(0, 5, "receive #2"), at(1, 3, "reallocate actor"), at(2, 5)).live(100)
    assert verdict is not None
    assert verdict.message == (
        "rank 1 is stuck in step 2, reallocate actor and keeps rank 0, 2 waiting;"
        " no progress on any rank for 60 s (launch.stall_minutes)"
    )


@pytest.mark.parametrize(
    ("busy", "message"),
    [((1,), "rank 1 computes without end"), ((), "all ranks wait for each other in a collective")],
)
def test_computing_is_told_from_a_collective(busy: tuple[int, ...], message: str) -> None:
    verdict = Ranks(at(0, 3), at(1, 3)).live(100, busy=busy)
    assert verdict is not None and verdict.message.startswith(message)


def test_progress_anywhere_is_no_stall_and_loading_may_take_longer() -> None:
    ranks = Ranks(at(0, 3), at(1, 3))
    for progress in range(10):
        assert ranks.live(50) is None
        ranks.signs[0] = replace(ranks.signs[0], progress=progress + 1)
    loading = Ranks(*(replace(at(rank, 0, ""), doing="load") for rank in range(2)))
    assert loading.live(3 * 60) is None
    verdict = loading.live(3 * 60)
    assert verdict is not None and verdict.message == (
        "all ranks wait for each other or a file, while loading;"
        " no progress on any rank for 4 min (launch.stall_minutes)"
    )


def test_a_rank_without_signs_of_life_that_works_is_not_frozen() -> None:
    """A starved process waits for a core, and a regular expression may keep the interpreter to itself."""
    code = "import sys, time; print(flush=True); sys.stdin.read(1)\nwhile True: pass"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        sign, probe = replace(at(0, 3), pid=process.pid), WorkProbe()
        while probe.works(sign):
            time.sleep(0.01)
        assert is_alive(process.pid)
        ranks = Ranks(sign)
        ranks.watch = SignWatch(LIMITS, lambda: ranks.now, probe.works)
        assert ranks.live(20, frozen=(0,)) is not None
        process.stdin.write(b" ")
        process.stdin.flush()
        while not probe.works(sign):
            time.sleep(0.01)
        ranks.watch = SignWatch(LIMITS, lambda: ranks.now, probe.works)
        assert ranks.live(50, frozen=(0,)) is None
        process.send_signal(signal.SIGSTOP)
        while probe.works(sign):
            time.sleep(0.01)
        assert ranks.live(6, frozen=(0,)) is not None
        process.kill()
    assert not is_alive(process.pid)


def test_what_others_wait_for_is_told_once_for_each_place() -> None:
    signs = {rank: at(rank, 3, "receive #2", waited=float(rank)) for rank in range(4)} | {4: at(4, 1)}
    assert describe_waiting(signs, culprit=4) == ["ranks 0-3 were in step 2, receive #2, for 3 seconds"]


def test_a_killed_rank_leaves_its_latest_instruction(tmp_path: Path) -> None:
    activity = Activity(3, FileBoard(tmp_path, 3))
    board = FileBoard(tmp_path, 3)
    activity.enter("train")
    board.post(activity.beat())
    activity.begin("run        actor.train", "actor.train", order=2, position=4)
    found = FileBoard(tmp_path).read()[3]
    assert (found.instruction, found.call, found.key) == ("run actor.train", "actor.train", (0, 2, 4))
    with activity.function("my.py:score"):
        board.post(activity.beat())
        assert FileBoard(tmp_path).read()[3].function == "my.py:score"
    activity.begin("run " + 1500 * "\u754c", "actor.train", order=2, position=5)
    for _ in range(3):
        board.post(activity.beat())
    found = FileBoard(tmp_path).read()[3]
    assert (found.beats, found.key) == (5, (0, 2, 5)), (
        "a sign that would not fit goes without the instruction"
    )
    assert FileBoard(tmp_path / "gone", 1).read() == {}


def test_status_files_are_read_back_and_unknown_keys_ignored(tmp_path: Path) -> None:
    status = RankStatus(rank=1, host="h", pid=2, time=3.0, started=1.0, doing="save", phase="writing")
    name_status_file(tmp_path, 1).write_text(status.to_text().replace("{", '{"of_a_later_version": 1, ', 1))
    name_status_file(tmp_path, 2).write_text("{")
    assert read_statuses(tmp_path) == {1: status}


def failure(**changes: object) -> Failure:
    return replace(Failure("", 1, 1, 0.0, DEATH, device=True), **changes)  # type: ignore[arg-type]


def test_restarts_are_counted_without_progress_alone() -> None:
    restarts = RestartCounter(2)
    decisions = [restarts.allow(failure(), step) for step in (5, 5, 5)]
    assert decisions == [True, True, False]
    restarts = RestartCounter(2)
    assert all(restarts.allow(failure(), step) for step in range(1, 20))
    assert restarts.total == 19 and restarts.progressed
    assert restarts.allow(failure(), 19) and not restarts.progressed, "steps that were done before"
    assert not restarts.allow(failure(final=True), 30)
    assert not RestartCounter(0).allow(failure(), 5)


def test_an_exception_before_the_first_step_would_come_again() -> None:
    assert not RestartCounter(3).allow(failure(trace="Traceback"), 0)
    assert RestartCounter(3).allow(failure(trace="Traceback"), 1)
    assert RestartCounter(3).allow(failure(), 0)


def test_a_device_that_fails_again_and_again_is_given_up() -> None:
    slots = Slots(4, LaunchConfig(tries=2))
    assert slots.count(failure(rank=2), progressed=False) == []
    assert slots.count(failure(rank=2), progressed=True) == []
    assert slots.count(failure(rank=2), progressed=False) == []
    assert slots.count(failure(rank=2), progressed=False) == [2]
    slots.keep([0, 1, 3])
    assert slots.count(failure(rank=2, device=False, distance=0), progressed=False) == []
    for _ in range(2):
        lost = slots.count(failure(rank=2), progressed=False)
    assert lost == [3], "by the number it had at first"
    assert Slots(2, LaunchConfig(tries=1, shrink=False)).count(failure(), progressed=False) == []


def test_gpus_that_were_hidden_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {None: "0,2", "4,5,6,7": "4,6", "": ""}
    for given, left in expected.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert _visible([0, 2]) == {"CUDA_VISIBLE_DEVICES": left}


def test_a_run_goes_on_with_the_gpus_that_torch_still_finds(capsys: pytest.CaptureFixture[str]) -> None:
    restarts, slots = RestartCounter(3), Slots(4, LaunchConfig())

    def shrink(devices: int) -> Start:
        return Start(Cluster(1, min(devices, 2)), ["train"])

    def go_on(there: int | None) -> Start | None:
        return _shrunken(slots, failure(), restarts, RanksEnd(), shrink, lambda: there)

    assert go_on(4) is None and go_on(None) is not None, "the second death in a row"
    slots = Slots(4, LaunchConfig())
    fewer = go_on(3)
    assert fewer is not None and slots.kept == [0, 1], "as many as the batch can be divided over"
    assert "there were 4 devices, and torch finds 3 now; going on with cluster=1x2" in capsys.readouterr().err
