"""Runs of every family: SFT, reward modelling, PPO and GRPO learn the same under every plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realrl.families.registry import list_families
from realrl.families.shape import ModelShape, RopeScaling
from realrl.testing.compare import read_metrics
from realrl.testing.ranks import run_on_ranks, sampled
from realrl.testing.shrink import save_model
from tests.conftest import EVERY_RUN, PPO_CALLS, World
from tests.model.small_models import SHAPES as SMALL

EVERYTHING = EVERY_RUN
"""Whether all algorithms of all families run under all plans, which takes three minutes of processor time.

Otherwise those of THOROUGH do, and of the other families PPO, which trains both heads, infers, samples and moves
parameters, under one plan of two processes.
"""
THOROUGH = ("gpt2", "phi3")
"""Families whose tensors are cut or computed in ways of their own."""
STEPS = 3
TOLERANCE = 1e-4
NEAR_ZERO = {"kl": 1e-5, "loss": 5e-6}
"""What rounding may make of means of terms around 1 which cancel; 1e-6 of other figures."""
COMPARED = ("loss", "score", "reward", "tokens", "grad_norm", "accuracy")
"""How the names of metrics end that are compared."""
MISMATCH = 1e-5
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"}
"""With the usual `eps`, Adam makes full steps of what is only rounding error in elements without gradient."""
DP, TP, PP = "dp: 2", "dp: 1, tp: 2", "dp: 1, pp: 2"
SEQUENCE = f"{TP}, sequence_parallel: true"
GRPO_CALLS = ("actor.generate", "reward.inference", "ref.inference", "actor.train")
PLANS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "mixed": {
        "sft": {"actor.train": SEQUENCE},
        "reward": {"reward.train": TP},
        "ppo": dict(zip(PPO_CALLS, (TP, DP, DP, DP, DP, TP), strict=True)),
        "grpo": dict(zip(GRPO_CALLS, (DP, TP, TP, SEQUENCE), strict=True)),
    },
    "stages": {
        "sft": {"actor.train": PP},
        "reward": {"reward.train": PP},
        "ppo": dict.fromkeys(PPO_CALLS, PP),
        "grpo": dict.fromkeys(GRPO_CALLS, PP),
    },
}
"""Strategies of calls on two processes. Where one model has several, its parameters move in between."""
ALGORITHMS = ("sft", "reward", "ppo", "grpo")
SAMPLE = ("ppo", "grpo")
"""Those that train on samples of the actor."""
LONG = RopeScaling(
    kind="longrope",
    factor=4.0,
    original_max_position_embeddings=16,
    short_factor=(1.0, 1.1, 1.3, 1.7, 2.0, 2.2),
    long_factor=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
)
"""Frequencies for long sequences, which these runs may have."""
SHAPES: dict[str, ModelShape] = {
    shape.family: shape.model_copy(update={"vocab_size": 323})  # more than tokens, and odd
    for name, shape in SMALL.items()
    if shape.layers > 1 and name != "biased-yarn"
}
SHAPES["phi3"] = SHAPES["phi3"].model_copy(
    # As narrow as the others: with large random weights, rounding grows with the width.
    update={"rope_scaling": LONG, "max_positions": 64, "hidden_size": 48}
)


@dataclass(frozen=True)
class Case:
    """One run."""

    family: str
    algorithm: str
    plan: str
    """One of PLANS, or `alone` for that of one process."""

    def __str__(self) -> str:
        return f"{self.family}, {self.algorithm}, {self.plan}"


def list_cases(plan: str) -> list[Case]:
    """List the runs under a plan; where one plan of two processes is enough for a family, plans take turns."""
    turn = [*PLANS].index(plan) if plan in PLANS else None
    return [
        Case(family, algorithm, plan)
        for i, family in enumerate(SHAPES)
        for algorithm in ALGORITHMS
        if EVERYTHING or family in THOROUGH or (algorithm == "ppo" and turn in (None, i % len(PLANS)))
    ]


ALONE = list_cases("alone")
DIVIDED = [case for plan in PLANS for case in list_cases(plan)]


@dataclass(frozen=True)
class Finished:
    """Recipes of finished runs."""

    recipes: Mapping[Case, Path]

    def metrics(self, case: Case) -> list[dict[str, float]]:
        return [line["metrics"] for line in read_metrics(self.directory(case))]

    def directory(self, case: Case) -> Path:
        return self.recipes[case].with_suffix("")

    def models(self, case: Case) -> dict[str, dict[str, torch.Tensor]]:
        """Exported models by their directories."""
        top = self.directory(case) / "final"
        return {str(file.parent.relative_to(top)): load_file(file) for file in top.rglob("model.safetensors")}


def write_recipe(world: World, models: Path, place: Path, case: Case) -> Path:
    """Write the recipe of a case, which runs into a directory of its own."""
    actor = {"path": str(models / case.family / "actor"), "tokenizer": world.tokenizer}
    reward = {"path": str(models / case.family / "reward"), "tokenizer": world.tokenizer}
    trained = {"optimizer": OPTIMIZER}
    stem = f"{case.family}-{case.algorithm}-{case.plan}"
    changes: dict[str, Any] = {
        "run_dir": str(place / stem),
        "data__batch": 4,
        "training__steps": STEPS,
        "micro_batch_tokens": 100,
        "debug__verify_reallocation": True,
    }
    match case.algorithm:
        case "sft":
            changes |= {"models": {"actor": actor | trained}, "data__max_tokens": 64}
        case "reward":
            changes |= {"models": {"reward": reward | trained}, "data__max_tokens": 64}
        case _:
            changes |= {
                "models": {"actor": actor | trained, "reward": reward},
                "data__max_prompt_tokens": 32,
                "generation": {"max_new_tokens": 5},
            }
    if case.algorithm == "ppo":
        changes["models"]["critic"] = trained
    if case.algorithm == "grpo":
        changes["policy"] = {"samples": 2, "minibatches": 2, "kl": {"coef": 0.1}}
    if case.plan != "alone":
        calls = PLANS[case.plan][case.algorithm]
        entries = ", ".join(f"{call}: {{mesh: 0-1, {text}}}" for call, text in calls.items())
        file = place / f"{stem}.plan.yaml"
        file.write_text(f"cluster: 1x2\ncalls: {{{entries}}}\n")
        changes |= {"cluster": "1x2", "plan": str(file)}
    return world.recipe(case.algorithm, place, **changes).rename(place / f"{stem}.yaml")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `actor` and `reward` of every family, of random weights."""
    directory = tmp_path_factory.mktemp("families")
    for family, shape in SHAPES.items():
        save_model(directory / family / "actor", "lm", None, shape.model_dump())
        save_model(directory / family / "reward", "scalar", None, shape.model_dump(), seed=4)
    return directory


