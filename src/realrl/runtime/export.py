"""Export of a checkpoint's models as Hugging Face directories, in one process and without a cluster."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from realrl.checkpoint import huggingface
from realrl.checkpoint.directory import find_base, find_model_shape
from realrl.checkpoint.origin import read_origin
from realrl.checkpoint.portions import Portion, list_portions, take_whole
from realrl.checkpoint.state.manifest import CheckpointError, Manifest, read_manifest
from realrl.checkpoint.state.pieces import TensorPieces
from realrl.checkpoint.state.reader import check_tensors, read_state
from realrl.checkpoint.stored import Weights
from realrl.config.errors import RunError, UserError
from realrl.config.files import as_os_error, reason_of
from realrl.engine.buffers import FlatBuffer
from realrl.engine.dtypes import find_torch_dtype
from realrl.families.adapter_config import adapter_tensors
from realrl.families.registry import model_tensors
from realrl.families.shape import Head
from realrl.plan.placement import DTYPES
from realrl.recipe.algorithm import get_spec
from realrl.recipe.load import load_experiment
from realrl.recipe.model import ModelConfig
from realrl.runtime.checkpoints.contents import PARAMETERS
from realrl.runtime.output.saved import CONFIG
from realrl.runtime.setup import load_shared_tokenizer, load_stop_token_ids


def export_models(
    run_dir: Path,
    checkpoint: Path,
    roles: Sequence[str],
    out: Path,
    max_shard_bytes: float = huggingface.SHARD_BYTES,
    *,
    merge: bool = False,
) -> Iterator[Path]:
    """Write models of a checkpoint to `out`/ROLE, and yield each directory once it is there.

    Of a role with adapters these alone, unless they are to be merged into their model. A portion of the tensors is
    in memory at a time. UserError where the checkpoint or what the recipe names cannot be read, RunError where a
    model cannot be written.
    """
    experiment = load_experiment(str(run_dir / CONFIG))
    tokenizer = load_shared_tokenizer(experiment)
    stop_token_ids = load_stop_token_ids(experiment, tokenizer)
    try:
        manifest = read_manifest(checkpoint)
        for role in roles:
            config, head = getattr(experiment.models, role), get_spec(experiment).heads[role]
            exported = _Exported(role, config, head, max_shard_bytes)
            try:
                if exported.shape.lora is None:
                    fetch = partial(_fetch, checkpoint, manifest, role, exported.portions, exported.dtype)
                    exported.save(out / role, fetch, tokenizer, stop_token_ids)
                elif merge:
                    with TemporaryDirectory(prefix=".merged-", dir=_make(out)) as scratch:
                        exported.save_adapters(Path(scratch), checkpoint, manifest, None)
                        exported.save(out / role, exported.merge(scratch), tokenizer, stop_token_ids)
                else:
                    exported.save_adapters(out / role, checkpoint, manifest, tokenizer)
            except Exception as error:
                refusal = as_os_error(error)
                if refusal is None:
                    raise
                raise RunError(f"{out / role} cannot be written: {reason_of(refusal)}") from error
            yield out / role
    except CheckpointError as error:
        raise UserError(str(error)) from None


def _make(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


class _Exported:
    """A role that is written."""

    def __init__(self, role: str, config: ModelConfig, head: Head, max_shard_bytes: float) -> None:
        self._role, self._config, self._head, self._max_shard_bytes = role, config, head, max_shard_bytes
        self.shape, self.dtype = find_model_shape(config), find_torch_dtype(DTYPES[config.compute_dtype])
        self._whole = self.shape.model_copy(update={"lora": None})
        self.portions = list_portions(model_tensors(self._whole, self._head), self.dtype)

    def save(
        self,
        directory: Path,
        fetch: Callable[[int], Weights],
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        """Write the model, of which `fetch` gives one portion after the other."""
        huggingface.save(
            directory,
            self._whole,
            self._head,
            fetch,
            tokenizer,
            self.dtype,
            self._max_shard_bytes,
            origin=None if self._config.path is None else read_origin(self._config.path),
            stop_token_ids=stop_token_ids,
        )

    def save_adapters(self, directory: Path, checkpoint: Path, manifest: Manifest, tokenizer: Any) -> None:
        """Write the adapters of a checkpoint."""
        assert self._config.path is not None, "adapters are for weights of a directory"
        tensors = adapter_tensors(model_tensors(self.shape, self._head))
        weights = _fetch(checkpoint, manifest, self._role, [take_whole(tensors)], self.dtype, 0)
        base = str(find_base(self._config.path))
        huggingface.save_adapters(directory, self.shape, self._head, weights, tokenizer, self.dtype, base)

    def merge(self, adapters: str) -> Callable[[int], Weights]:
        """Make a function that gives portions of tensors, with adapters merged into them."""
        source = huggingface.ModelFiles(adapters, self._whole, model_tensors(self._whole, self._head))
        return lambda number: {
            part.spec.name: source.read(part.spec, part.region) for part in self.portions[number]
        }


def _fetch(
    checkpoint: Path,
    manifest: Manifest,
    role: str,
    portions: Sequence[Portion],
    dtype: torch.dtype,
    number: int,
) -> FlatBuffer:
    """Read one portion of a model's tensors."""
    parts = portions[number]
    buffer = FlatBuffer([part.stored for part in parts], dtype, "cpu")
    tensors = {
        f"{role}/{PARAMETERS}/{part.spec.name}": TensorPieces(
            part.spec.shape, dtype, {part.region.offset: buffer[part.spec.name]}
        )
        for part in parts
    }
    check_tensors(checkpoint, manifest, tensors)
    read_state(checkpoint, manifest, tensors, group=None)
    return buffer
