"""Run recipes in processes of this machine.

Each set of ranks is started once and runs one recipe after the other.
"""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from realrl.algorithms.build import build_algorithm
from realrl.config.errors import RunError, UserError
from realrl.data.batch import Batch
from realrl.dataflow.environment import ACTION_MASK
from realrl.engine.generation.generator import Generation
from realrl.engine.model import Model
from realrl.plan.cluster import Cluster
from realrl.recipe.load import load_experiment
from realrl.runtime import train
from realrl.runtime.evaluation.run import evaluate_recipe, write_evaluation
from realrl.runtime.observer import Wishes
from realrl.runtime.output.rundir import EVALUATIONS
from realrl.runtime.prepare.inputs import load_functions
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, STORE_VARIABLE, set_library_defaults
from realrl.runtime.resume import gather_algorithm_state
from realrl.runtime.training_run import TrainingRun
from realrl.runtime.worker import worker
from realrl.testing.compare import CheckFailure

Tokens = dict[str, list[list[int]]]
"""Generated tokens of a run. The key `step/item` has the token ids of each sequence that was generated for an item.
The key `step/item prompt` has the number of prompt tokens in each of these sequences."""

PRELOADED = (
    "realrl.testing.compiled",
    "torch.distributed.checkpoint",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "realrl.algorithms.policy_gradient",
    __name__,
)
"""Modules that the fork server imports once, so that the processes that it starts need not import them."""
PATIENCE = 60.0
"""Seconds per recipe. A run that takes longer counts as hanging."""


class Silent:
    """Observer of a run that ignores all events."""

    wishes = Wishes()

    def begin(self, *_: object) -> None:
        """Ignore the event."""

    costs = note = record = end = begin


class RanksFailure(CheckFailure):
    """A failed run: the name of its recipe, and the error message."""

    def __init__(self, recipe: str, message: str) -> None:
        super().__init__(f"{recipe}: {message}")
        self.recipe, self.message = recipe, message


class RenewedRun(TrainingRun):
    """A run that rebuilds its algorithm from its saved state after each step. Weights and optimizer state stay."""

    def _train_step(self, step: int) -> dict[str, float]:
        metrics = super()._train_step(step)
        saved = gather_algorithm_state(self.process, self.job.train, self.algorithm)
        state: dict[str, Any] = json.loads(json.dumps(saved))
        self.algorithm = build_algorithm(self.experiment)
        self.algorithm.load_state_dict(state)
        load_functions(self.algorithm, self.job.phases.values(), self.process.rank)
        self.worker.use(self.algorithm)
        return metrics


class InterruptedRun(TrainingRun):
    """A run that saves a checkpoint after its first step, and ends there without a result."""

    def _after_step(self, done: int, *, late: bool = False, resumed: bool = False) -> None:
        self.continuation.save(done)
        self.steps = done

    def _finish(self) -> None:
        self.checkpointer.finish()


def run_on_ranks(
    size: int,
    recipes: Sequence[Path],
    *,
    classes: Mapping[Path, type[TrainingRun]] = MappingProxyType({}),
    evaluated: Collection[Path] = (),
    prepare: Callable[[], None] | None = None,
) -> None:
    """Run recipes that need `size` devices each.

    Each rank writes the tokens that it generates to a file in the recipe's directory, which `sampled` reads.

    `classes`: the class of a recipe's run, if it is not `TrainingRun`. Recipes in `evaluated` are evaluated instead
    of trained, like `realrl eval`; results go to RUN_DIR/eval. Raises RanksFailure for the first recipe that fails.
    """
    set_library_defaults()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    arguments = [(str(recipe), classes.get(recipe), recipe in evaluated) for recipe in recipes]
    processes = [context.Process(target=_rank, args=(rank, size, arguments, prepare)) for rank in range(size)]
    ended = True
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE * len(recipes)
        while any(process.is_alive() for process in processes):
            ended = time.monotonic() < deadline
            if not ended or any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    written = (file for scratch in {recipe.parent for recipe in recipes} for file in scratch.glob("error-*"))
    failures = sorted(written, key=lambda file: file.stat().st_mtime_ns)
    if failures:
        raise RanksFailure(**json.loads(failures[0].read_text()))
    if not ended:
        raise CheckFailure(f"{size} processes did not end within {PATIENCE * len(recipes):g} seconds")
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise CheckFailure(f"processes ended with status {codes}")


