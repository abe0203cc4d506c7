"""Results that the stages of `tools/gpu` write, as their scripts report them. No CUDA device is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "gpu"


def run(out: Path, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "DEVICE": "cpu", "OUT": str(out), "PYTHONPATH": str(TOOLS), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("kind", "good"), [("parity", False), ("bench", True)])
def test_only_a_check_that_never_ran_counts_as_failed(tmp_path: Path, kind: str, good: bool) -> None:
    script = f"from results import attempt; print(attempt({kind!r}, 'a', dict))"
    assert run(tmp_path, "-c", script, STAGE_SECONDS="-1").split()[-1] == str(good)
    assert run(tmp_path, "-c", script, STAGE_SECONDS="60").split()[-1] == "True"


def test_the_last_result_of_each_name_is_summarised(tmp_path: Path) -> None:
    lines = [
        {"kind": "parity", "name": "a", "status": "error", "error": "wrong"},
        {"kind": "parity", "name": "b", "status": "ok"},
        {"kind": "profile", "name": "training", "busy_ms": 3.0},
        {"kind": "profile", "name": "training", "status": "ok", "busy_share": 0.5},
        {"kind": "parity", "name": "a", "status": "ok"},
        {"kind": "parity", "name": "b", "status": "FAIL", "distance": 2},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = run(tmp_path, str(TOOLS / "summary.py"), str(tmp_path))
    assert "- parity b: FAIL: distance 2\n1 in all" in summary
    assert "busy_ms 3" in summary and "busy_share 0.5" in summary
    assert "parity: 1 checks passed" in summary
