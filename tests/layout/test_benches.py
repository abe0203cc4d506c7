"""Benches that also guard a property."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def run(name: str, *arguments: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(BENCH / name), *arguments, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def test_busiest_port_is_close_to_its_lower_bound(tmp_path: Path) -> None:
    result = run("route_bounds.py", "--pairs", "80", "--seed", "4", out=tmp_path / "bounds.json")
    assert result["route bounds"]["worst_ratio"] <= 1.05
