"""Ctrl-C, SIGTERM and readers that have had enough end commands without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.processes import end, start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")

DEMO = str(Path(__file__).parents[2] / "recipes" / "demo" / "ppo.yaml")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_ends_quietly(tmp_path: Path, number: signal.Signals) -> None:
    pipe = tmp_path / "prompts.txt"
    os.mkfifo(pipe)
    process = start("generate", "model", "--prompts", str(pipe), "--out", str(tmp_path / "out.jsonl"))
    # Opened only once the command reads, and it then waits for what never comes.
    with pipe.open("w"):
        process.send_signal(number)
        status, error = end(process)
    assert (status, error) == (128 + number, "")
    assert list(tmp_path.iterdir()) == [pipe]


STUBBORN = """
import time
from realrl.runtime.signals import Interrupted, raise_signals

raise_signals()
try:
    print("ready", flush=True)
    time.sleep(1000)
except Interrupted:
    print("interrupted", flush=True)
    time.sleep(1000)
"""


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in ("ready\n", "interrupted\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130


CHILD = """
import os, signal
from realrl.runtime.signals import raise_signals

raise_signals()
child = os.fork()
if not child:
    print("ready", flush=True)
    signal.pause()
os.waitpid(child, 0)
print("alone", flush=True)
signal.pause()
"""


def test_a_signal_to_a_forked_child_is_not_the_parents() -> None:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("reads /proc")
    os.kill(int(children.read_text()), signal.SIGTERM)
    assert process.stdout.readline() == "alone\n"
    process.terminate()
    process.communicate()
    assert process.returncode == 1  # by Interrupted, which nobody caught


def test_a_reader_that_has_had_enough_is_no_failure_to_talk_about() -> None:
    process = start("show", DEMO, "--programs")
    assert process.stdout is not None
    process.stdout.close()
    error = process.stderr.read() if process.stderr is not None else ""
    process.wait()
    assert error == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("tokenizer", "x.jsonl", "--out", "/proc/x"),
        ("profile", "--shape", "llama-2-7b", "--out", "/proc/x.json"),
    ],
)
def test_an_output_that_cannot_be_written_is_known_before_the_work(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from realrl.cli.app import run_app

    assert run_app(arguments) == 2
    error = capsys.readouterr().err
    assert error == f"realrl: --out {arguments[-1]} cannot be written: No such file or directory\n"
