"""File of results to which a measurement adds case by case, so that it can be run in pieces."""

import json
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any


class ResultsFile:
    """Results by name of case, with where and when each was measured; in memory alone where `path` is None."""

    def __init__(self, path: Path | None, packages: tuple[str, ...] = ("torch",)) -> None:
        self._path = path
        self._about = {
            "date": date.today().isoformat(),
            "machine": f"{read_processor_name()}, {os.cpu_count()} cores",
            **{package: version(package) for package in packages},
        }
        exists = path is not None and path.exists()
        self.cases: dict[str, Any] = json.loads(path.read_text()) if path is not None and exists else {}

    def add(self, case: str, result: dict[str, Any]) -> None:
        """Store the result of a case in place of an older one."""
        self.cases[case] = {**result, "about": self._about}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.cases, indent=2) + "\n")


def read_processor_name() -> str:
    """Read the processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
