"""Scripts that srun starts once for each process. Its variables are set here; Slurm itself is not needed."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realrl.testing.compare import compare_runs
from tests.api.test_python_runs import SCRIPT as TRAIN
from tests.api.test_session import SCRIPT as LOOP
from tests.api.test_session import assert_equal_models, read_prompts
from tests.conftest import World
from tests.runtime.processes import PATIENCE


def srun(
    command: list[str], directory: Path, *, nodes: int = 1, **changes: str
) -> list["subprocess.CompletedProcess[str]"]:
    """Start two processes as srun does, on one or two nodes that are both this machine."""
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2" if nodes == 1 else "1(x2)",
        "SLURM_STEP_NODELIST": "n1" if nodes == 1 else "localhost,localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "MASTER_PORT": str(find_port()),
    }
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    processes = []
    for rank in range(2):
        place = (rank, 0) if nodes == 1 else (0, rank)
        own = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(place[0]),
            "SLURM_NODEID": str(place[1]),
            "PYTHONPATH": path,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=directory,
                env=os.environ | step | own | changes,
            )
        )
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE)
            found.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return found


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_succeeded(found: list["subprocess.CompletedProcess[str]"]) -> None:
    for done in found:
        assert done.returncode == 0, done.stderr


def test_a_script_trains_with_the_processes_of_srun_on_two_nodes(world: World, tmp_path: Path) -> None:
    settings = {"actor": world.actor, "data": str(world.root / "ppo.jsonl"), "reward": "correct"}
    codes = [
        TRAIN.format(**settings, cluster=cluster, run=str(tmp_path / name))
        for name, cluster in (("alone", "1x1"), ("together", "auto"))
    ]
    (tmp_path / "alone.py").write_text(codes[0])
    subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "script.py").write_text(codes[1])
    assert_succeeded(srun(["script.py"], tmp_path, nodes=2))
    runs = tmp_path / "together", tmp_path / "alone"
    compare_runs(*runs, name="together", than="in one process", tolerance=1e-4)


def test_a_command_trains_with_the_processes_of_srun(world: World, tmp_path: Path) -> None:
    recipe = world.recipe("sft", tmp_path, cluster="auto", training__steps=1)
    found = srun(["-m", "realrl", "train", str(recipe)], tmp_path)
    assert_succeeded(found)
    assert "done in" in found[0].stderr and found[1].stderr == ""
    assert "1x2" in (tmp_path / "run" / "plan.yaml").read_text()


@pytest.mark.exhaustive
def test_a_session_makes_its_calls_on_all_processes_of_srun(world: World, tmp_path: Path) -> None:
    code = LOOP.format(actor=world.actor, prompts=read_prompts(world, 4), plan="symmetric")
    (tmp_path / "script.py").write_text(code)
    alone = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    subprocess.run(
        [sys.executable, "script.py", "alone"], cwd=tmp_path, env=alone | {"CLUSTER": "1x1"}, check=True
    )
    assert_succeeded(srun(["script.py", "saved"], tmp_path))
    found = [read_results(tmp_path, f"saved-{rank}") for rank in range(2)]
    expected = read_results(tmp_path, "alone-0")
    assert found[0] == found[1] and found[0][0] == expected[0]
    assert found[0][1:3] == pytest.approx(expected[1:3], rel=1e-4, abs=1e-6)
    assert_equal_models(tmp_path / "alone", tmp_path / "saved", 1e-5)


def read_results(directory: Path, name: str) -> list[Any]:
    found: list[Any] = json.loads((directory / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "3"}, "SLURM_STEP_NUM_TASKS=3, .*: srun does not set these so"),
        ({"SLURM_STEP_NODELIST": "no.such.host.invalid,n2"}, "has no way to no.such.host.invalid"),
    ],
    ids=["contradiction", "unknown host"],
)
@pytest.mark.parametrize("call", ["train", "session"])
def test_a_mistake_is_told_once(
    changes: dict[str, str], message: str, call: str, world: World, tmp_path: Path
) -> None:
    code = {
        "train": f"realrl.SFT({world.actor!r}, data='d.jsonl', steps=1, run_dir='run').train()",
        "session": f"realrl.Session({{'actor': {world.actor!r}}})",
    }[call]
    (tmp_path / "script.py").write_text(f"import realrl\n{code}\n")
    found = srun(["script.py"], tmp_path, nodes=2, **changes)
    for done in found:
        *frames, last = done.stderr.splitlines()
        assert done.returncode == 1 and re.match(f"realrl.UserError: .*{message}", last)
        assert "line 2" in frames[1] and "/realrl/" not in done.stderr


def test_a_port_in_use_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"import realrl\nrealrl.Session({{'actor': {world.actor!r}}}, device='cpu')\n"
    )
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = f"RANK='0', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='{port}'"
        code = f"import os; os.environ.update({place})"
        (tmp_path / "first.py").write_text(f"{code}\n{(tmp_path / 'script.py').read_text()}")
        done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"realrl.RunError: rank 0: the ranks cannot meet at 127.0.0.1:{port}"), done.stderr
