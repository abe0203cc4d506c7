"""Write the models of a run as Hugging Face directories, during the run or later with `realrl export`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from realrl.algorithms.base.method import Algorithm
from realrl.checkpoint.contents import PARAMETERS, TensorPieces
from realrl.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from realrl.checkpoint.saved import CONFIG
from realrl.checkpoint.storage import check_tensors, read_state
from realrl.config.errors import RunError, UserError
from realrl.config.files import as_os_error, reason_of
from realrl.engine.buffers import FlatBuffer
from realrl.engine.dtypes import find_torch_dtype
from realrl.families.adapter_config import adapter_tensors
from realrl.families.registry import model_tensors
from realrl.families.shape import Head
from realrl.huggingface import model_files
from realrl.huggingface.directory import find_base, find_model_shape, read_origin
from realrl.huggingface.shards import Portion, list_portions, take_whole
from realrl.huggingface.tensor_conversion import Weights
from realrl.plan.placement import DTYPES
from realrl.program.lower import WRITER
from realrl.recipe.load import load_experiment
from realrl.recipe.model import ModelConfig
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.prepare.inputs import load_shared_tokenizer, load_stop_token_ids
from realrl.runtime.prepare.job import Job
from realrl.runtime.processes.process import Process
from realrl.runtime.resume import gather_algorithm_state
from realrl.runtime.worker.roles import Roles


def export_models(
    run_dir: Path,
    checkpoint: Path,
    roles: Sequence[str],
    out: Path,
    max_shard_bytes: float = model_files.SHARD_BYTES,
    *,
    merge: bool = False,
) -> Iterator[Path]:
    """Write models of a checkpoint to `out`/ROLE, and yield each directory when it is complete.

    This runs in one process without a cluster. Only one portion of the tensors is in memory at a time. For a role
    with adapters, only the adapters are written unless `merge` is set. Raises UserError if the checkpoint or a
    source in the recipe cannot be read, and RunError if a model cannot be written.
    """
    experiment = load_experiment(str(run_dir / CONFIG))
    tokenizer = load_shared_tokenizer(experiment)
    stop_token_ids = load_stop_token_ids(experiment, tokenizer)
    try:
        manifest = read_manifest(checkpoint)
        for role in roles:
            config, head = getattr(experiment.models, role), experiment.spec.heads[role]
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
    """A role whose model is exported."""

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
        """Write the model. `fetch` returns the portion of tensors with a given number."""
        model_files.save(
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
        model_files.save_adapters(directory, self.shape, self._head, weights, tokenizer, self.dtype, base)

    def merge(self, adapters: str) -> Callable[[int], Weights]:
        """Return a function that returns the portion of tensors with a given number, merged with adapters.

        `adapters`: directory of the saved adapters.
        """
        source = model_files.ModelFiles(adapters, self._whole, model_tensors(self._whole, self._head))
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
    """Read the portion of tensors with this number from the checkpoint."""
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


class ModelSaver:
    """Saves the trained roles of a run: final models, best models, and models of checkpoints.

    Every rank has a saver.
    """

    def __init__(
        self,
        job: Job,
        process: Process,
        roles: Roles,
        directory: RunDirectory,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        algorithm: Callable[[], Algorithm],
    ) -> None:
        """`algorithm` returns the current algorithm object."""
        self._job, self._process = job, process
        self._roles, self._directory, self._trained = roles, directory, job.trained
        self._tokenizer, self._stop_token_ids, self._algorithm = tokenizer, stop_token_ids, algorithm

    def save(self, which: Literal["best"] | None) -> None:
        """Write every trained role, as the best models or, if `which` is None, as the final models.

        The first trained role of the graph is written to the directory itself; for other roles, the name of the
        role is appended. The algorithm's own state, such as the scale of a critic's values, goes into a file beside
        the models.
        """
        with self._process.activity.part("save"):
            for role in self._trained:
                name = "" if role == self._trained[0] else role
                self._save_role(role, self._directory.checkpoint(which, name))
            state = gather_algorithm_state(self._process, self._job.train, self._algorithm())
            if self._process.rank == WRITER and state:
                self._directory.write_state(which, self._job.experiment.spec.name, state)

    def export(self, directory: Path) -> None:
        """Write every trained role into a subdirectory with its name."""
        for role in self._trained:
            self._save_role(role, directory / role)

    def _save_role(self, role: str, path: Path) -> None:
        """Write the model of a role. Of the ranks that store the model, the first one writes the files."""
        if self._process.rank in self._job.homes[role].ranks:
            with self._directory.writing(path):
                self._roles.save(role, path, self._tokenizer, self._stop_token_ids)
