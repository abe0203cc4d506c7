"""All that a run continues from besides tensors. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunState:
    """State of a run after a training step, as JSON."""

    step: int
    """Training steps done."""
    taken: int
    """Records taken of the data, with those whose samples were replaced."""
    seconds: float
    """Seconds that the run has taken, its earlier parts included."""
    metrics_bytes: int
    """Length of metrics.jsonl."""
    evaluated: int | None
    """Training steps before the last evaluation; None where there was none."""
    data: Mapping[str, int]
    """What identifies the training data, see `Dataset.identify`."""
    scoring: Mapping[str, int] = field(default_factory=dict)
    """Checksums of what scores: fields of records that functions look at, and files of functions, by name."""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """What the algorithm saves."""
    trainers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the trainer of each role saves."""
    functions: Mapping[str, list[Any]] = field(default_factory=dict)
    """What the functions of a call save, those of its output ranks in order."""
    best: Mapping[str, Any] | None = None
    """The best evaluation so far, where the recipe keeps one."""
    rollbacks: int = 0
    """How often training has gone back after a spike."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What notes to the user depend on."""

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> "RunState":
        """Read what `to_json` wrote. TypeError where that was another version."""
        return cls(**read)


@dataclass(frozen=True)
class Restored:
    """A checkpoint that a run continues from, and why those that are later could not be read."""

    path: Path
    state: RunState
    problems: tuple[str, ...]
