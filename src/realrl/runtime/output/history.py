"""Starts of a run: when, from which step, and on what. No torch."""

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realrl.config.json_file import parse_rows, read_tail
from realrl.runtime.processes.environment import find_job, restart_count

HISTORY = "history.jsonl"
"""File with one line for each time that the run was started."""
_MOST = 1 << 22
"""Bytes of it that are read."""


def describe_start(step: int, cluster: str, **more: Any) -> dict[str, Any]:
    """Describe a start of the run after `step` training steps, for its history."""
    now = {"time": round(time.time(), 3), "step": step, "cluster": cluster, "host": socket.gethostname()}
    return now | {"job": find_job(), "restarts": restart_count()} | more


def add_start(file: Path, start: Mapping[str, Any]) -> None:
    """Append a start to the history of a run; OSError."""
    with file.open("ab", buffering=0) as history:
        history.write((json.dumps(start) + "\n").encode())


def read_history(file: Path) -> list[dict[str, Any]]:
    """Read the starts of a run, the first one first; what is no whole line is left out."""
    return list(parse_rows(read_tail(file, _MOST)))
