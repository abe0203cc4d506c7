"""Processes of this machine that measure as ranks of a run. No torch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realrl.runtime.doctor.links import GroupFigures, PeerFigures
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, STORE_VARIABLE

_POLL = 0.02
_MOST = 16
"""Processes that are started at most: enough to tell whether more would work."""
BEGUN = "begun-"
"""Start of the name of a file that says of a rank that its libraries are loaded."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Findings of ranks about themselves."""

    torch: Mapping[str, Any] | None
    """What `describe_torch` says; None where no process could say it."""
    peers: tuple[PeerFigures, ...] = ()
    group: GroupFigures | None = None
    error: str = ""
    """Reason why there is nothing more."""
    loading: int = 0
    """Processes that were still loading their libraries when time was up."""


def measure_locally(ranks: int, device: str, seconds: float) -> RankFigures:
    """Start a process per rank, or 16, for at most so many seconds, and collect what they find."""
    ranks = min(ranks, _MOST)
    with tempfile.TemporaryDirectory(prefix="realrl-doctor-") as scratch:
        file, log = Path(scratch) / "found.json", Path(scratch) / "log"
        processes = []
        try:
            for rank in range(ranks):
                with log.open("ab") as errors:
                    processes.append(_start(rank, ranks, [str(file), device], scratch, errors))
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and any(process.poll() is None for process in processes):
                time.sleep(_POLL)
            late = any(process.poll() is None for process in processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
        begun = len(list(Path(scratch).glob(f"{BEGUN}*")))
        if late and begun < ranks:
            return RankFigures(torch=None, loading=ranks - begun)
        if file.exists():
            return _read(json.loads(file.read_text(encoding="utf-8")))
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = (
            f"they had not ended after {seconds:g} s" if late else lines[-1] if lines else "they said nothing"
        )
        return RankFigures(torch=None, error=f"{ranks} processes could not exchange messages: {reason}")


def _start(rank: int, world: int, arguments: list[str], scratch: str, log: Any) -> "subprocess.Popen[bytes]":
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "KINETO_LOG_LEVEL": "6",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STORE_VARIABLE: str(Path(scratch) / "store"),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    command = [sys.executable, "-m", "realrl.runtime.doctor.ranks", *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _read(found: Mapping[str, Any]) -> RankFigures:
    group = found["group"]
    return RankFigures(
        torch=found["torch"],
        peers=tuple(PeerFigures(**peer) for peer in found["peers"]),
        group=None if group is None else GroupFigures(**group),
        error=found["error"],
    )
