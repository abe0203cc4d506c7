"""A recipe under many plans: processes are started once per number of ranks and run one plan after the other."""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, STORE_VARIABLE
from tests.runtime.processes import PATIENCE

Tokens = dict[str, list[list[int]]]
"""`step/item` -> the sequences that were generated for it, and `step/item prompt` -> how many tokens of each are
its prompt; evaluations share their step's number."""


class Silent:
    """An observer that is not interested."""

    def begin(self, *_: object) -> None: ...
    def costs(self, *_: object) -> None: ...
    def note(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def end(self, *_: object) -> None: ...


def run_on_ranks(size: int, recipes: Sequence[Path], *, evaluate: bool = False) -> None:
    """Run recipes of `size` devices each; every rank leaves what it generated beside the recipe, for `sampled`.

    `evaluate`: as `realrl eval` does, into RUN_DIR/eval, instead of training.
    """
    scratch = recipes[0].parent
    context = multiprocessing.get_context("forkserver")
    # Imported once, in the server, instead of in every process.
    context.set_forkserver_preload(["realrl.runtime.train", "transformers", __name__])
    arguments = [str(recipe) for recipe in recipes]
    processes = [
        context.Process(target=_rank, args=(rank, size, arguments, evaluate)) for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE * len(recipes)
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    failures = sorted(scratch.glob("error-*"), key=lambda file: file.stat().st_mtime_ns)
    assert not failures, failures[0].read_text()
    assert [process.exitcode for process in processes] == [0] * size


def sampled(recipe: Path) -> Tokens:
    """What all ranks of a run have generated; where several hold the same sequence, it is the same."""
    everything: Tokens = {}
    for file in recipe.parent.glob(f"{recipe.stem}-tokens-*.json"):
        for item, tokens in json.loads(file.read_text()).items():
            assert everything.setdefault(item, tokens) == tokens, f"{file.name}: {item}"
    return everything


def _rank(rank: int, size: int, recipes: Sequence[str], evaluate: bool) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["WORLD_SIZE"] = str(size)
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
    for recipe in map(Path, recipes):
        os.environ[STORE_VARIABLE] = str(recipe.with_suffix(".store"))
        try:
            _run(rank, recipe, evaluate)
        except BaseException:
            trouble = f"{recipe.stem}, rank {rank}:\n{traceback.format_exc()}"
            (recipe.parent / f"error-{recipe.stem}-{rank}").write_text(trouble)
            raise


def _run(rank: int, recipe: Path, evaluate: bool) -> None:
    """One run, whose generation is watched."""
    from realrl.cli.app import run_app
    from realrl.engine.generation.generator import generate
    from realrl.plan.cluster import Cluster
    from realrl.recipe.load import load_experiment
    from realrl.runtime import train
    from realrl.runtime.worker import worker

    tokens: Tokens = {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        batch, model, seed = generate(*args, **kwargs), args[0], kwargs["seed"]
        if model.shard.last:
            fields = zip(batch.ids, batch["sequences"].rows(), batch["prompt_length"].rows(), strict=True)
            for item, row, prompt in fields:
                name = f"{seed.step}/{seed.first_sequence + item}"
                name += " greedy" if kwargs["sampling"].greedy else ""
                tokens.setdefault(name, []).append(row.tolist())
                tokens.setdefault(f"{name} prompt", []).append(prompt.tolist())
        return batch

    worker.generate = watched  # type: ignore[attr-defined]
    experiment = load_experiment(str(recipe))
    os.environ["LOCAL_WORLD_SIZE"] = str(Cluster.parse(experiment.cluster).devices_per_node)
    if evaluate:
        assert run_app(["eval", str(recipe)]) == 0
    else:
        train.train(experiment, Silent())
    (recipe.parent / f"{recipe.stem}-tokens-{rank}.json").write_text(json.dumps(tokens))
