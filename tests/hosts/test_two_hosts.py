"""Two hosts with addresses of their own train as one does, and notice when the network between them is gone."""

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.runtime.processes.network import SILENCE
from tests.conftest import World, read_metrics
from tests.hosts.network import Hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

STARTING = 120.0
"""Seconds in which processes on a busy machine have begun, and short runs ended."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def start(hosts: Hosts, recipe: Path, **options: int) -> list["subprocess.Popen[str]"]:
    """Start a run with a process on each of two hosts."""
    return [hosts.torchrun(host, 2, 1, "train", str(recipe), **options) for host in range(2)]


def end(processes: Sequence["subprocess.Popen[str]"], within: float) -> list[tuple[int, str]]:
    """Exit status and standard error of commands, which must end within some seconds."""
    deadline = time.monotonic() + within
    return [
        (process.wait(max(0.1, deadline - time.monotonic())), process.communicate()[1])
        for process in processes
    ]


def messages(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("realrl: ")]


def test_two_hosts_far_apart_learn_what_one_learns(hosts: Hosts, world: World, tmp_path: Path) -> None:
    fields = {"training__steps": 2}
    (tmp_path / "one").mkdir()
    assert run_app(["train", str(world.recipe("ppo", tmp_path / "one", cluster="1x2", **fields))]) == 0
    hosts.delay(0.05)
    for status, error in end(start(hosts, world.recipe("ppo", tmp_path, cluster="2x1", **fields)), STARTING):
        assert status == 0, error
    ours, expected = tmp_path / "run", tmp_path / "one" / "run"
    for line, other in zip(read_metrics(ours), read_metrics(expected), strict=True):
        assert line == pytest.approx(other, rel=1e-6, abs=1e-9)
    for model in ("final", "final-critic"):
        file = f"{model}/model.safetensors"
        assert (ours / file).read_bytes() == (expected / file).read_bytes()


def test_a_cut_cable_ends_the_run_on_both_hosts(hosts: Hosts, world: World, tmp_path: Path) -> None:
    recipe = world.recipe("ppo", tmp_path, cluster="2x1", training__steps=1_000_000)
    processes = start(hosts, recipe)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + STARTING
    while not metrics.exists() or len(read_metrics(tmp_path / "run")) < 2:
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.1)
    hosts.cut(1)
    for rank, (status, error) in enumerate(end(processes, within=2.5 * SILENCE)):
        prefix = f"rank {rank}: another rank has gone: "
        assert status != 0 and re.search(f"^realrl: {prefix}.*timed out", error, re.MULTILINE), error
        assert "unexpected" not in error


def test_every_host_must_see_the_run_directory(hosts: Hosts, world: World, tmp_path: Path) -> None:
    recipe = world.recipe("sft", tmp_path, cluster="2x1", run_dir=str(tmp_path / "own" / "run"))
    (tmp_path / "own").mkdir()
    assert hosts.start(1, ["mount", "-t", "tmpfs", "none", str(tmp_path / "own")]).wait() == 0
    for rank, (status, error) in enumerate(end(start(hosts, recipe), STARTING)):
        prefix = "" if rank == 0 else f"rank {rank}: "
        said = f"realrl: {prefix}run_dir={tmp_path}/own/run is not the same directory on all nodes: node 1 (host1)"
        assert status != 0 and [line for line in messages(error) if line.startswith(said)], error
