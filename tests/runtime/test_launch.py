"""Processes start together and end together, however one of them ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from realrl.config.errors import UserError
from realrl.runtime.launch import report_user_error
from tests.conftest import World, figures
from tests.runtime.conftest import changes
from tests.runtime.processes import alive, end, ranks, start, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def launcher(world: World, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run in two processes that is under way and would go on for hours."""
    recipe = world.recipe("sft", tmp_path, cluster="1x2", training__steps=1_000_000)
    process = start("train", str(recipe))
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        until(lambda: metrics.exists() or process.poll() is not None)
        yield process
    finally:
        for pid in (*ranks(process.pid).values(), process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_rank_that_dies_ends_the_command(launcher: "subprocess.Popen[str]") -> None:
    processes = ranks(launcher.pid)
    assert processes.keys() == {0, 1}
    os.kill(processes[1], signal.SIGKILL)
    status, error = end(launcher)
    assert status == 128 + signal.SIGKILL
    assert "realrl: signal 9 (Killed) ended the process of rank 1\n" in error
    assert not any(map(alive, processes.values()))


def test_ranks_do_not_outlive_the_launcher(launcher: "subprocess.Popen[str]") -> None:
    processes = ranks(launcher.pid)
    assert len(processes) == 2
    launcher.kill()
    until(lambda: not any(map(alive, processes.values())))


def test_an_interrupt_ends_all_quietly(launcher: "subprocess.Popen[str]") -> None:
    processes = ranks(launcher.pid)
    os.killpg(launcher.pid, signal.SIGINT)
    status, error = end(launcher)
    assert status == 128 + signal.SIGINT and "Traceback" not in error
    assert not any(map(alive, processes.values()))


def test_torchrun_learns_what_our_launcher_does(world: World, tmp_path: Path, finished_on_two: Path) -> None:
    fields = {**changes(world, "ppo", tmp_path), "cluster": "auto", "data__eval_batch": 27}
    recipe = world.recipe("ppo", tmp_path, **fields)
    arguments = ("--standalone", "--nproc-per-node", "2", "-m", "realrl", "train", str(recipe))
    status, error = end(start(*arguments, module="torch.distributed.run"))
    assert status == 0, error
    for kind in ("train", "eval"):
        pairs = zip(figures(tmp_path / "run", kind), figures(finished_on_two, kind), strict=True)
        for ours, expected in pairs:
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("rank", "local_rank", "printed"),
    [("0", "0", "realrl: mend this\n"), ("1", "1", ""), ("8", "0", "realrl: rank 8: mend this\n")],
)
def test_under_torchrun_one_rank_of_each_node_speaks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    local_rank: str,
    printed: str,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    report_user_error(UserError("mend\nthis"))
    assert capsys.readouterr().err == printed
