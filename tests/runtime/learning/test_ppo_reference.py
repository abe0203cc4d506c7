"""Whole steps of PPO under several plans against an independent implementation on transformers."""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from realrl.recipe.load import load_experiment
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import EVERY_RUN, PPO_CALLS, World
from tests.runtime.ppo_in_transformers import Reference, Setting, read_samples

STEPS, BATCH = 3, 12
PLANS = {
    "alone": (1, "dp: 1"),
    "dp=2": (2, "dp: 2"),
    "tp=2": (2, "dp: 1, tp: 2"),
    "pp=2": (2, "dp: 1, pp: 2"),
}
SETTINGS = {
    f"{truncated}, {epochs} epochs": {
        "truncated": truncated,
        "epochs": epochs,
        "value_norm": norm,
        "value_norm_beta": 0.7,
        "minibatches": 2,
        "reward_scale": 1.5,
        "reward_bias": -2.0,
        "reward_clip": 4.0,
        "missing_eos_penalty": 0.3,
        "gamma": 0.98,
        "lam": 0.9,
        "early_stop_ratio": None,
        "kl": {"coef": 0.1, "adaptive": True, "target": 0.5, "horizon": 100},
    }
    for truncated, epochs, norm in (
        ("score", 1, "running"),
        ("bootstrap", 1, "exponential"),
        ("score", 2, "exponential"),
        ("bootstrap", 2, "running"),
    )
}
CASES = [*product(PLANS, SETTINGS)]


def is_further(plan: str, setting: str) -> bool:
    """Whether only `make test-all` runs this: settings take turns under plans of two processes."""
    return plan != "alone" and ([*PLANS].index(plan) + [*SETTINGS].index(setting)) % 2 == 1


def recipe(world: World, actor: Path, directory: Path, plan: str, ppo: Mapping[str, Any]) -> Path:
    size, strategy = PLANS[plan]
    placed = "\n".join(f"  {call}: {{mesh: 0-{size - 1}, {strategy}}}" for call in PPO_CALLS)
    directory.mkdir(parents=True)
    (directory / "plan.yaml").write_text(f"cluster: 1x{size}\ncalls:\n{placed}\n")
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, "schedule": "constant"}
    changes = {
        "cluster": f"1x{size}",
        "plan": str(directory / "plan.yaml"),
        "ppo": ppo,
        "data__batch": BATCH,
        "training__steps": STEPS,
        "generation": {"max_new_tokens": 12, "temperature": 0.9},
        "models__actor": {"path": str(actor), "optimizer": {**optimizer, "grad_clip": 0.5}},
        "models__critic": {"optimizer": {**optimizer, "grad_clip": 0.3}},
    }
    file = world.recipe("ppo", directory, **changes)
    return file.rename(directory / f"{directory.name}.yaml")


@pytest.fixture(scope="module")
def recipes(
    world: World, actor: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], Path]:
    """(plan, setting) -> recipe of a run that has ended."""
    found = {}
    for plan, setting in CASES:
        if EVERY_RUN or not is_further(plan, setting):
            directory = tmp_path_factory.mktemp("runs") / f"{plan}-{len(found)}"
            found[plan, setting] = recipe(world, actor, directory, plan, SETTINGS[setting])
    for size in (1, 2):
        mine = [file for (plan, _), file in found.items() if PLANS[plan][0] == size]
        run_on_ranks(size, mine)
    return found


@pytest.fixture(scope="module")
def reference(
    world: World, actor: Path, recipes: Mapping[tuple[str, str], Path]
) -> Mapping[str, dict[str, torch.Tensor]]:
    """Setting -> weights after all steps on what the run in one process sampled."""
    eos = json.loads((Path(world.actor) / "config.json").read_text())["eos_token_id"]
    found = {}
    for setting in SETTINGS:
        file = recipes["alone", setting]
        config = load_experiment(str(file)).ppo
        learner = Reference(
            Setting(config, 0.9, 12, 1e-3, 0.1, actor_grad_clip=0.5, critic_grad_clip=0.3),
            actor,
            Path(world.reward),
            eos,
        )
        finished = []
        tokens = sampled(file)
        for step in range(STEPS):
            samples = read_samples(tokens, step, BATCH)
            finished += [sample.tokens[-1] == eos for sample in samples]
            learner.step(samples)
        assert 0.2 < sum(finished) / len(finished) < 0.9, "both kinds of answers occur"
        found[setting] = learner.weights()
    return found


@pytest.mark.parametrize(
    ("plan", "setting"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if is_further(*case) else ()) for case in CASES],
)
def test_three_steps_end_with_the_weights_of_an_independent_implementation(
    recipes: Mapping[tuple[str, str], Path],
    reference: Mapping[str, dict[str, torch.Tensor]],
    world: World,
    plan: str,
    setting: str,
) -> None:
    file = recipes[plan, setting]
    assert sampled(file) == sampled(recipes["alone", setting])
    run = file.parent / "run"
    models = {
        "actor": AutoModelForCausalLM.from_pretrained(run / "final"),
        "critic": AutoModelForSequenceClassification.from_pretrained(run / "final-critic"),
    }
    before = AutoModelForSequenceClassification.from_pretrained(world.reward).state_dict()
    for role, model in models.items():
        for name, weights in model.named_parameters():
            distance = (weights.detach() - reference[setting][f"{role} {name}"]).abs().max()
            assert distance <= 1e-4, f"{role} {name}"
    moved = (models["critic"].state_dict()["score.weight"] - before["score.weight"]).abs().max()
    assert moved > 1e-3, "there was something to learn"
