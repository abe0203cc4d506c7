"""Sign of life of a rank, and the boards on which ranks leave theirs. No torch."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

from realrl.runtime.monitor.rank_status import Doing

BEAT = 1.0
"""Seconds between signs of life."""
_SLOT = 4096
"""Bytes that a sign may take in a file."""
_LONGEST = 1500
"""Characters of an instruction that are kept."""
_PLACES: Mapping[Doing, str] = {
    "start": "at the start",
    "load": "while loading",
    "train": "in step {}",
    "eval": "in the evaluation after step {}",
    "save": "while saving after step {}",
    "end": "at the end",
}


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Sign of life of a rank, with what it is doing."""

    rank: int
    machine: str
    """Machine or container in which `pid` is the process of this rank."""
    pid: int
    beats: int = 0
    """Number of signs so far; it stands still while the process does."""
    progress: int = 0
    """Number of instructions, tokens of generation and micro-batches done so far, and of files and the like."""
    cpu_seconds: float = 0.0
    """CPU time of the process."""
    step: int = 0
    """Number of training steps done."""
    finished: int = 0
    """Those of them that this process has done."""
    doing: Doing = "start"
    order: int = 0
    """Place of the instruction's call in the graph."""
    position: int = 0
    """Place of the instruction in the rank's program."""
    instruction: str | None = None
    call: str | None = None
    function: str | None = None
    """Code of the user's that runs here or is waited for."""
    function_seconds: float = 0.0
    """Seconds since that function began."""
    waited: float = 0.0
    """Seconds since the instruction began, or what is done without one."""

    @property
    def place(self) -> str:
        """Place in the run, as part of a message: `in step 4, run actor.train [actor] on d2 @0-1`."""
        where = _PLACES[self.doing].format(self.step if self.doing != "train" else self.step + 1)
        return f"{where}, {self.instruction}" if self.instruction else where

    @property
    def key(self) -> tuple[int, int, int]:
        """Progress of the rank, comparable between ranks."""
        return self.step, self.order, self.position

    def to_json(self) -> str:
        """Convert to text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` writes. ValueError where it is something else."""
        found = json.loads(text)
        try:
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no sign of life: {error}") from None


class Board(Protocol):
    """Place where ranks leave signs, and where those that watch read them."""

    def post(self, sign: Sign) -> None:
        """Leave a sign; called by the thread that beats."""

    def note(self, sign: Sign) -> None:
        """Leave a sign at the beginning of an instruction; called by the main thread, so it must be fast."""

    def read(self) -> Mapping[int, Sign]:
        """Read the signs of all ranks that have left one, by rank."""


class FileBoard:
    """Board of the processes of one machine: a small file per rank, in the launcher's scratch directory.

    The file has two slots, for the thread that beats and for the main thread, so that neither waits for the other;
    what is in them outlives a process that is killed.
    """

    def __init__(self, directory: str | Path, rank: int | None = None) -> None:
        """Open the board, for reading alone where there is no rank."""
        self._directory, self._file = Path(directory), None
        if rank is not None:
            # Not under a directory that the launcher, already gone, has removed.
            with suppress(OSError):
                file = self._directory / f"sign-{rank}"
                self._file = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                os.pwrite(self._file, b" " * 2 * _SLOT, 0)

    def post(self, sign: Sign) -> None:
        """Leave a sign; called by the thread that beats."""
        self._write(sign, _SLOT)

    def note(self, sign: Sign) -> None:
        """Leave a sign at the beginning of an instruction, which takes some microseconds."""
        self._write(sign, 0)

    def _write(self, sign: Sign, offset: int) -> None:
        if self._file is not None:
            text = sign.to_json().encode()
            if len(text) > _SLOT:
                # Names that JSON takes several characters for; what is cut off would be no sign at all.
                text = replace(sign, instruction=None, call=None, function=None).to_json().encode()
            with suppress(OSError):
                os.pwrite(self._file, text.ljust(_SLOT), offset)

    def read(self) -> dict[int, Sign]:
        """Read the signs of all ranks that have left one, by rank."""
        found = {}
        for file in self._directory.glob("sign-*"):
            with suppress(OSError):
                text = file.read_bytes()
                slots = [_parse(text[:_SLOT]), _parse(text[_SLOT:])]
                sign = _merge(*slots)
                if sign is not None:
                    found[sign.rank] = sign
        return dict(sorted(found.items()))


def shorten_instruction(text: str) -> str:
    """Shorten an instruction to what fits into a sign, on one line without gaps."""
    return " ".join(text.split())[:_LONGEST]


def _parse(slot: bytes) -> Sign | None:
    # Empty at first, and torn where it is being written.
    with suppress(ValueError):
        return Sign.from_json(slot.strip(b" \0"))
    return None


def _merge(noted: Sign | None, beaten: Sign | None) -> Sign | None:
    """Take beats from one slot, and from both the latest instruction."""
    if noted is None or beaten is None:
        return noted or beaten
    if beaten.progress > noted.progress or (beaten.progress == noted.progress and beaten.key == noted.key):
        return beaten
    life: dict[str, Any] = {"beats": beaten.beats, "cpu_seconds": beaten.cpu_seconds}
    return replace(noted, **life)
