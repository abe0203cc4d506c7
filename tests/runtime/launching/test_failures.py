"""Ranks that are killed, stopped or stuck in two processes: the first culprit is named, and the run goes on."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realrl.runtime.supervision.heartbeat import read_statuses
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE
from tests.conftest import World, read_metrics, thin
from tests.runtime.processes import alive, end, ranks, start, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Runs:
    """Runs of two processes, with code that Python executes at the start of each."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world, self.directory = world, directory
        self.run_dir = directory / "run"
        self.started: list[Any] = []

    def start(self, algorithm: str = "sft", code: str = "", torchrun: bool = False, **changes: Any) -> Any:
        """Start a recipe; `code` runs in ranks, where `rank` and `count` (of restarts) are known."""
        patches, temporary = self.directory / "patches", self.directory / "temporary"
        patches.mkdir()
        temporary.mkdir()
        head = [
            "import os",
            "rank, count = os.environ.get('RANK'), os.environ.get('REALRL_RESTART', '0')",
            "if rank is not None:",
            "    from realrl.runtime.worker.worker import Worker",
        ]
        (patches / "sitecustomize.py").write_text(
            "\n".join([*head, *(f"    {x}" for x in code.splitlines())])
        )
        recipe = self.world.recipe(algorithm, self.directory, **{"cluster": "1x2", **changes})
        path = os.pathsep.join([str(patches), *filter(None, [os.environ.get("PYTHONPATH")])])
        arguments, module = ["train", str(recipe)], "realrl"
        if torchrun:
            arguments = ["--standalone", "--nproc-per-node", "2", "-m", "realrl", *arguments]
            module = "torch.distributed.run"
        process = start(
            *arguments, module=module, TMPDIR=str(temporary), PYTHONPATH=path, OMP_NUM_THREADS="1"
        )
        self.started.append(process)
        return process

    def under_way(self, process: Any) -> None:
        """Wait until steps are being made."""
        until(lambda: (self.run_dir / "metrics.jsonl").exists() or process.poll() is not None)

    def leftover(self) -> list[str]:
        """What runs have left in the directory of temporary files."""
        return [name for name in os.listdir(self.directory / "temporary") if name.startswith("realrl-")]

    def log(self, rank: int) -> str:
        """Log of a rank."""
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text()


