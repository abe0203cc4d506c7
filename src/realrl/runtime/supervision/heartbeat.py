"""Heartbeats: every second, each rank publishes what it is doing. Does not import torch.

Watchdogs read heartbeats to find ranks that are frozen or stuck. `realrl status` reads the copies in the run
directory.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from realrl.config.files import partial_path

INTERVAL = 1.0
"""Seconds between heartbeats."""
RANKS = "ranks"
"""Name of the subdirectory of a run directory with one status file per rank, which contains the rank's last
heartbeat."""
_LONGEST = 1500
"""Maximum characters of an instruction that are kept."""

Doing = Literal["start", "load", "train", "eval", "save", "end"]
"""Parts of a run, in the order in which a rank reaches them."""
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
    """What a rank is doing at one moment. Times are in seconds since 1970, by the clock of its host."""

    rank: int
    host: str
    pid: int
    time: float
    """When this heartbeat was created."""
    started: float
    """When the process began."""
    machine: str = ""
    """Host, and container if there is one, in which `pid` identifies the process."""
    restart: int = 0
    """How often the run had been restarted when this process began."""
    beats: int = 0
    """Number of heartbeats so far. It stops growing when the process stops."""
    progress: int = 0
    """Number of finished instructions, generated tokens, micro-batches, files and similar units of work."""
    cpu_seconds: float = 0.0
    """CPU time of the process in seconds."""
    step: int = 0
    """Number of finished training steps of the run, including earlier starts."""
    steps: int | None = None
    """Number of training steps that the run will have."""
    finished: int = 0
    """Number of training steps that this process has finished."""
    doing: Doing = "start"
    phase: str | None = None
    """Phase of saving, if the rank is saving."""
    order: int = 0
    """Position of the instruction's call in the dataflow graph."""
    position: int = 0
    """Position of the instruction in the rank's program."""
    instruction: str | None = None
    """Instruction that is being executed, in the text form of `programs/`."""
    call: str | None = None
    """Call to which the instruction belongs."""
    works_on: list[int] = field(default_factory=list)
    """Batches on which the instruction works, if sampling runs ahead: the steps that train on them, counted from
    1."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Batches under way, if sampling runs ahead: JSON values of `BatchProgress` with the work of this rank."""
    since: float = 0.0
    """When the current instruction, or the current part of the run, began."""
    function: str | None = None
    """The user's function that is running or waited for, as FILE.py:NAME."""
    function_seconds: float = 0.0
    """Seconds since that function began."""
    checkpoint: str | None = None
    """Path of the last complete checkpoint, relative to the run directory."""
    ended: bool = False
    """Whether the rank is exiting normally, so that watchdogs no longer expect heartbeats."""
    resident_bytes: int = 0
    """Resident memory. Only status files have it, because reading it takes longer than all other fields."""
    peak_resident_bytes: int = 0
    device_bytes: int = 0
    """GPU memory that torch has reserved; on a CPU, the resident memory."""
    device_limit_bytes: int | None = None
    """Total memory of the GPU; None on a CPU."""

    @property
    def place(self) -> str:
        """The place in the run, as part of a message: `in step 4, run actor.train [actor] on d2 @0-1`."""
        where = _PLACES[self.doing].format(self.step + (self.doing == "train"))
        return f"{where}, {self.instruction}" if self.instruction else where

    @property
    def key(self) -> tuple[int, int, int]:
        """How far the rank has come: step, position of the call in the graph, and position in the program."""
        return self.step, self.order, self.position

    @property
    def waited(self) -> float:
        """Seconds since the current instruction, or the current part of the run, began."""
        return self.time - self.since

    def to_text(self) -> str:
        """Convert to JSON, which `parse` reads."""
        return json.dumps(vars(self)) + "\n"

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read a heartbeat. Unknown keys are ignored.

        Raises ValueError if a value is missing or has another type.
        """
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("a heartbeat is a JSON object")
        known = {of.name: found[of.name] for of in fields(cls) if of.name in found}
        for of in fields(cls):
            if of.name in known and not _fits(known[of.name], of.type):
                raise ValueError(f"{of.name} is {known[of.name]!r}")
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(str(error)) from None


def _fits(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list)
    return isinstance(value, int | float if kind is float else kind)


class Activity(Heartbeat):
    """What this rank is doing: a heartbeat that its main thread and the threads of functions keep up to date.

    There is no lock, because every change is an assignment. A heartbeat between two assignments may mix two
    instructions, but the next one is right.
    """

    def __init__(self, rank: int = 0, restart: int = 0) -> None:
        host, now = socket.gethostname(), time.time()
        super().__init__(
            rank=rank, host=host, pid=os.getpid(), time=now, started=now, since=now, restart=restart
        )
        self.machine = f"{host} {_find_pid_namespace()}"
        self._functions: dict[str, float] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Function that is called when an instruction or a part of the run begins."""

    def enter(self, doing: Doing) -> None:
        """Begin another part of the run."""
        self.progress += 1
        self.doing = doing
        self.works_on = []
        self._set(None, None, 0, 0)

    @contextmanager
    def part(self, doing: Doing) -> Iterator[None]:
        """Set another part of the run for the duration of the block."""
        before = self.doing
        self.enter(doing)
        yield
        self.enter(before)

    def begin(
        self,
        instruction: str,
        call: str | None,
        order: int,
        position: int,
        works_on: Sequence[int] = (),
    ) -> None:
        """Begin the instruction at `position` of this rank's program.

        `order`: position of its call in the graph. `works_on`: batches of the instruction, if sampling runs ahead.
        """
        self.works_on = [*works_on]
        self._set(" ".join(instruction.split())[:_LONGEST], call, order, position)

    def _set(self, instruction: str | None, call: str | None, order: int, position: int) -> None:
        self.instruction, self.call, self.order, self.position = instruction, call, order, position
        self.since = time.time()
        self.on_change()

    def advance(self) -> None:
        """Report that an instruction, a token, a micro-batch, a file or a similar unit of work is finished."""
        self.progress += 1

    def done(self, step: int) -> None:
        """Report that this process has finished training step `step`."""
        self.step = step
        self.finished += 1
        self.progress += 1

    @contextmanager
    def run_function(self, reference: str) -> Iterator[None]:
        """Report that the user's code runs during the block."""
        self._functions[reference] = time.time()
        try:
            yield
        finally:
            self._functions.pop(reference, None)
            self.advance()

    def beat(self) -> Heartbeat:
        """Create a heartbeat, and count it."""
        self.beats += 1
        return self.describe()

    def describe(self) -> Heartbeat:
        """Create a heartbeat without counting it."""
        values = {of.name: getattr(self, of.name) for of in fields(Heartbeat)}
        functions, times, now = self._functions.copy(), os.times(), time.time()
        values |= {"time": now, "cpu_seconds": times.user + times.system}
        if functions:
            oldest = min(functions, key=functions.__getitem__)
            values |= {"function": oldest, "function_seconds": now - functions[oldest]}
        return Heartbeat(**values)


def _find_pid_namespace() -> str:
    """Return an identifier of the container in which process numbers are valid; empty if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def name_status_file(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's status file."""
    return run_dir / RANKS / f"rank-{rank}.json"


def write_status(run_dir: Path, heartbeat: Heartbeat) -> None:
    """Write the status file of a rank. If that is impossible, as on a full disk, nothing happens."""
    file = name_status_file(run_dir, heartbeat.rank)
    with suppress(OSError):
        # `write_whole` would create the directory again after a user has deleted it.
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
