"""Heartbeats tell frozen ranks, stuck functions and stuck collectives apart; restarts are counted."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.plan.cluster import Cluster
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.launcher.launch import Start, find_smaller_start
from realrl.runtime.launcher.local import hide_gpus
from realrl.runtime.supervision.board import FileBoard, WorkProbe, is_alive
from realrl.runtime.supervision.failures import DEATH, Failure
from realrl.runtime.supervision.heartbeat import (
    Activity,
    Heartbeat,
    name_status_file,
    read_statuses,
    write_status,
)
from realrl.runtime.supervision.restart_policy import RestartPolicy
from realrl.runtime.supervision.watchdog import GAP, Watchdog, describe_others

LIMITS = LaunchConfig(freeze_seconds=5, stall_minutes=1)


class Ranks:
    """Ranks that beat every second before a watcher, by a clock of their own."""

    def __init__(self, *heartbeats: Heartbeat) -> None:
        self.now = 100.0
        self.heartbeats = dict(enumerate(heartbeats))
        self.watchdog = Watchdog(LIMITS, clock=lambda: self.now)

    def live(
        self, seconds: int, *, frozen: tuple[int, ...] = (), busy: tuple[int, ...] = ()
    ) -> Failure | None:
        """Let time pass without progress."""
        for _ in range(seconds):
            self.now += 1
            for rank, heartbeat in self.heartbeats.items():
                cpu = heartbeat.cpu_seconds + (rank in busy)
                if rank not in frozen:
                    self.heartbeats[rank] = replace(heartbeat, beats=heartbeat.beats + 1, cpu_seconds=cpu)
            failure = self.watchdog.check(self.heartbeats)
            if failure is not None:
                return failure
        return None


def at(rank: int, position: int, instruction: str = "run actor.train", **more: object) -> Heartbeat:
    """A rank in the second step, at the instruction of this position."""
    heartbeat = Heartbeat(
        rank=rank, host="h", pid=rank, time=0.0, started=0.0, step=1, doing="train", position=position
    )
    return replace(heartbeat, instruction=instruction, **more)  # type: ignore[arg-type]


def test_a_rank_without_heartbeats_is_frozen_whatever_others_do() -> None:
    ranks = Ranks(at(0, 3, "receive #2"), at(1, 2))
    assert ranks.live(30) is None
    found = ranks.live(30, frozen=(1,))
    assert found is not None and found.device
    assert found.message == (
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
    found = ranks.live(100)
    assert found is not None and not found.device
    assert found.message.startswith("rank 0 is stuck in my.py:score, which has run for 70 seconds, in step 2")


def test_the_rank_that_is_furthest_behind_keeps_the_others_waiting() -> None:
    found = Ranks(at(0, 5, "receive #2"), at(1, 3, "reallocate actor"), at(2, 5)).live(100)
    assert found is not None
    assert found.message == (
        "rank 1 is stuck in step 2, reallocate actor and keeps rank 0, 2 waiting;"
        " no progress on any rank for 60 s (launch.stall_minutes)"
    )


@pytest.mark.parametrize(
    ("busy", "message"),
    [((1,), "rank 1 computes without end"), ((), "all ranks wait for each other in a collective")],
)
def test_computing_is_told_from_a_collective(busy: tuple[int, ...], message: str) -> None:
    found = Ranks(at(0, 3), at(1, 3)).live(100, busy=busy)
    assert found is not None and found.message.startswith(message)


def test_progress_anywhere_is_no_stall_and_loading_may_take_longer() -> None:
    ranks = Ranks(at(0, 3), at(1, 3))
    for progress in range(10):
        assert ranks.live(50) is None
        ranks.heartbeats[0] = replace(ranks.heartbeats[0], progress=progress + 1)
    loading = Ranks(*(replace(at(rank, 0, ""), doing="load") for rank in range(2)))
    assert loading.live(3 * 60) is None
    found = loading.live(3 * 60)
    assert found is not None and found.message == (
        "all ranks wait for each other or a file, while loading;"
        " no progress on any rank for 4 min (launch.stall_minutes)"
    )


def test_a_rank_without_heartbeats_that_works_is_not_frozen() -> None:
    """A starved process waits for a core, and a regular expression may keep the interpreter to itself."""
    code = "import sys, time; print(flush=True); sys.stdin.read(1)\nwhile True: pass"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        heartbeat, probe = replace(at(0, 3), pid=process.pid), WorkProbe()
        while probe.works(heartbeat):
            time.sleep(0.01)
        assert is_alive(process.pid)
        ranks = Ranks(heartbeat)
        ranks.watchdog = Watchdog(LIMITS, probe.works, lambda: ranks.now)
        assert ranks.live(20, frozen=(0,)) is not None
        process.stdin.write(b" ")
        process.stdin.flush()
        while not probe.works(heartbeat):
            time.sleep(0.01)
        ranks.watchdog = Watchdog(LIMITS, probe.works, lambda: ranks.now)
        assert ranks.live(50, frozen=(0,)) is None
        process.send_signal(signal.SIGSTOP)
        while probe.works(heartbeat):
            time.sleep(0.01)
        assert ranks.live(6, frozen=(0,)) is not None
        process.kill()
    assert not is_alive(process.pid)


def test_what_others_wait_for_is_told_once_for_each_place() -> None:
    heartbeats = {rank: at(rank, 3, "receive #2", since=-float(rank)) for rank in range(4)} | {4: at(4, 1)}
    assert describe_others(heartbeats, culprit=4) == ["ranks 0-3 were in step 2, receive #2, for 3 seconds"]


def test_a_killed_rank_leaves_its_latest_instruction(tmp_path: Path) -> None:
    activity, board = Activity(3), FileBoard(tmp_path, 3)
    activity.on_change = lambda: board.publish(activity.describe())
    activity.enter("train")
    board.publish(activity.beat())
    activity.begin("run        actor.train", "actor.train", order=2, position=4)
    found = FileBoard(tmp_path).read_heartbeats()[3]
    assert (found.instruction, found.call, found.key) == ("run actor.train", "actor.train", (0, 2, 4))
    with activity.run_function("my.py:score"):
        board.publish(activity.beat())
        assert FileBoard(tmp_path).read_heartbeats()[3].function == "my.py:score"
    activity.begin("run " + 1500 * "\u754c", "actor.train", order=2, position=5)
    for _ in range(3):
        board.publish(activity.beat())
    found = FileBoard(tmp_path).read_heartbeats()[3]
    assert (found.beats, found.key) == (5, (0, 2, 5)), "a heartbeat that is too long has no instruction"
    assert FileBoard(tmp_path / "gone", 1).read_heartbeats() == {}


def test_status_files_of_other_versions_are_read(tmp_path: Path) -> None:
    status = Heartbeat(rank=1, host="h", pid=2, time=3.0, started=1.0, doing="save", phase="writing")
    (tmp_path / "ranks").mkdir()
    write_status(tmp_path, status)
    file = name_status_file(tmp_path, 1)
    file.write_text(file.read_text().replace("{", '{"of_a_later_version": 1, ', 1))
    old = {"rank": 0, "host": "h", "pid": 2, "time": 3.0, "started": 1, "doing": "train", "since": 2.5}
    name_status_file(tmp_path, 0).write_text(json.dumps(old))
    for rank, text in enumerate(("{", '{"rank": "2"}', "[]", json.dumps(old | {"doing": "sleep"})), 2):
        name_status_file(tmp_path, rank).write_text(text)
    found = read_statuses(tmp_path)
    assert found.keys() == {0, 1} and found[1] == status
    assert (found[0].place, found[0].waited) == ("in step 1", 0.5)


def failure(**changes: object) -> Failure:
    return replace(Failure("", 1, 1, 0.0, DEATH, device=True), **changes)  # type: ignore[arg-type]


def policy(devices: int = 2, **settings: object) -> RestartPolicy:
    return RestartPolicy(devices, LaunchConfig(**settings))  # type: ignore[arg-type]


def test_restarts_are_counted_without_progress_alone() -> None:
    restarts = policy(max_restarts=2)
    decisions = [restarts.count(failure(), step=step, finished=True) for step in (5, 5, 5)]
    assert decisions == [True, True, False]
    restarts = policy(max_restarts=2)
    assert all(restarts.count(failure(), step=step, finished=True) for step in range(1, 20))
    assert restarts.total == 19 and restarts.in_vain == 1
    assert restarts.count(failure(), step=19, finished=True) and restarts.in_vain == 2, (
        "steps of an earlier start"
    )
    assert not restarts.count(failure(final=True), step=30, finished=True)
    assert not policy(max_restarts=0).count(failure(), step=5, finished=True)


def test_an_exception_before_the_first_step_would_come_again() -> None:
    assert not policy().count(failure(trace="Traceback"), step=0, finished=False)
    assert policy().count(failure(trace="Traceback"), step=1, finished=True)
    assert policy().count(failure(), step=0, finished=False)


def test_a_device_that_fails_again_and_again_is_given_up() -> None:
    restarts = policy(4, tries=2, max_restarts=10)

    def count(cause: Failure, step: int) -> list[int]:
        assert restarts.count(cause, step=step, finished=True)
        return restarts.broken_devices

    assert count(failure(rank=2), 0) == []
    assert count(failure(rank=2), 1) == [], "with progress since"
    assert count(failure(rank=2), 1) == []
    assert count(failure(rank=2), 1) == [2]
    restarts.shrink([0, 1, 3])
    assert count(failure(rank=2, device=False, distance=0), 1) == []
    assert count(failure(rank=2), 1) == []
    assert count(failure(rank=2), 1) == [3], "by the number it had at first"


def test_gpus_that_were_hidden_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {None: "0,2", "4,5,6,7": "4,6", "": ""}
    for given, left in expected.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert hide_gpus([0, 2]) == {"CUDA_VISIBLE_DEVICES": left}


def test_a_run_goes_on_with_the_gpus_that_torch_still_finds(capsys: pytest.CaptureFixture[str]) -> None:
    def shrink(devices: int) -> Start:
        return Start(Cluster(1, min(devices, 2)), ["train"])

    restarts = policy(4)
    assert find_smaller_start(restarts, failure(), shrink, lambda: 4) is None
    assert find_smaller_start(restarts, failure(), shrink, lambda: None) is None
    assert find_smaller_start(restarts, failure(), shrink, lambda: 3) is not None
    assert restarts.devices == [0, 1], "as many as the batch can be divided over"
    assert (
        "there were 4 devices, and torch finds 3 now; continuing with cluster=1x2" in capsys.readouterr().err
    )
