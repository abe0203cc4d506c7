"""The script of `realrl launch slurm` runs on two nodes, ends before its time limit, and continues afterwards.

Slurm's commands are played by scripts: two nodes are two process groups of this machine.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World, read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="plays Slurm's commands with bash and /proc")

COMMANDS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" &
    echo $! >> "$PLAY/tasks"
done
status=0
for task in $(jobs -p); do wait "$task" || status=$?; done
exit $status
""",
    # Slurm signals every process of a task, its children, too.
    "scancel": """
[[ $1 == --signal=TERM && $2 == "$SLURM_JOB_ID" ]] || exit 1
for task in $(cat "$PLAY/tasks"); do
    kill -TERM "$task" $(cat /proc/$task/task/$task/children)
done
""",
    "scontrol": """
echo "$*" >> "$PLAY/scontrol"
[[ $1 == show ]] && echo localhost && echo localhost
true
""",
}


def play(directory: Path) -> dict[str, str]:
    """Environment in which Slurm's commands are ours."""
    commands = directory / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash{text}")
        (commands / name).chmod(0o755)
    own = {"PLAY": str(directory), "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost,localhost"}
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **own, "PATH": path}


def run_job(script: Path, variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    with (script.parent / "output").open("ab") as output:
        return subprocess.Popen(["bash", str(script)], env=variables, stdout=output, stderr=output)


@pytest.mark.exhaustive
def test_a_job_that_nears_its_limit_is_requeued_and_continues(world: World, tmp_path: Path) -> None:
    recipe, script = world.recipe("ppo", tmp_path, cluster="2x1", training__steps=20), tmp_path / "job.sh"
    assert run_app(["launch", "slurm", str(recipe), "--out", str(script)]) == 0
    variables, metrics = play(tmp_path), tmp_path / "run" / "metrics.jsonl"
    job = run_job(script, variables)
    try:
        deadline = time.monotonic() + 120
        while not metrics.exists() or len(read_metrics(tmp_path / "run")) < 2:
            assert time.monotonic() < deadline and job.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) != 0
        output = (tmp_path / "output").read_text()
        assert "realrl: ended by SIGTERM after step " in output and "ended at once" not in output, output
        assert "requeue 4711" in (tmp_path / "scontrol").read_text().splitlines()
        done = len(read_metrics(tmp_path / "run"))
        assert 2 <= done < 20
        (tmp_path / "tasks").unlink()
        job = run_job(script, {**variables, "SLURM_RESTART_COUNT": "1"})
        assert job.wait(120) == 0, (tmp_path / "output").read_text()
        assert len(read_metrics(tmp_path / "run")) == 20 and (tmp_path / "run" / "summary.json").exists()
        assert (tmp_path / "scontrol").read_text().count("requeue") == 1
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGUSR1)
            job.wait(60)
