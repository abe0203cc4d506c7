"""Two hosts with addresses of their own train as one does, and outlive a network that is gone for a while."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.runtime.processes.network import SILENCE
from tests.conftest import World, read_metrics
from tests.hosts.network import Hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

STARTING = 150.0
"""Seconds in which processes on a busy machine have begun, and short runs ended."""


class Run:
    """A run with a process on each of two hosts, whose output goes to files."""

    def __init__(self, hosts: Hosts, recipe: Path, restarts: int = 0) -> None:
        self._logs = [recipe.with_name(f"host{host}.log") for host in range(2)]
        self.processes = [
            hosts.torchrun(host, 2, self._logs[host], "train", str(recipe), restarts=restarts)
            for host in range(2)
        ]

    def said(self, host: int) -> str:
        return self._logs[host].read_text(errors="replace")

    def messages(self, host: int) -> list[str]:
        return [line for line in self.said(host).splitlines() if line.startswith("realrl: ")]

    def end(self) -> Sequence[int]:
        """Exit statuses, which must come soon."""
        deadline = time.monotonic() + STARTING
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running:\n{self.said(0)}\n{self.said(1)}")

    def until(self, condition: Callable[[], object], seconds: float = STARTING) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain:\n{self.said(0)}\n{self.said(1)}"
            time.sleep(0.05)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


STEPS = 10


@pytest.fixture(scope="module")
def expected(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO in two processes of one host."""
    directory = tmp_path_factory.mktemp("one")
    recipe = world.recipe("ppo", directory, cluster="1x2", training__steps=STEPS, checkpoint__every=2)
    assert run_app(["train", str(recipe)]) == 0
    return directory / "run"


def assert_same(run: Path, expected: Path) -> None:
    """Metrics are the same, and weights bit by bit."""
    for ours, theirs in zip(read_metrics(run), read_metrics(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    for model in ("final", "final-critic"):
        file = f"{model}/model.safetensors"
        assert (run / file).read_bytes() == (expected / file).read_bytes()


@pytest.mark.exhaustive
def test_two_hosts_far_apart_learn_what_one_learns(
    hosts: Hosts, world: World, tmp_path: Path, expected: Path
) -> None:
    hosts.delay(0.01)
    fields = {"training__steps": STEPS, "checkpoint__every": 2}
    run = Run(hosts, world.recipe("ppo", tmp_path, cluster="2x1", **fields))
    assert run.end() == [0, 0], run.said(0) + run.said(1)
    assert_same(tmp_path / "run", expected)


@pytest.mark.exhaustive
def test_a_cut_cable_ends_ranks_on_both_sides_which_continue_once_it_is_back(
    hosts: Hosts, world: World, tmp_path: Path, expected: Path
) -> None:
    fields = {"training__steps": STEPS, "checkpoint__every": 2}
    run = Run(hosts, world.recipe("ppo", tmp_path, cluster="2x1", **fields), restarts=3)
    run.until((tmp_path / "run" / "checkpoints" / "step-000002").exists)
    hosts.cut(1)
    # Not 30 minutes: the time after which a collective operation gives up.
    run.until(lambda: run.messages(0) and run.messages(1), 2 * SILENCE)
    for host in range(2):
        assert f"rank {host}: lost connection to a peer rank" in run.messages(host)[0], run.said(host)
    assert len(read_metrics(tmp_path / "run")) < STEPS
    hosts.heal()
    assert run.end() == [0, 0], run.said(0) + run.said(1)
    assert "note: continues after step " in run.said(0) + run.said(1)
    assert_same(tmp_path / "run", expected)


@pytest.mark.exhaustive
def test_every_host_must_see_the_run_directory(hosts: Hosts, world: World, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert hosts.start(1, ["mount", "-t", "tmpfs", "none", str(own)], tmp_path / "mount.log").wait() == 0
    run = Run(hosts, world.recipe("sft", tmp_path, cluster="2x1", run_dir=str(own / "run")))
    assert 0 not in run.end()
    for rank, prefix in enumerate(("realrl: ", "realrl: rank 1: ")):
        wanted = f"{prefix}run_dir={own}/run is not the same directory on all nodes: node "
        assert any(line.startswith(wanted) for line in run.messages(rank)), run.said(rank)