@pytest.fixture(scope="module")
def finished(world: World, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All runs, those of one size in the same processes."""
    place = tmp_path_factory.mktemp("runs")
    recipes = {case: write_recipe(world, models, place, case) for case in (*ALONE, *DIVIDED)}
    run_on_ranks(1, [recipes[case] for case in ALONE])
    run_on_ranks(2, [recipes[case] for case in DIVIDED])
    return Finished(recipes)


def test_every_family_runs() -> None:
    assert sorted(SHAPES) == sorted(list_families())
    assert {case.family for case in DIVIDED} == {*SHAPES}


@pytest.mark.parametrize("case", DIVIDED, ids=str)
def test_a_run_samples_and_learns_under_every_plan_as_in_one_process(finished: Finished, case: Case) -> None:
    alone = Case(case.family, case.algorithm, "alone")
    assert sampled(finished.recipes[case]) == sampled(finished.recipes[alone])
    ours, expected = finished.metrics(case), finished.metrics(alone)
    assert len(ours) == len(expected) == STEPS
    for step, (metrics, reference) in enumerate(zip(ours, expected, strict=True)):
        assert metrics.keys() == reference.keys()
        for figure, value in reference.items():
            kind = figure.rpartition("/")[2]
            if kind == "kl" or kind.endswith(COMPARED):
                wanted = pytest.approx(value, rel=TOLERANCE, abs=NEAR_ZERO.get(kind, 1e-6))
                assert metrics[figure] == wanted, (step, figure)
    weights, others = finished.models(case), finished.models(alone)
    assert weights.keys() == others.keys() and weights
    for name, tensors in weights.items():
        torch.testing.assert_close(tensors, others[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in (*ALONE, *DIVIDED) if case.algorithm in SAMPLE], ids=str)
def test_sampler_and_trainer_agree_at_every_step(finished: Finished, case: Case) -> None:
    steps = [metrics["actor.train/sampler_trainer_mismatch"] for metrics in finished.metrics(case)]
    assert len(steps) == STEPS and max(steps) <= MISMATCH


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_every_trained_model_learns_in_every_step(finished: Finished, case: Case) -> None:
    for metrics in finished.metrics(case):
        norms = [value for name, value in metrics.items() if name.endswith("grad_norm")]
        assert len(norms) == 1 + (case.algorithm == "ppo") and min(norms) > 0
