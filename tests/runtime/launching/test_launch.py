"""Processes start together and end together, however one of them ends, and one error message tells why."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.runtime.launcher import local
from tests.conftest import World, read_metrics, thin
from tests.forked import ForkedRank
from tests.runtime.conftest import changes
from tests.runtime.processes import alive, end, ranks, start, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

Launcher = subprocess.Popen[str]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where a command makes its temporary files."""
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.fixture
def launch(world: World, tmp_path: Path, temporary: Path) -> Iterator[Callable[..., Launcher]]:
    """Starts a run on a cluster that is under way, has saved a checkpoint, and would go on for hours."""
    started = []

    def launch(cluster: str, **variables: str) -> Launcher:
        recipe = world.recipe(
            "sft",
            tmp_path,
            cluster=cluster,
            training__steps=1_000_000,
            checkpoint__every=2,
            launch__max_restarts=0,
        )
        arguments = ["train", str(recipe)]
        if cluster == "auto":
            arguments = ["--standalone", "--nproc-per-node", "2", "-m", "realrl", *arguments]
        module = "torch.distributed.run" if cluster == "auto" else "realrl"
        process = start(*arguments, module=module, TMPDIR=str(temporary), **variables)
        started.append(process)
        # Later checkpoints soon take the place of the first one.
        checkpoints = tmp_path / "run" / "checkpoints"
        until(lambda: any(checkpoints.glob("step-*[0-9]")) or process.poll() is not None)
        return process

    yield launch
    for process in started:
        for pid in (*ranks(process.pid).values(), process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_rank_that_dies_ends_the_command(
    launch: Callable[..., Launcher], tmp_path: Path, temporary: Path
) -> None:
    launcher = launch("1x2")
    processes = ranks(launcher.pid)
    assert processes.keys() == {0, 1}
    os.kill(processes[1], signal.SIGKILL)
    status, error = end(launcher)
    assert status == 128 + signal.SIGKILL
    # Where it was, and what the other one was waiting for.
    place = r"(in step|while saving after step) \d+.*"
    message = rf"note: rank 0 was {place}\nrealrl: signal 9 \(Killed\) ended the process of rank 1 {place}\n$"
    assert re.search(message, error), error
    logs = tmp_path / "run" / "logs"
    assert f"note: the logs of all ranks are in {logs}\n" in error
    # What the other rank reports is there, and there alone.
    assert "gloo" not in error and "gloo" in (logs / "rank-0.log").read_text()
    assert not any(map(alive, processes.values())) and not list(temporary.glob("realrl-*"))


@pytest.mark.parametrize(
    ("cluster", "number", "to_all"),
    [
        ("1x2", signal.SIGINT, True),
        ("1x1", signal.SIGINT, False),
        ("1x1", signal.SIGTERM, False),
        pytest.param("1x2", signal.SIGTERM, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_ends_all_ranks_and_reports_what_was_saved(
    launch: Callable[..., Launcher],
    tmp_path: Path,
    temporary: Path,
    cluster: str,
    number: signal.Signals,
    to_all: bool,
) -> None:
    launcher = launch(cluster)
    processes = ranks(launcher.pid)
    (os.killpg if to_all else os.kill)(launcher.pid, number)
    status, error = end(launcher)
    assert status == 128 + number
    if number == signal.SIGINT:
        assert error.count("note: interrupted; the run ends with a checkpoint after this step") == 1
    message = error.splitlines()[-1]
    verb = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    assert message.startswith(f"realrl: {verb} after step ") and " of 1000000; " in message
    done = len(read_metrics(tmp_path / "run"))
    assert f"; saved: {tmp_path / 'run' / 'checkpoints' / f'step-{done:06}'};" in message, "nothing is lost"
    assert f"metrics up to step {done} in {tmp_path / 'run'}" in message
    assert "Traceback" not in error and error.count("realrl: ") == 1
    assert not any(map(alive, processes.values())) and not list(temporary.glob("realrl-*"))
    assert not list((tmp_path / "run").rglob(".*")) and not (tmp_path / "run" / "summary.json").exists()


HOLD = """
import time
from pathlib import Path
from realrl.runtime.worker.worker import Worker

run = Worker.run_batches

def held(*arguments):
    if Path(DIR, "hold").exists():
        Path(DIR, "held").touch()
        time.sleep(1000)
    return run(*arguments)

Worker.run_batches = held
"""
"""Has a step last once there is a file `hold`."""


@pytest.mark.parametrize("cluster", thin(["1x1", "1x2"], 2))
def test_a_second_interrupt_ends_a_run_at_once(
    launch: Callable[..., Launcher], tmp_path: Path, cluster: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLD.replace("DIR", repr(str(tmp_path))))
    launcher = launch(cluster, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    processes = ranks(launcher.pid)
    (tmp_path / "hold").touch()
    until((tmp_path / "held").exists)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.stderr is not None
    while "note: interrupted" not in launcher.stderr.readline():
        pass
    os.killpg(launcher.pid, signal.SIGINT)
    status, error = end(launcher)
    assert status == 130 and "realrl: ended at once by SIGINT" in error and "Traceback" not in error
    until(lambda: not any(map(alive, processes.values())))


@pytest.mark.parametrize("number", thin([signal.SIGTERM, signal.SIGINT], 2))
def test_the_writer_reports_what_was_saved_under_torchrun(
    launch: Callable[..., Launcher], tmp_path: Path, number: signal.Signals
) -> None:
    agent = launch("auto")
    # Ctrl-C reaches all processes of the terminal, and torchrun passes it on to its own.
    for pid in (agent.pid, *(ranks(agent.pid).values() if number == signal.SIGINT else ())):
        os.kill(pid, number)
    _, error = end(agent)
    messages = [line for line in error.splitlines() if line.startswith("realrl: ")]
    verb = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    done = len(read_metrics(tmp_path / "run"))
    assert len(messages) == 1 and messages[0].startswith(
        f"realrl: {verb} after step {done} of 1000000; saved: "
    )
    assert f"step-{done:06};" in messages[0]
    assert not list((tmp_path / "run").rglob(".*"))


FAILURES = {
    "a bug on one rank": (
        "if rank == '1': Worker.run = lambda *_: 1 / 0",
        1,
        "realrl: rank 1: unexpected ZeroDivisionError in the evaluation after step 0: division by zero;"
        " see the traceback above",
        "ZeroDivisionError: division by zero\nnote: ",
    ),
    "a failure of all ranks": (
        "def stop(*_): raise RunError('learning has gone wrong')\nWorker.run = stop",
        1,
        "realrl: learning has gone wrong",
        "",
    ),
    "a judge that fails": (
        "",
        2,
        "realrl: evaluation.judge=DIR/judge.py:judge raised ZeroDivisionError: division by zero"
        " (DIR/judge.py:8)",
        "in judge\n",
    ),
}
"""What is done to the ranks, the exit status, the last line on the screen, and what is above it."""


JUDGE = """
import os
from pathlib import Path

Path(__file__).with_name(f"judged-{os.environ['RANK']}").touch()

def judge(completions):
    return 1 / 0
"""


@pytest.mark.parametrize("case", thin(FAILURES, 3))
def test_the_first_cause_is_the_last_line_and_printed_once(
    world: World, tmp_path: Path, temporary: Path, case: str
) -> None:
    code, status, message, above = FAILURES[case]
    patches = tmp_path / "patches"
    patches.mkdir()
    # Python runs it at the start of every process.
    lines = ["import os", "rank = os.environ.get('RANK')"]
    if code:
        patch = [
            "from realrl.config.errors import RunError",
            "from realrl.runtime.worker.worker import Worker",
            *code.splitlines(),
        ]
        lines += ["if rank is not None:", *(f"    {line}" for line in patch)]
    (patches / "sitecustomize.py").write_text("\n".join(lines))
    (tmp_path / "judge.py").write_text(JUDGE)
    more = {
        "data__eval": str(world.root / "ppo.jsonl"),
        "evaluation__judge": f"{tmp_path / 'judge.py'}:judge",
    }
    recipe = world.recipe("ppo", tmp_path, cluster="1x2", **more)
    path = os.pathsep.join([str(patches), *filter(None, [os.environ.get("PYTHONPATH")])])
    found, error = end(start("train", str(recipe), TMPDIR=str(temporary), PYTHONPATH=path))
    assert (found, error.splitlines()[-1]) == (status, message.replace("DIR", str(tmp_path)))
    assert above in error and error.count("realrl: ") == 1 and "gloo" not in error
    assert ("Traceback" in error) == bool(above)
    assert [file.name for file in tmp_path.glob("judged-*")] == ["judged-0"], "where the judge was loaded"
    logs = tmp_path / "run" / "logs"
    assert f"note: the logs of all ranks are in {logs}\n" in error
    # Of the rank that failed first: others are ended where they do not notice in time.
    assert any("Traceback" in log.read_text() for log in logs.iterdir())
    assert not list(temporary.glob("realrl-*")) and not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.exhaustive
def test_torchrun_and_our_launcher_learn_the_same(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**changes(world, "ppo", tmp_path), "training__steps": 3, "data__eval_batch": 27}
    # Forked, for their figures alone: other tests look at the processes that our launcher starts.
    monkeypatch.setattr(local, "start_process", ForkedRank)
    recipe = world.recipe("ppo", tmp_path, **fields, cluster="1x2", run_dir=str(tmp_path / "ours"))
    assert run_app(["train", str(recipe)]) == 0
    recipe = world.recipe("ppo", tmp_path, **fields, cluster="auto")
    arguments = ("--standalone", "--nproc-per-node", "2", "-m", "realrl", "train", str(recipe))
    status, error = end(start(*arguments, module="torch.distributed.run"))
    assert status == 0, error
    for kind in ("train", "eval"):
        pairs = zip(read_metrics(tmp_path / "run", kind), read_metrics(tmp_path / "ours", kind), strict=True)
        for theirs, ours in pairs:
            assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6)
