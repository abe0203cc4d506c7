"""Export of a checkpoint's models as Hugging Face directories, in one process and without a cluster."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from realrl.checkpoint import huggingface
from realrl.checkpoint.directory import find_model_shape
from realrl.checkpoint.origin import read_origin
from realrl.checkpoint.state.manifest import CheckpointError, Manifest, read_manifest
from realrl.checkpoint.state.pieces import TensorPieces
from realrl.checkpoint.state.reader import check_tensors, read_state
from realrl.config.errors import RunError, UserError
from realrl.config.files import as_os_error, reason_of
from realrl.engine.dtypes import find_torch_dtype
from realrl.engine.flat import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.tensors import TensorSpec
from realrl.plan.placement import DTYPES
from realrl.recipe.algorithm import get_spec
from realrl.recipe.load import load_experiment
from realrl.runtime.checkpoints.contents import PARAMETERS
from realrl.runtime.output.saved import CONFIG
from realrl.runtime.setup import load_shared_tokenizer, load_stop_token_ids


def export_models(run_dir: Path, checkpoint: Path, roles: Sequence[str], out: Path) -> Iterator[Path]:
    """Write models of a checkpoint to `out`/ROLE, and yield each directory once it is there.

    One file's tensors are in memory at a time. UserError where the checkpoint or what the recipe names cannot be
    read, RunError where a model cannot be written.
    """
    experiment = load_experiment(str(run_dir / CONFIG))
    tokenizer = load_shared_tokenizer(experiment)
    stop_token_ids = load_stop_token_ids(experiment, tokenizer)
    try:
        manifest = read_manifest(checkpoint)
        for role in roles:
            config, head = getattr(experiment.models, role), get_spec(experiment).heads[role]
            shape, dtype = find_model_shape(config), find_torch_dtype(DTYPES[config.dtype])
            files = huggingface.shards(model_tensors(shape, head), dtype)
            try:
                huggingface.save(
                    out / role,
                    shape,
                    head,
                    partial(_fetch, checkpoint, manifest, role, files, dtype),
                    tokenizer,
                    dtype,
                    origin=None if config.path is None else read_origin(config.path),
                    stop_token_ids=stop_token_ids,
                )
            except Exception as error:
                refusal = as_os_error(error)
                if refusal is None:
                    raise
                raise RunError(f"{out / role} cannot be written: {reason_of(refusal)}") from error
            yield out / role
    except CheckpointError as error:
        raise UserError(str(error)) from None


def _fetch(
    checkpoint: Path,
    manifest: Manifest,
    role: str,
    files: Sequence[Sequence[TensorSpec]],
    dtype: torch.dtype,
    file: int,
) -> FlatBuffer:
    """Read the tensors of one file of a model."""
    buffer = FlatBuffer(files[file], dtype, "cpu")
    tensors = {
        f"{role}/{PARAMETERS}/{spec.name}": TensorPieces(
            spec.shape, dtype, {(0,) * len(spec.shape): buffer[spec.name]}
        )
        for spec in files[file]
    }
    check_tensors(checkpoint, manifest, tensors)
    read_state(checkpoint, manifest, tensors, group=None)
    return buffer
