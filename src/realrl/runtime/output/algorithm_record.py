"""Record of an algorithm in a run's directory. With it, reports need not import the algorithm's code.

Does not import torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import explain
from realrl.config.files import write_whole
from realrl.recipe.algorithm import AlgorithmSpec, SummaryMetric

RECORD = "algorithm.json"
"""Name of the record's file in a run directory."""


class AlgorithmRecord(Settings):
    """The part of an `AlgorithmSpec` that reports need."""

    # Labels may be empty, and JSON has lists instead of tuples.
    model_config = ConfigDict(str_min_length=0, strict=False)

    name: str
    trained: tuple[str, ...]
    """Roles that training updates, in the order of the graph."""
    curves: dict[str, str]
    summary: tuple[SummaryMetric, ...]
    sample_keys: tuple[str, ...]

    @classmethod
    def of(cls, spec: AlgorithmSpec, trained: Sequence[str]) -> Self:
        """Create the record of an algorithm that trains these roles."""
        return cls(
            name=spec.name,
            trained=tuple(trained),
            curves=dict(spec.curves),
            summary=spec.summary,
            sample_keys=spec.sample_keys,
        )

    def save(self, run_dir: Path) -> None:
        """Write the record into a run directory. Raises OSError."""
        write_whole(run_dir / RECORD, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """Read the record of a run directory. Raises UserError for invalid content."""
        file = run_dir / RECORD
        try:
            return cls.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise UserError(f"{file}: {explain(error, cls)}") from None
