"""Predicted step of a run: the file `predicted.json` of its directory, which Perfetto opens beside `trace.json`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from realrl.config.files import write_whole
from realrl.program.trace_file import Event, make_trace, read_slices

PREDICTED = "predicted.json"


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Predicted memory of a device."""

    rank: int
    capacity_bytes: int
    """Bytes that a plan may use."""
    resting_bytes: int
    """Bytes held between steps."""
    peak_bytes: int
    during: str
    """Call in which the peak is reached."""


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Predicted timeline and memory of a step."""

    seconds: float
    """Steady-state seconds per step."""
    ranks: Sequence[Sequence[Event]]
    """Slices of one step, by rank."""
    memory: tuple[PredictedMemory, ...]
    """Memory, by rank."""

    def save(self, run_dir: Path) -> None:
        """Write the file of a run directory. OSError."""
        document = make_trace(dict(enumerate(self.ranks)), "predicted")
        document |= {"seconds": self.seconds, "memory": [asdict(device) for device in self.memory]}
        write_whole(run_dir / PREDICTED, json.dumps(document))

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        """Read the file of a run directory; None where there is none, or something else."""
        try:
            document = json.loads((run_dir / PREDICTED).read_bytes())
            memory = tuple(PredictedMemory(**device) for device in document["memory"])
            return cls(seconds=float(document["seconds"]), ranks=[read_slices(document)], memory=memory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
