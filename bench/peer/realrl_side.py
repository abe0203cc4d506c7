"""Run a case with realrl: the training loop of `realrl train`, in one process.

python bench/peer/realrl_side.py CASE DIR STEPS [TRL_BATCH]
"""

import sys
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.append(str(Path(__file__).parents[1]))

from cases import EOS_ID, PROMPT, Turns, World, read_device
from harness import SilentObserver
from torch import Tensor

from realrl.engine.generation.decode_step import DecodeStep
from realrl.engine.generation.row_buffers import BufferedRows
from realrl.engine.generation.sampling_noise import SamplingNoise
from realrl.recipe.load import load_experiment
from realrl.runtime.observer import MetricsRecord
from realrl.runtime.train import train


class StepByStep(SilentObserver):
    """Observer that holds the run until it is this side's turn."""

    def __init__(self, world: World, turns: Turns) -> None:
        super().__init__()
        self._world, self._turns = world, turns

    def begin(self, experiment: object, steps: int) -> None:
        self._turns.ready()

    def record(self, record: MetricsRecord) -> None:
        print(record)
        self._turns.done(self._world.count_tokens(self._turns.step))


def write_recipe(world: World, steps: int) -> Path:
    """Write the recipe of a case."""
    case = world.case
    model = "reward" if case.algorithm == "reward" else "actor"
    optimizer = {"lr": 1e-6, "betas": [0.9, 0.999], "schedule": "constant"}
    longest = case.lengths.most + PROMPT.get(case.algorithm, 0)
    recipe: dict[str, Any] = {
        "algorithm": case.algorithm,
        "run_dir": str(world.root / "run"),
        "overwrite": True,
        "cluster": "1x1",
        "device": read_device(),
        "micro_batch_tokens": case.micro_batch_tokens,
        "models": {model: {"path": str(world.model), "dtype": case.dtype, "optimizer": optimizer}},
        "data": {
            "train": str(world.records),
            "batch": case.items,
            "max_prompt_tokens": PROMPT.get(case.algorithm, longest),
            "max_tokens": longest,
            "shuffle": False,
        },
        "training": {"steps": steps},
    }
    if case.algorithm == "grpo":
        recipe["reward"] = f"{Path(__file__).with_name('cases.py')}:reward"
        recipe["policy"] = {"samples": case.rows // case.items, "kl": {"coef": 0.0}}
        recipe["generation"] = {"max_new_tokens": case.lengths.most}
        recipe["plan"] = str(write_plan(world))
    path = world.root / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def write_plan(world: World) -> Path:
    """Write the plan of GRPO: generation gets room for more tokens than a micro-batch of training."""
    case = world.case
    calls = {"actor.generate": case.cache_tokens, "actor.train": case.micro_batch_tokens}
    plan = {
        "cluster": "1x1",
        "calls": {
            "reward.function": {"mesh": "0", "dp": 1},
            **{name: {"mesh": "0", "dp": 1, "micro_batch_tokens": tokens} for name, tokens in calls.items()},
        },
    }
    path = world.root / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


def end_answers(world: World) -> None:
    """Make answers end at the lengths of the case, whatever the model samples."""
    run = DecodeStep.run
    make_keys = SamplingNoise.make_keys
    most = world.case.lengths.most
    lengths_by_key: dict[int, int] = {}

    def note_keys(self: SamplingNoise, items: Tensor) -> Tensor:
        keys = make_keys(self, items)
        lengths = world.answer_lengths(self.seed.step)
        lengths_by_key.clear()
        lengths_by_key.update(zip(keys.tolist(), (lengths[item] for item in items.tolist()), strict=True))
        return keys

    def run_and_end(self: DecodeStep, rows: BufferedRows, hidden: Tensor | None) -> Tensor:
        tokens = run(self, rows, hidden)
        lengths = torch.tensor([lengths_by_key[key] for key in rows.keys.tolist()])
        tokens = tokens.masked_fill(tokens == EOS_ID, EOS_ID + 1)
        tokens.masked_fill_((lengths == rows.cached.own_lengths) & (lengths < most), EOS_ID)
        rows.sampled[0] = rows.tokens.copy_(tokens)
        return tokens

    SamplingNoise.make_keys = note_keys  # type: ignore[method-assign]
    DecodeStep.run = run_and_end  # type: ignore[method-assign]


def main() -> None:
    turns = Turns()
    world, steps = World.of(sys.argv[1:])
    end_answers(world)
    train(load_experiment(str(write_recipe(world, steps)), []), StepByStep(world, turns))


if __name__ == "__main__":
    main()
