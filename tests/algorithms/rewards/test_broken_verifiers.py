"""A verifier that cannot work ends the run before it starts; it never takes right answers for wrong ones."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from reward_functions import load_method, make_input, scores_of

from realrl.algorithms.rewards.reward_methods import RewardFunction
from realrl.algorithms.rewards.verifiers import math
from realrl.algorithms.rewards.verifiers import python_tests as sandbox
from realrl.config.errors import UserCodeError, UserError

MATH = {"verifier": {"kind": "math"}}
RIGHT = {"completions": ["1/2"], "answer": ["0.5"]}


def score(method: RewardFunction) -> list[float]:
    return scores_of(method, make_input(**RIGHT))


def child_of(method: RewardFunction) -> Any:
    scorer: Any = method._scorer
    return scorer._opened._process


def on_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]))


def test_a_wrong_version_of_the_parser_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("math_verify")
    metadata = tmp_path / "antlr4_python3_runtime-4.12.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: antlr4-python3-runtime\nVersion: 4.12.0\n")
    on_path(monkeypatch, tmp_path)
    with pytest.raises(
        UserError, match=r"^verifier math cannot start its process: ImportError: Unsupported ANTLR.*4\.12"
    ):
        load_method(MATH)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('my own library')", r"cannot start its process: ImportError: my own library"),
        (
            "def parse(text, **options): return [text]\ndef verify(right, found, **options): return False\n",
            r"does not work here: math-verify says that \\frac\{1\}\{2\} and 0.5 are not equal",
        ),
        (
            "def parse(text, **options): return [text]\ndef verify(right, found, **options): return True\n",
            r"does not work here: math-verify says that \\sqrt\{4\} and 3 are equal; .*math_verify.py",
        ),
    ],
)
def test_another_module_in_place_of_the_library_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    pytest.importorskip("math_verify")
    (tmp_path / "math_verify.py").write_text(code)
    on_path(monkeypatch, tmp_path)
    with pytest.raises(UserError, match=f"^verifier math {message}"):
        load_method(MATH)


@pytest.mark.parametrize("path", ["", ".", "{here}"])
@pytest.mark.parametrize("name", ["math_verify.py", "sympy.py", "json.py"])
def test_modules_in_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    pytest.importorskip("math_verify")
    (tmp_path / name).write_text("raise RuntimeError('of the user')")
    monkeypatch.setenv("PYTHONPATH", path.format(here=tmp_path))
    monkeypatch.chdir(tmp_path)
    assert score(load_method(MATH)) == [1.0]


def test_a_process_that_was_killed_is_started_again() -> None:
    pytest.importorskip("math_verify")
    method = load_method(MATH)
    child = child_of(method)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert score(method) == [1.0]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_process_that_dies_at_every_question_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify")
    method = load_method(MATH | {"on_error": on_error})
    program = tmp_path / "dies.py"
    program.write_text(
        "import sys\nprint('\"x\"', flush=True)\nsys.stdin.readline()\nsys.exit('no memory')\n"
    )
    monkeypatch.setattr(math, "PROGRAM", program)
    child_of(method).kill()
    child_of(method).wait()
    message = "lost its process: no memory; record data.jsonl:10"
    if on_error == "fail":
        with pytest.raises(UserCodeError, match=message):
            score(method)
    else:
        (skipped,) = score(method)
        assert skipped != skipped
        assert message in capsys.readouterr().err


TESTS = {"verifier": {"kind": "python_tests"}}


def test_a_sandbox_that_cannot_start_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise OSError('no more processes')")
    monkeypatch.setattr(sandbox, "PROGRAM", program)
    with pytest.raises(UserError, match=r"(?s)^verifier python_tests cannot run tests: .*no more processes"):
        load_method(TESTS)


def test_a_sandbox_with_too_little_memory_is_said_before_the_run() -> None:
    with pytest.raises(UserError, match=r"^verifier python_tests does not work here: .*memory_mb=1 may be"):
        load_method({"verifier": {"kind": "python_tests", "memory_mb": 1}})


def test_a_sandbox_that_stops_working_is_a_failure_and_not_a_failed_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = load_method(TESTS)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho no more processes >&2; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(UserCodeError, match=r"cannot run tests: exit status 1; no more processes"):
        method.call(make_input(["x = 1"], tests=["assert x == 1"]))
