"""Records of training steps. `realrl replay` runs such a step again.

A record has one file per rank, in RUN_DIR/records/step-STEP-from-CHECKPOINT.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from realrl.checkpoint.rows import Rows
from realrl.checkpoint.saved import list_records
from realrl.config.errors import UserError
from realrl.config.files import whole_file
from realrl.data.batch import Ragged
from realrl.runtime.records.fingerprints import Fingerprint, Fingerprints, add_fingerprints


@dataclass(frozen=True)
class StepHeader:
    """What identifies a recorded step, equal on all ranks."""

    step: int
    """Number of the training step, counted from 1."""
    checkpoint: int
    """Number of training steps before the checkpoint that the replay starts from; 0 for the run's first weights."""
    taken: int
    """Number of records that the run had taken from the data before the first step after this checkpoint."""
    rate_factors: Sequence[float]
    """Factor of the learning rates in each step since this checkpoint, ending with the recorded step."""
    prompts: Sequence[int]
    """Numbers of the records of the step."""
    plan: str
    """The plan in words: its cluster, and the placement of each call."""
    ranks: int
    """Number of ranks of the run."""


@dataclass(frozen=True, eq=False)
class StepRecord:
    """A recorded step: the outputs of every call, the records, metrics, and the fingerprints of parameters."""

    header: StepHeader
    reason: str
    """Why the step was recorded."""
    rows: Mapping[str, Mapping[int, Tensor]]
    """Rows of the outputs of calls and of the records, by key and item."""
    metrics: Mapping[str, float]
    """Metrics by `call/name`; empty if the run failed in this step."""
    fingerprints: Mapping[str, Fingerprints]
    """Fingerprints of the parameters of each call's model, before the call; empty for an unplanned record."""
    missing: tuple[int, ...] = ()
    """Ranks whose files are missing."""


@dataclass(frozen=True, eq=False)
class RankRecord:
    """The part of a record that one rank writes."""

    header: StepHeader
    rows: Rows
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprints] = field(default_factory=dict)

    def write(self, directory: Path, rank: int, reason: str) -> None:
        """Write the file of a rank. Raises OSError, or SafetensorError, if it cannot be written."""
        tensors = {}
        for key, (items, rows) in self.rows.items():
            tensors[f"{key}.items"] = torch.tensor(items, dtype=torch.int64)
            tensors[f"{key}.lengths"] = torch.tensor(rows.lengths, dtype=torch.int64)
            tensors[f"{key}.values"] = rows.values.detach().cpu().contiguous()
        about = {
            "header": asdict(self.header),
            "reason": reason,
            "metrics": dict(self.metrics),
            "fingerprints": {
                call: {name: [one.bits, one.squares, one.dtype] for name, one in of.items()}
                for call, of in self.fingerprints.items()
            },
        }
        file = directory / f"rank-{rank:05}-of-{self.header.ranks:05}.safetensors"
        with whole_file(file) as partial:
            save_file(tensors, partial, metadata={"record": json.dumps(about)})


def read_record(run_dir: Path, step: int) -> StepRecord:
    """Read the record of a step. Raises UserError if there is none, or if it is damaged."""
    found = list_records(run_dir)
    if step not in found:
        raise UserError(f"--step {step}: {describe_records(run_dir)}")
    files = sorted(found[step].path.glob("rank-*-of-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise UserError(f"{found[step].path} has no file of a rank; the run ended before it was written")
    # A run that resumed on fewer ranks has left files of its earlier start.
    ending = files[-1].name.partition("-of-")[2]
    files = [file for file in sorted(files) if file.name.endswith(ending)]
    parts = [_read_part(file) for file in files]
    rows: dict[str, dict[int, Tensor]] = {}
    for part, _ in parts:
        for key, (items, values) in part.rows.items():
            rows.setdefault(key, {}).update(zip(items, values.rows(), strict=True))
    calls = {call for part, _ in parts for call in part.fingerprints}
    here = {int(file.name.split("-")[1]) for file in files}
    header = parts[0][0].header
    return StepRecord(
        header,
        parts[0][1],
        rows,
        next((part.metrics for part, _ in parts if part.metrics), {}),
        {call: add_fingerprints(part.fingerprints.get(call, {}) for part, _ in parts) for call in calls},
        tuple(rank for rank in range(header.ranks) if rank not in here),
    )


def _read_part(file: Path) -> tuple[RankRecord, str]:
    """Read the file of a rank, and the reason of the record. Raises UserError if it is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads(opened.metadata()["record"])
            names = [name.removesuffix(".items") for name in opened.keys() if name.endswith(".items")]  # noqa: SIM118
            rows = {
                name: (
                    opened.get_tensor(f"{name}.items").tolist(),
                    Ragged(
                        opened.get_tensor(f"{name}.values"),
                        tuple(opened.get_tensor(f"{name}.lengths").tolist()),
                    ),
                )
                for name in names
            }
        fingerprints = {
            call: {name: Fingerprint(*numbers) for name, numbers in of.items()}
            for call, of in about["fingerprints"].items()
        }
        header = StepHeader(**about["header"])
        return RankRecord(header, rows, about["metrics"], fingerprints), about["reason"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{file} is damaged, or another version wrote it: {error}") from None


def describe_records(run_dir: Path) -> str:
    """Write which steps of a run are recorded."""
    found = list_records(run_dir)
    if found:
        return f"the recorded steps of {run_dir} are {', '.join(map(str, found))}"
    return f"{run_dir} has no recorded step; set debug.record.steps or debug.record.every in the recipe, and train"
