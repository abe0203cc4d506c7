"""A run on a Ray cluster of two nodes learns what local processes learn, and starts again when a rank dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World, read_metrics
from tests.hosts.ray_nodes import make_ray_nodes

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'"
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """A node of two CPUs and one of one, of a Ray cluster on this machine."""
    with make_ray_nodes(2, 1):
        yield


def start(recipe: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "realrl", "train", str(recipe)], stderr=subprocess.PIPE, text=True
    )


@needs_ray
def test_ranks_on_ray_learn_the_same_although_one_dies(nodes: None, world: World, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    fields = {"training__steps": 30, "checkpoint__every": 2}
    assert run_app(["train", str(world.recipe("ppo", tmp_path / "local", cluster="1x2", **fields))]) == 0
    recipe = world.recipe("ppo", tmp_path, cluster="2x1", launch__by="ray", **fields)
    run, process = start(recipe), None
    statuses, deadline = tmp_path / "run" / "ranks" / "rank-1.json", time.monotonic() + 120
    while process is None:
        assert time.monotonic() < deadline and run.poll() is None, run.communicate()
        if statuses.exists() and list((tmp_path / "run" / "checkpoints").glob("step-*")):
            process = json.loads(statuses.read_text())["pid"]
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    _, error = run.communicate(timeout=240)
    assert run.returncode == 0, error
    (restart,) = [line for line in error.splitlines() if "starting again" in line]
    # Seen by the actor that holds it, or by the rank beside it.
    assert restart.startswith(
        ("note: signal 9 (Killed) ended the process of rank 1", "note: the process of rank 1 died in ")
    )
    assert "starting again (restart 1," in restart and "done in " in error
    for line, expected in zip(
        read_metrics(tmp_path / "run"), read_metrics(tmp_path / "local" / "run"), strict=True
    ):
        assert line == pytest.approx(expected, rel=1e-6, abs=1e-9)
    file = "final/model.safetensors"
    assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "local" / "run" / file).read_bytes()


@needs_ray
def test_nodes_of_a_ray_cluster_may_differ_in_size(nodes: None, world: World, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    assert run_app(["train", str(world.recipe("sft", tmp_path / "local", cluster="1x3"))]) == 0
    run = start(world.recipe("sft", tmp_path, cluster="1x1+1x2", launch__by="ray"))
    _, error = run.communicate(timeout=240)
    assert run.returncode == 0, error
    file = "final/model.safetensors"
    assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "local" / "run" / file).read_bytes()


@needs_ray
def test_sigterm_has_ranks_on_ray_save_and_end(nodes: None, world: World, tmp_path: Path) -> None:
    run = start(world.recipe("sft", tmp_path, cluster="2x1", launch__by="ray", training__steps=10**6))
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM, error
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(checkpoint.name.partition("-")[2])
    assert len(read_metrics(tmp_path / "run")) >= step
    (said,) = [line for line in error.splitlines() if line.startswith("realrl: ")]
    assert said.startswith(f"realrl: ended by SIGTERM after step {step} of 1000000; saved: "), error


@needs_ray
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"cluster": "3x1"},
            "cluster=3x1 needs 3 nodes with 1 CPUs each; the nodes of the Ray cluster have",
        ),
        (
            {"cluster": "1x1+1x3"},
            "cluster=1x1+1x3 needs 1 nodes with 1 CPUs each and 1 nodes with 3 CPUs each; the nodes of the Ray",
        ),
        ({"cluster": "2x1", "data__train": "/no/such.jsonl"}, "data file /no/such.jsonl does not exist"),
    ],
)
def test_mistakes_are_one_message_of_a_run_on_ray(
    nodes: None, fields: dict[str, str], message: str, world: World, tmp_path: Path
) -> None:
    run = start(world.recipe("ppo", tmp_path, launch__by="ray", **fields))
    _, error = run.communicate(timeout=240)
    assert run.returncode == 2
    assert [line for line in error.splitlines() if line.startswith("realrl: ")] == error.splitlines()[-1:]
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("cluster", ["2x1", "auto"])
def test_a_run_on_ray_needs_ray_and_a_cluster(
    cluster: str,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("realrl.runtime.launcher.on_ray.find_spec", lambda _: None)
    assert run_app(["train", str(world.recipe("ppo", tmp_path, cluster=cluster, launch__by="ray"))]) == 2
    wanted = {"2x1": "pip install 'realrl[ray]'", "auto": "cluster=auto does not say how many nodes"}[cluster]
    assert wanted in capsys.readouterr().err
