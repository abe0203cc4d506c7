"""Ctrl-C, SIGTERM and readers that have had enough end commands without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from realrl.runtime.processes.logs import open_screen
from tests.runtime.processes import end, heed_interrupts, start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")

DEMO = str(Path(__file__).parents[2] / "recipes" / "demo" / "ppo.yaml")


@pytest.mark.parametrize(
    ("number", "expected"),
    # A terminal that closes counts as SIGTERM.
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)],
)
def test_a_command_that_is_interrupted_ends_quietly(
    tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    pipe = tmp_path / "prompts.txt"
    os.mkfifo(pipe)
    process = start("generate", "model", "--prompts", str(pipe), "--out", str(tmp_path / "out.jsonl"))
    # Opened only once the command reads, and it then waits for what never comes.
    with pipe.open("w"):
        process.send_signal(number)
        status, error = end(process)
    assert (status, error) == (expected, "")
    assert list(tmp_path.iterdir()) == [pipe]


def test_messages_that_nobody_reads_end_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open_screen(writer) as screen:
        print("note: a first line", file=screen, flush=True)
        # rich would end the process at a closed pipe.
        Console(file=screen).print("and another one")


INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            if WHAT == "wrapped":
                raise RuntimeError("Error calling __set_name__ on a cached_property") from error
            if WHAT == "raised":
                raise
        return None

sys.meta_path.insert(0, Interrupt())
sys.argv = ["realrl", "show", DEMO, "cluster=1x2"]
from realrl.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["realrl.cli.app", "typer", "realrl.recipe.load"])
@pytest.mark.parametrize("what", ["raised", "wrapped", "swallowed"])
def test_an_interrupt_while_modules_are_imported_is_quiet(module: str, what: str) -> None:
    code = INTERRUPTED.replace("MODULE", repr(module)).replace("WHAT", repr(what)).replace("DEMO", repr(DEMO))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=heed_interrupts
    )
    assert (done.returncode, done.stderr) == (130, "")


DESTROYED = """
import os, signal
from realrl.runtime.processes.signals import find_interruption, raise_signals

class Destroyed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

raise_signals()
Destroyed()
assert find_interruption().status == 130
"""


def test_an_interrupt_in_a_destructor_is_remembered_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DESTROYED], capture_output=True, text=True, preexec_fn=heed_interrupts
    )
    assert (done.returncode, done.stderr) == (0, "")


STUBBORN = """
import time
from realrl.runtime.processes.signals import Interrupted, raise_signals

raise_signals()
try:
    print("ready", flush=True)
    time.sleep(1000)
except Interrupted:
    print("interrupted", flush=True)
    time.sleep(1000)
"""


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )
    assert process.stdout is not None
    for line in ("ready\n", "interrupted\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130


CHILD = """
import os, signal
from realrl.runtime.processes.signals import raise_signals

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
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )
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


def test_a_closed_output_pipe_ends_the_command_quietly() -> None:
    process = start("show", DEMO, "cluster=1x2", "--programs")
    assert process.stdout is not None
    process.stdout.close()
    error = process.stderr.read() if process.stderr is not None else ""
    process.wait()
    assert error == ""


FLUSHED = """
import sys
from realrl.cli import app
from realrl.__main__ import main

def run_app(arguments):
    sys.stdout.write("a line that is still in the buffer")
    return 0

app.run_app = run_app
main()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
@pytest.mark.parametrize("command", [["-m", "realrl", "show", DEMO, "cluster=1x2"], ["-c", FLUSHED]])
def test_output_on_a_full_disk_is_one_error_message(command: list[str]) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *command], stdout=full, stderr=subprocess.PIPE, text=True, env=buffered
        )
    assert done.returncode == 1
    assert done.stderr.startswith("realrl: ") and done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("tokenizer", "x.jsonl", "--out", "/proc/x"),
        ("profile", "--shape", "llama-2-7b", "--out", "/proc/x.json"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from realrl.cli.app import run_app

    assert run_app(arguments) == 2
    error = capsys.readouterr().err
    assert error == f"realrl: --out {arguments[-1]} cannot be written: No such file or directory\n"