@pytest.fixture
def runs(world: World, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(world, tmp_path)
    yield made
    for process in made.started:
        for pid in (*ranks(process.pid).values(), process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


FROZEN = r"rank 1 is frozen: no sign of life for \d+ seconds; last seen "
DIED = "the process of rank 1 died "


@pytest.mark.parametrize(
    ("torchrun", "number", "said"),
    [
        (False, signal.SIGSTOP, FROZEN),
        (True, signal.SIGKILL, DIED),
        pytest.param(True, signal.SIGSTOP, FROZEN, marks=pytest.mark.exhaustive),
    ],
)
def test_a_frozen_or_dead_rank_is_named_with_its_last_instruction(
    runs: Runs, torchrun: bool, number: signal.Signals, said: str
) -> None:
    more = {"cluster": "auto"} if torchrun else {}
    launcher = runs.start(
        training__steps=10**6, launch={"freeze_seconds": 6, "max_restarts": 0}, torchrun=torchrun, **more
    )
    runs.under_way(launcher)
    processes = ranks(launcher.pid)
    os.kill(processes[1], number)
    status, error = end(launcher)
    assert status == 1
    place = r"(at the start|while loading|in step \d+|while saving after step \d+)"
    assert re.search(f"realrl: {said}{place}", error), error
    assert re.search(rf"note: rank 0 was {place}.*, for \d+ seconds\n", error), error
    assert "in execute" in runs.log(0), "its stack"
    assert not any(map(alive, processes.values())) and (torchrun or not runs.leftover())


STUCK = """
import time

def score(completions):
    time.sleep(10**6)
"""


def test_a_stuck_reward_function_is_told_from_a_stuck_collective(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(STUCK)
    launcher = runs.start(
        "ppo",
        reward=f"{tmp_path / 'my.py'}:score",
        models={"actor": {"path": runs.world.actor}, "critic": {"path": runs.world.reward}},
        launch={"stall_minutes": 0.2, "max_restarts": 0},
    )
    status, error = end(launcher)
    said = rf"realrl: rank \d is stuck in {tmp_path}/my.py:score, which has run for \d+ seconds, in step 1, "
    assert status == 1 and re.search(said, error), error
    assert "in score" in runs.log(0) + runs.log(1)


KILLED = """
import signal
_run = Worker.run_batches
def run(self, program, batches, *rest):
    if COUNT and rank == RANK and batches[0].input.sampling_seed.step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)
    return _run(self, program, batches, *rest)
Worker.run_batches = run
"""


def killed(count: str, rank: str, step: int) -> str:
    """Code that kills a rank at the beginning of a step."""
    return KILLED.replace("COUNT", count).replace("RANK", rank).replace("STEP", str(step))


SLOW_END = """
import time
from realrl.runtime.output.rundir import RunDirectory
_finish = RunDirectory.finish
def finish(self, summary):
    time.sleep(5)
    _finish(self, summary)
RunDirectory.finish = finish
"""
"""The first rank takes its time for the last files, while the others wait for it."""


def test_a_run_is_started_again_after_a_rank_was_killed(runs: Runs) -> None:
    code = killed("count == '0'", "'1'", 2) + SLOW_END
    status, error = end(runs.start("sft", code, launch={"freeze_seconds": 3}), starts=2)
    assert status == 0, error
    said = (
        r"note: signal 9 \(Killed\) ended the process of rank 1 in step [23].*; starting again \(restart 1, 1"
    )
    assert re.search(said, error), error
    assert (runs.run_dir / "summary.json").exists() and len(read_metrics(runs.run_dir)) >= 5
    statuses = read_statuses(runs.run_dir)
    assert [(s.doing, s.step, s.restart) for s in statuses.values()] == [("end", 5, 1)] * 2
    assert not runs.leftover()


def test_a_device_that_is_gone_for_good_is_done_without(runs: Runs) -> None:
    code = killed("os.environ['REALRL_SLOT'] == '0'", "rank", 0)
    status, error = end(runs.start("sft", code, launch={"tries": 1, "max_restarts": 1}), starts=2)
    assert status == 0, error
    assert "note: device 0 has failed too often" in error and "continuing with cluster=1x1" in error
    assert json.loads((runs.run_dir / "summary.json").read_text())["steps"] == 5
    assert not runs.leftover()


@pytest.mark.parametrize("stopped", thin([True, False], 2))
def test_ranks_do_not_outlive_their_launcher_even_if_one_is_stopped(runs: Runs, stopped: bool) -> None:
    launcher = runs.start(training__steps=10**6)
    runs.under_way(launcher)
    processes = ranks(launcher.pid)
    assert processes.keys() == {0, 1}
    if stopped:
        os.kill(processes[1], signal.SIGSTOP)
    launcher.kill()
    until(lambda: not any(map(alive, processes.values())))
    until(lambda: not runs.leftover())


@pytest.mark.exhaustive
def test_a_run_of_one_process_is_started_again_after_it_was_killed(runs: Runs) -> None:
    code = killed("count == '0'", "'0'", 2)
    status, error = end(runs.start("sft", code, cluster="1x1", checkpoint__every=1), starts=2)
    assert status == 0, error
    said = r"note: signal 9 \(Killed\) ended the process of rank 0 in step [23].*; starting again"
    assert re.search(said, error) and "note: continues after step " in error, error
    assert len(read_metrics(runs.run_dir)) == 5


def test_a_debugger_follows_a_run_of_one_process(runs: Runs) -> None:
    recipe = runs.world.recipe("sft", runs.directory, cluster="1x1")
    stop = ["-c", "!import realrl.runtime.train as training", "-c", "b training.train", "-c", "c"]
    command = [sys.executable, "-m", "pdb", *stop, "-m", "realrl", "train", str(recipe)]
    said = "p 'here', experiment.algorithm\nq\n"
    done = subprocess.run(command, input=said, capture_output=True, text=True)
    assert "('here', 'sft')" in done.stdout, done.stdout + done.stderr


ALL_AT_ONCE = """
import os
import time
from realrl.runtime.supervision import orphans

orphans.find_ranks = lambda scratch: [os.getpid()]
orphans.end_with_launcher(0)
time.sleep(100)
"""
"""A rank whose launcher has gone, and whom a sibling kills when it would kill that one."""


def test_ranks_that_end_each_other_leave_no_scratch_directory(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "inside").mkdir(parents=True)
    environment = {**os.environ, SCRATCH_VARIABLE: str(scratch)}
    done = subprocess.run([sys.executable, "-c", ALL_AT_ONCE], env=environment)
    assert done.returncode == -signal.SIGKILL and not scratch.exists()
