"""Policy gradients and expert iteration learn the same under every plan, and as transformers and torch by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import EVERY_RUN, World, keep_full_precision, read_metrics, thin
from tests.runtime.policy_gradient_in_transformers import GRPO
from tests.runtime.ppo_in_transformers import read_samples

PRESETS: Mapping[str, dict[str, Any]] = {
    "grpo": {"epochs": 2, "ref_ema": 0.3},
    "dr_grpo": {},
    "dapo": {"overlong_buffer": 4, "mask_truncated": True},
    "gspo": {},
    "rloo": {"recompute_logprobs": True, "sampler_correction": "sequence_truncate"},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "remax": {},
    "expert_iteration": {"keep": 2, "aggregate": "sequence_mean"},
}
SEARCHED = ("grpo", "remax")
"""Presets that also run under plans found by search: with four calls and with six."""
METRICS = (
    "policy_loss_per_token",
    "loss",
    "reward",
    "score",
    "kept_score",
    "grad_norm",
    "response_tokens",
    "entropy",
    "sampler_weight",
    "effective_sample_size",
)
PLANS = {
    "2 symmetric": (2, "symmetric"),
    "2 two TP ranks": (2, "d1 t2 p1"),
    "2 two stages": (2, "d1 t1 p2"),
    "2 found by search": (2, "search"),
    "4 disjoint": (4, "disjoint"),
    "4 both": (4, "d1 t2 p2"),
}
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"}
TOLERANCE = 1e-4
STEPS, BATCH = 2, 8


def recipe(
    world: World, directory: Path, preset: str, *, size: int = 1, plan: str = "symmetric", **changes: Any
) -> Path:
    """The recipe of a preset, with groups of four, under a plan preset or one strategy for all calls."""
    directory.mkdir(parents=True)
    settings = {
        "cluster": f"1x{size}",
        "data__batch": BATCH,
        "training__steps": STEPS,
        "models__actor__optimizer": OPTIMIZER,
        "debug__verify_reallocation": True,
        **changes,
    }
    section = "expert_iteration" if preset == "expert_iteration" else "policy"
    settings.setdefault(section, {"minibatches": 2, **PRESETS[preset]})
    if preset not in ("reinforce_pp", "remax"):
        settings[section] = {"samples": 4, **settings[section]}
    file = world.recipe(preset, directory, **settings)
    if plan.startswith("d"):
        dp, tp, pp = (int(part[1:]) for part in plan.split()) if " " in plan else (0, 0, 0)
        if dp:
            entry = {"mesh": f"0-{size - 1}", "dp": dp, "tp": tp, "pp": pp}
            calls = {call.name: entry for call in build_graph(load_experiment(str(file))).calls}
            plan = str(directory / "plan.yaml")
            Path(plan).write_text(yaml.safe_dump({"cluster": f"1x{size}", "calls": calls}))
    document = yaml.safe_load(file.read_text()) | {"plan": plan}
    file.write_text(yaml.safe_dump(document))
    return file.rename(directory / f"{directory.name}.yaml")


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Preset -> recipe of its run in one process."""
    files = {preset: recipe(world, tmp_path_factory.mktemp("alone") / preset, preset) for preset in PRESETS}
    run_on_ranks(1, list(files.values()))
    return files


@pytest.mark.parametrize("size", thin([2, 4], 2))
def test_every_preset_learns_the_same_under_every_plan(
    world: World,
    alone: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    keep_full_precision()
    files = {
        (preset, name): recipe(world, tmp_path_factory.mktemp("plans") / preset, preset, size=size, plan=plan)
        for number, preset in enumerate(PRESETS)
        for turn, (name, (of, plan)) in enumerate(PLANS.items())
        if of == size
        # Presets take turns.
        and (preset in SEARCHED if plan == "search" else EVERY_RUN or (number + turn) % 2)
    }
    run_on_ranks(size, list(files.values()))
    for (preset, name), file in files.items():
        where = f"{preset}, {name}"
        assert sampled(file) == sampled(alone[preset]), where
        ours, expected = (read_metrics(path.parent / "run") for path in (file, alone[preset]))
        assert len(ours) == STEPS
        for step, reference in zip(ours, expected, strict=True):
            assert step.keys() == reference.keys(), where
            for metric in (name for name in METRICS if f"actor.train/{name}" in reference):
                value = reference[f"actor.train/{metric}"]
                assert step[f"actor.train/{metric}"] == pytest.approx(value, rel=TOLERANCE, abs=1e-6), (
                    f"{where}: {metric}"
                )


def test_three_optimizer_steps_of_grpo_end_with_the_weights_of_an_independent_implementation(
    world: World, tmp_path: Path
) -> None:
    file = recipe(
        world,
        tmp_path / "grpo",
        "grpo",
        policy={"samples": 4, "minibatches": 3, "kl": {"coef": 0.1}},
        data__batch=6,
        training__steps=1,
    )
    run_on_ranks(1, [file])
    samples = read_samples(sampled(file), step=0, count=24)
    learner = GRPO(load_experiment(str(file)).policy, world.actor, world.reward)
    before = {name: p.detach().clone() for name, p in learner.actor.named_parameters()}
    expected = learner.step(samples)
    (metrics,) = read_metrics(file.parent / "run")
    assert metrics["actor.train/loss"] == pytest.approx(expected["actor.train/loss"], abs=1e-6)
    trained = AutoModelForCausalLM.from_pretrained(file.parent / "run" / "final")
    learnt = learner.weights()
    for name, weights in trained.named_parameters():
        assert (weights - learnt[f"actor {name}"]).abs().max() <= 1e-4, name
        assert (weights - before[name]).abs().max() > 1e-3, f"{name}: there was something to learn"
