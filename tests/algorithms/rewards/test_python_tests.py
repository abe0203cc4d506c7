"""Tests of generated Python, and what it is kept from."""

from pathlib import Path

import pytest
from reward_functions import load_method, make_input, scores_of

from realrl.algorithms.rewards.verifiers.python_tests import PythonTests, find_not_isolated, run_in_sandbox
from realrl.config.errors import UserCodeError

LIMITS = PythonTests(kind="python_tests", seconds=1.0, memory_mb=256)
RIGHT, WRONG = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 0) == 2"]


def test_generated_code_is_scored_by_its_tests() -> None:
    completions = [
        RIGHT,
        WRONG,
        f"Sure:\n```python\n{RIGHT}\n```\nDone.",
        f"```\n{WRONG}\n```\n```py\n{RIGHT}",
        "",
        "(",
    ]
    inputs = make_input(completions, tests=[TESTS] * 6)
    for partial, expected in ((False, [1, 0, 1, 1, 0, 0]), (True, [1, 0.5, 1, 1, 0, 0])):
        method = load_method({"verifier": {"kind": "python_tests", "partial": partial}})
        assert scores_of(method, inputs) == expected


def test_code_before_the_completion_comes_from_a_field() -> None:
    method = load_method({"verifier": {"kind": "python_tests", "setup": "head", "tests": "checks"}})
    inputs = make_input(["    return a + b"], head=["def add(a, b):"], checks=["\n".join(TESTS)])
    assert scores_of(method, inputs) == [1]


def test_tests_of_another_form_are_a_failure() -> None:
    with pytest.raises(
        UserCodeError, match=r"needs a text or a list of texts as tests; record data.jsonl:10"
    ):
        load_method({"verifier": {"kind": "python_tests"}}).call(make_input([RIGHT], tests=[[1]]))


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "x = [0] * 10**9",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import sys\nsys.exit(0)",
        "import os\nos.write(1, b'{}')\nos._exit(0)",
        "def f(): f()\nf()",
        "import os\nwhile True:\n    os.write(3, b'x' * 1000)",
    ],
)
def test_code_that_does_not_end_well_passes_nothing(code: str) -> None:
    assert run_in_sandbox(code, ["pass", "pass"], LIMITS) == [False, False]


def test_code_sees_no_network_environment_or_other_process_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "key")
    assert run_in_sandbox("import os", ["assert 'SECRET' not in os.environ"], LIMITS) == [True]
    lacking = find_not_isolated()
    attempts = {
        "the network": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
        "files (to write them)": f"open({str(tmp_path / 'file')!r}, 'w').write('x')",
        "other processes": "import os\nos.kill(os.getppid(), 0)\nassert os.getpid() > 1 and os.getppid() > 0",
    }
    for kind, code in attempts.items():
        if kind not in lacking:
            assert run_in_sandbox("", [code], LIMITS) == [False]
    assert list(tmp_path.iterdir()) == [] or "files (to write them)" in lacking


def test_what_is_not_isolated_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "realrl.algorithms.rewards.verifiers.python_tests.find_not_isolated"
    monkeypatch.setattr(where, lambda: ["the network"])
    load_method({"verifier": {"kind": "python_tests"}})
    assert "does not allow to isolate generated code from the network" in capsys.readouterr().err