def sampled(recipe: Path) -> Tokens:
    """Collect the generated tokens of all ranks. Raises CheckFailure if ranks have different tokens for an item."""
    everything: Tokens = {}
    for file in recipe.parent.glob(f"{recipe.stem}-tokens-*.json"):
        for item, tokens in json.loads(file.read_text()).items():
            if everything.setdefault(item, tokens) != tokens:
                raise CheckFailure(f"{file.name}: another rank sampled other tokens for {item}")
    return everything


def _rank(
    rank: int,
    size: int,
    recipes: Sequence[tuple[str, type[TrainingRun] | None, bool]],
    prepare: Callable[[], None] | None,
) -> None:
    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["WORLD_SIZE"] = str(size)
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
    for name, run_class, evaluated in recipes:
        recipe = Path(name)
        os.environ[STORE_VARIABLE] = str(recipe.with_suffix(".store"))
        try:
            _run(rank, recipe, run_class, evaluated=evaluated)
        except BaseException as error:
            known = isinstance(error, UserError | RunError)
            message = str(error) if known else f"rank {rank}:\n{traceback.format_exc()}"
            record = {"recipe": recipe.stem, "message": message}
            (recipe.parent / f"error-{recipe.stem}-{rank}").write_text(json.dumps(record))
            raise SystemExit(1) from None


def _run(rank: int, recipe: Path, run_class: type[TrainingRun] | None, *, evaluated: bool) -> None:
    """Run one recipe, and write the generated tokens to a file."""
    experiment = load_experiment(str(recipe))
    file = recipe.parent / f"{recipe.stem}-tokens-{rank}.json"
    # A run that resumes goes on with the file of its first part.
    resumes = not experiment.overwrite and file.exists()
    tokens: Tokens = json.loads(file.read_text()) if resumes else {}
    items = experiment.data.batch * experiment.spec.samples_per_prompt(experiment)

    class Watched(Generation):
        """A generate call that notes what it samples."""

        def __init__(self, model: Model, *args: Any, **settings: Any) -> None:
            super().__init__(model, *args, **settings)
            self._last, self._settings = model.shard.last, settings

        def take(self, *, left: int = 0) -> Batch:
            batch = super().take(left=left)
            seed, in_parts = self._settings["seed"], self._settings.get("part") is not None
            if not self._last:
                return batch
            fields = zip(batch.ids, batch["sequences"].rows(), batch["prompt_length"].rows(), strict=True)
            for item, row, prompt in fields:
                # With parts, the ids of later batches follow those of the first one.
                ahead, number = divmod(item, items) if in_parts else (0, seed.first_sequence + item)
                name = f"{seed.step + ahead}/{number}"
                name += " greedy" if self._settings["sampling"].greedy else ""
                if in_parts:  # this row has the tokens of earlier parts, too
                    tokens[name], tokens[f"{name} prompt"] = [], []
                tokens.setdefault(name, []).append(row.tolist())
                tokens.setdefault(f"{name} prompt", []).append(prompt.tolist())
                if ACTION_MASK in batch.fields:
                    mask = batch[ACTION_MASK].row(batch.ids.index(item))
                    tokens.setdefault(f"{name} mask", []).append(mask.tolist())
            return batch

    # This changes only this process, which runs nothing but checks.
    worker.Generation = Watched  # type: ignore[misc]
    cluster = Cluster.parse(experiment.cluster)
    ranks = cluster.ranks(node := cluster.node(rank))
    os.environ |= {"LOCAL_RANK": str(rank - ranks.start), "LOCAL_WORLD_SIZE": str(len(ranks))}
    os.environ |= {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(cluster.nodes)}
    if evaluated:
        report = evaluate_recipe(experiment, lambda note: None)
        if report is not None:
            write_evaluation(Path(experiment.run_dir) / EVALUATIONS, experiment, report)
    else:
        train.train(experiment, Silent(), run_class)
    file.write_text(json.dumps(tokens))
