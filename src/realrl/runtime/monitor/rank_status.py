"""Status of one rank, as a file that every rank keeps fresh in `RUN_DIR/ranks`. No torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

RANKS = "ranks"
"""Directory of a run with a status file per rank."""
Doing = Literal["start", "load", "train", "eval", "save", "end"]
"""Parts of a run, as a rank goes through them."""

_NUMBERS = {"rank", "pid", "time", "started", "step", "steps", "since", "restart"} | {
    f"{name}_bytes" for name in ("resident", "peak_resident", "device", "device_limit")
}


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status of a rank: what it does now, and the memory it holds."""

    rank: int
    host: str
    pid: int
    time: float
    """When this was written, in seconds since 1970."""
    started: float
    """When the process began, in seconds since 1970."""
    step: int = 0
    """Number of training steps done."""
    steps: int | None = None
    """Number of training steps of the run."""
    doing: Doing = "start"
    instruction: str | None = None
    """Instruction that is being executed, as in `programs/`."""
    call: str | None = None
    """Call that the instruction belongs to."""
    since: float = 0.0
    """When the instruction began, or what is done without one, in seconds since 1970."""
    function: str | None = None
    """Code of the user's that runs here or is waited for, FILE.py:NAME."""
    resident_bytes: int = 0
    peak_resident_bytes: int = 0
    device_bytes: int = 0
    """Memory that torch holds on the GPU; on a CPU the resident set."""
    device_limit_bytes: int | None = None
    """Memory of the GPU; None on a CPU."""
    checkpoint: str | None = None
    """Last complete checkpoint, relative to the run's directory."""
    restart: int = 0
    """How often the run has been started again after a failure."""
    phase: str | None = None
    """Part of what is being done, such as a phase of saving."""

    def to_json(self) -> dict[str, Any]:
        """Convert to what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Read what `to_json` writes; unknown keys are ignored. ValueError where one is missing or no number."""
        if not isinstance(found, Mapping):
            raise ValueError("not an object")
        for name in _NUMBERS & found.keys():
            if not isinstance(found[name], int | float) and found[name] is not None:
                raise ValueError(f"{name} is {found[name]!r}")
        known = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        if known.get("doing", "start") not in get_args(Doing):
            raise ValueError(f"doing is {known['doing']!r}")
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def to_text(self) -> str:
        """Convert to the content of a status file."""
        return json.dumps(self.to_json()) + "\n"


def name_status_file(directory: Path, rank: int) -> Path:
    """Name the status file of a rank."""
    return directory / f"rank-{rank}.json"


def read_statuses(directory: Path) -> dict[int, RankStatus]:
    """Read the statuses of all ranks in a directory, by rank; files that cannot be read are left out."""
    found: dict[int, RankStatus] = {}
    for file in directory.glob("rank-*.json"):
        try:
            status = RankStatus.from_json(json.loads(file.read_text()))
        except (OSError, ValueError, RecursionError):
            continue
        found[status.rank] = status
    return dict(sorted(found.items()))
