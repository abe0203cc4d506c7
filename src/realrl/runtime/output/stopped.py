"""End of a run whose loss or gradients are not finite: error message, and the mini-batch that is kept."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from realrl.config.errors import RunError
from realrl.config.files import as_os_error, reason_of, whole_file
from realrl.data.batch import Batch
from realrl.engine.training.skipped_steps import SkippedStepsError

FOLDER = "minibatches"
"""Folder of the run directory for mini-batches whose training failed."""


def make_stop_error(error: SkippedStepsError, *, step: int, rank: int, run_dir: Path) -> RunError:
    """Make the error that ends a run, equal on all ranks, and save this rank's part of the mini-batch.

    step: the training step that could not be learned from, counted from 1.
    """
    folder = run_dir / FOLDER
    kept = f"the last mini-batch is kept in {folder}"
    if error.minibatch is not None:
        try:
            write_minibatch(folder / f"step-{step:06}-{error.call}-rank-{rank}.safetensors", error.minibatch)
        except Exception as trouble:
            refusal = as_os_error(trouble)
            if refusal is None:
                raise
            kept = f"the last mini-batch cannot be kept in {folder}: {reason_of(refusal)}"
    return RunError(
        f"{error.call}, step {step}: {error.what} because numbers are not finite, first of all {error.quantity};"
        f" {kept}"
    )


def write_minibatch(file: Path, minibatch: Batch) -> None:
    """Write items with all their fields as safetensors.

    The rows of a field lie back to back under its name, how long they are under `FIELD.lengths`; `ids` are the
    items' positions in the step's batch.
    """
    tensors = {"ids": torch.tensor(minibatch.ids)}
    for key, field in minibatch.fields.items():
        tensors[key] = field.values.detach().contiguous()
        tensors[f"{key}.lengths"] = torch.tensor(field.lengths)
    with whole_file(file) as partial:
        save_file(tensors, partial)
