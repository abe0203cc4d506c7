"""Heartbeats: every second, each rank publishes its current work. Does not import torch.

Watchdogs read them to find ranks that are frozen or stuck. `realrl status` reads the copy in the run directory.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from realrl.config.files import partial_path

INTERVAL = 1.0
"""Seconds between heartbeats."""
RANKS = "ranks"
"""Directory of a run with a status file per rank: its last heartbeat."""
_LONGEST = 1500
"""Characters of an instruction that are kept."""

Doing = Literal["start", "load", "train", "eval", "save", "end"]
"""Parts of a run. A rank reaches them in this order."""
_PLACES: Mapping[Doing, str] = {
    "start": "at the start",
    "load": "while loading",
    "train": "in step {}",
    "eval": "in the evaluation after step {}",
    "save": "while saving after step {}",
    "end": "at the end",
}


@dataclass(kw_only=True)
class Heartbeat:
    """What a rank does at one moment. Times are in seconds since 1970, by the clock of its host."""

    rank: int
    host: str
    pid: int
    time: float
    """When this heartbeat was made."""
    started: float
    """When the process began."""
    machine: str = ""
    """Host, and container if there is one: `pid` is a process there."""
    restart: int = 0
    """How often the run had been restarted when this process began."""
    beats: int = 0
    """Number of heartbeats so far. It stops when the process does."""
    progress: int = 0
    """Number of instructions, generated tokens, micro-batches, files and the like that are done."""
    cpu_seconds: float = 0.0
    """CPU time of the process."""
    step: int = 0
    """Number of finished training steps of the run."""
    steps: int | None = None
    """Number of training steps that the run will have."""
    finished: int = 0
    """Number of training steps that this process has finished."""
    doing: Doing = "start"
    phase: str | None = None
    """Phase of saving."""
    order: int = 0
    """Position of the instruction's call in the graph."""
    position: int = 0
    """Position of the instruction in the rank's program."""
    instruction: str | None = None
    """Instruction that is being executed, as in `programs/`."""
    call: str | None = None
    """Call that the instruction belongs to."""
    since: float = 0.0
    """When the instruction, or this part of the run, began."""
    function: str | None = None
    """The user's code that runs or is waited for, FILE.py:NAME."""
    function_seconds: float = 0.0
    """Seconds since that function began."""
    checkpoint: str | None = None
    """Last complete checkpoint, relative to the run directory."""
    ended: bool = False
    """Whether the rank is exiting in an orderly way, so that nobody should miss it."""
    resident_bytes: int = 0
    """Memory, in status files only: reading it takes longer than everything else."""
    peak_resident_bytes: int = 0
    device_bytes: int = 0
    """Memory that torch holds on the GPU; on a CPU the resident set."""
    device_limit_bytes: int | None = None
    """Memory of the GPU; None on a CPU."""

    @property
    def place(self) -> str:
        """Place in the run, as part of a message: `in step 4, run actor.train [actor] on d2 @0-1`."""
        where = _PLACES[self.doing].format(self.step + (self.doing == "train"))
        return f"{where}, {self.instruction}" if self.instruction else where

    @property
    def key(self) -> tuple[int, int, int]:
        """How far the rank has come, comparable between ranks."""
        return self.step, self.order, self.position

    @property
    def waited(self) -> float:
        """Seconds since the instruction, or this part of the run, began."""
        return self.time - self.since

    def to_text(self) -> str:
        """Convert to JSON, which `parse` reads."""
        return json.dumps(vars(self)) + "\n"

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read a heartbeat. Unknown keys are ignored. ValueError if a value is missing or of another type."""
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("a heartbeat is a JSON object")
        known = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        for field in fields(cls):
            if field.name in known and not _fits(known[field.name], field.type):
                raise ValueError(f"{field.name} is {known[field.name]!r}")
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(str(error)) from None


def _fits(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return isinstance(value, int | float if kind is float else kind)


class Activity(Heartbeat):
    """What this rank does now: the heartbeat that its main thread and functions' threads keep up to date.

    Without a lock, since every change is an assignment. A heartbeat that is made between two of them may mix two
    instructions; the next one is right.
    """

    def __init__(self, rank: int = 0, restart: int = 0) -> None:
        host, now = socket.gethostname(), time.time()
        super().__init__(
            rank=rank, host=host, pid=os.getpid(), time=now, started=now, since=now, restart=restart
        )
        self.machine = f"{host} {_find_pid_namespace()}"
        self._functions: dict[str, float] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called when an instruction or a part of the run begins."""

    def enter(self, doing: Doing) -> None:
        """Begin another part of the run."""
        self.progress += 1
        self.doing = doing
        self._set(None, None, 0, 0)

    @contextmanager
    def part(self, doing: Doing) -> Iterator[None]:
        """Be in another part of the run for a block."""
        before = self.doing
        self.enter(doing)
        yield
        self.enter(before)

    def begin(self, instruction: str, call: str | None, order: int, position: int) -> None:
        """Begin the instruction at `position` of this rank's program; its call is number `order` of the graph."""
        self._set(" ".join(instruction.split())[:_LONGEST], call, order, position)

    def _set(self, instruction: str | None, call: str | None, order: int, position: int) -> None:
        self.instruction, self.call, self.order, self.position = instruction, call, order, position
        self.since = time.time()
        self.on_change()

    def advance(self) -> None:
        """Report that an instruction, a token, a micro-batch, a file or the like is done."""
        self.progress += 1

    def done(self, step: int) -> None:
        """Report that this process has finished training step number `step`."""
        self.step = step
        self.finished += 1
        self.progress += 1

    @contextmanager
    def run_function(self, reference: str) -> Iterator[None]:
        """Report that the user's code runs in a block."""
        self._functions[reference] = time.time()
        try:
            yield
        finally:
            self._functions.pop(reference, None)
            self.advance()

    def beat(self) -> Heartbeat:
        """Count a heartbeat, and make it."""
        self.beats += 1
        return self.describe()

    def describe(self) -> Heartbeat:
        """Make a heartbeat without counting it."""
        values = {field.name: getattr(self, field.name) for field in fields(Heartbeat)}
        functions, times, now = self._functions.copy(), os.times(), time.time()
        values |= {"time": now, "cpu_seconds": times.user + times.system}
        if functions:
            oldest = min(functions, key=functions.__getitem__)
            values |= {"function": oldest, "function_seconds": now - functions[oldest]}
        return Heartbeat(**values)


def _find_pid_namespace() -> str:
    """Identify the container whose processes this one can see by their numbers; empty if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def name_status_file(run_dir: Path, rank: int) -> Path:
    """Name the status file of a rank."""
    return run_dir / RANKS / f"rank-{rank}.json"


def write_status(run_dir: Path, heartbeat: Heartbeat) -> None:
    """Write the status file of a rank; nothing if that is impossible, as on a full disk."""
    file = name_status_file(run_dir, heartbeat.rank)
    with suppress(OSError):
        # Not by `write_whole`, which would make the directory again after somebody has deleted it.
        partial_path(file).write_text(heartbeat.to_text())
        partial_path(file).replace(file)


def read_statuses(run_dir: Path) -> dict[int, Heartbeat]:
    """Read the status files of all ranks, by rank. Files that cannot be read are left out."""
    found: dict[int, Heartbeat] = {}
    for file in (run_dir / RANKS).glob("rank-*.json"):
        with suppress(OSError, ValueError, RecursionError):
            status = Heartbeat.parse(file.read_text())
            found[status.rank] = status
    return dict(sorted(found.items()))
