"""Process of one rank on a node of a Ray cluster, held by an actor there. No torch."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from realrl.config.files import write_whole
from realrl.runtime.monitor.sign import FileBoard
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, SCRATCH_VARIABLE
from realrl.runtime.processes.error_reports import read_failures
from realrl.runtime.processes.logs import name_log_file
from realrl.runtime.processes.orphans import Scratch, find_ranks

_SCREEN = "screen"
_ERROR = "error.json"


@dataclass(frozen=True)
class ActorPlace:
    """Place of an actor: a node of the Ray cluster, its address and a free port of it, and its own GPUs."""

    node: str
    address: str
    port: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Look:
    """State of a rank's process."""

    status: int | None
    """Exit status, negative for a signal; None while it runs."""
    screen: bytes
    """What it has written on the screen since the last look; only the first rank has one."""
    sign: str | None
    """Its last sign of life, as JSON."""


class RankProcess:
    """Holder of a rank's process. It is an actor: all methods are called from afar."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._process: subprocess.Popen[bytes] | None = None
        self._rank, self._read = 0, 0

    def place(self) -> ActorPlace:
        """Tell where this is."""
        import ray

        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return ActorPlace(context.get_node_id(), str(ray.util.get_node_ip_address()), port, gpus)

    def start(
        self,
        rank: int,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        directory: str,
        search_path: str,
    ) -> None:
        """Start `realrl ARGUMENTS` as a rank, with more environment variables, in a directory."""
        self._rank, scratch = rank, self._scratch.path
        # Those of the actor's own process are about it alone, such as the one GPU that it sees.
        environment = {
            **os.environ,
            "PYTHONPATH": search_path,
            SCRATCH_VARIABLE: str(scratch),
            LAUNCHER_VARIABLE: str(os.getpid()),
            "TORCHELASTIC_ERROR_FILE": str(scratch / _ERROR),
            **variables,
        }
        file = scratch / _SCREEN if rank == 0 else name_log_file(scratch, rank)
        with file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "realrl", *arguments],
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def write(self, name: str, text: str) -> str:
        """Write a file that the rank is to read; return its path."""
        write_whole(self._scratch.path / name, text)
        return str(self._scratch.path / name)

    def look(self) -> Look:
        """Look at the process."""
        status = None if self._process is None else self._process.poll()
        screen, file = b"", self._scratch.path / _SCREEN
        if file.exists():
            with file.open("rb") as opened:
                opened.seek(self._read)
                screen = opened.read()
            self._read += len(screen)
        sign = FileBoard(self._scratch.path).read().get(self._rank)
        return Look(status, screen, None if sign is None else sign.to_json())

    def failure(self) -> dict[str, Any] | None:
        """Tell what the rank has left about its failure, by the fields of `Failure`; None for nothing."""
        for failure in read_failures(self._scratch.path):
            return asdict(failure)
        with suppress(OSError, ValueError):
            left = json.loads((self._scratch.path / _ERROR).read_text())
            # What follows are notes, which the launcher makes itself.
            message = left["message"].partition("\n")[0]
            return {"message": message, "status": 1, "rank": self._rank, "time": float(left["timestamp"])}
        return None

    def log(self) -> bytes:
        """Read what the rank has logged here, if it has not moved its log into the run's directory."""
        file = name_log_file(self._scratch.path, self._rank)
        return file.read_bytes() if file.exists() else b""

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill the process and what it has started, and remove its files."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        for pid in find_ranks(str(self._scratch.path)):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._scratch.__exit__()


def list_import_path() -> str:
    """List where this process imports from, as a value of PYTHONPATH: code of the user's may lie there."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(
        dict.fromkeys(str(Path(entry).absolute()) for entry in given.split(os.pathsep) if entry)
    )
