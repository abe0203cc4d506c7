"""Runs whose sampling runs ahead end with the weights of an independent emulation on transformers and AdamW.

The emulation takes only the sampled tokens from a run. It keeps the actor of every step, and computes all
log-probabilities itself, with the actor that the setting `staleness` asks for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from realrl.recipe.load import load_experiment
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import World, read_metrics
from tests.runtime.asynchrony.test_ahead_runs import part, write_recipe
from tests.runtime.policy_gradient_in_transformers import GRPO, ReinforcePlusPlus
from tests.runtime.ppo_in_transformers import Reference, Setting, read_samples

STEPS, BATCH = 6, 6
TOLERANCE = 1e-5
# With the usual eps of 1e-8, Adam would turn the rounding errors of gradients near 0 into steps of visible size.
OPTIMIZER = {"lr": 2e-3, "eps": 1e-4, "schedule": "constant"}


def correction(mode: str, cap: float) -> dict[str, Any]:
    return {"recompute_logprobs": True, "sampler_correction": mode, "sampler_cap": cap}


PPO = {
    "minibatches": 2,
    "early_stop_ratio": None,
    "kl": {"coef": 0.1, "adaptive": True, "target": 0.5, "horizon": 100},
}
GROUPS = {"minibatches": 2, "samples": 4}
SETTINGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ppo, truncate": ("ppo", {**PPO, **correction("truncate", 1.1)}),
    "ppo, sequence_mask": ("ppo", {**PPO, **correction("sequence_mask", 2.0)}),
    "ppo, behaviour policy": ("ppo", PPO),
    "grpo, truncate": ("grpo", {**GROUPS, **correction("truncate", 1.1)}),
    "grpo, mask": ("grpo", {**GROUPS, **correction("mask", 1.2)}),
    "reinforce_pp, truncate": ("reinforce_pp", {"minibatches": 2, **correction("truncate", 1.1)}),
}
"""Name -> algorithm, and its section of the recipe."""


@dataclass(frozen=True)
class Case:
    """A run. With two processes, the second one samples and the first one trains."""

    setting: str
    staleness: int
    processes: int = 1

    def __str__(self) -> str:
        where = "alone" if self.processes == 1 else "apart"
        return f"{self.setting}, staleness {self.staleness}, {where}"


SYNCHRONOUS = [Case("ppo, truncate", 0), Case("ppo, behaviour policy", 0), Case("grpo, mask", 0)]
STALE = [
    *(Case(setting, k) for setting in SETTINGS if setting != "reinforce_pp, truncate" for k in (1, 2, 4)),
    Case("reinforce_pp, truncate", 2),
    Case("ppo, truncate", 1, 2),
    Case("ppo, sequence_mask", 4, 2),
    Case("grpo, mask", 2, 2),
]
CORRECTED = [case for case in STALE if "sampler_correction" in SETTINGS[case.setting][1]]


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[Case, Path]:
    """Recipes of runs that have ended."""
    found = {}
    for case in (*SYNCHRONOUS, *STALE):
        algorithm, settings = SETTINGS[case.setting]
        roles = ("actor", "critic") if algorithm == "ppo" else ("actor",)
        changes = {
            "reward": None,
            "models__reward": {"path": world.reward},
            "data__batch": BATCH,
            "training__steps": STEPS,
            "ppo" if algorithm == "ppo" else "policy": settings,
            **{f"models__{role}__optimizer": OPTIMIZER for role in roles},
        }
        file = write_recipe(world, tmp_path_factory.mktemp("run"), algorithm, case.staleness, **changes)
        found[case] = part(file) if case.processes == 2 else file
    for processes in (1, 2):
        run_on_ranks(processes, [file for case, file in found.items() if case.processes == processes])
    return found


def make_learner(world: World, experiment: Any) -> Reference | GRPO:
    optimizer = experiment.models.actor.optimizer
    if experiment.algorithm != "ppo":
        kind = GRPO if experiment.algorithm == "grpo" else ReinforcePlusPlus
        return kind(experiment.policy, world.actor, world.reward, lr=optimizer.lr, eps=optimizer.eps)
    setting = Setting(
        experiment.ppo,
        experiment.generation.temperature,
        experiment.generation.max_new_tokens,
        optimizer.lr,
        optimizer.weight_decay,
        actor_grad_clip=optimizer.grad_clip,
        critic_grad_clip=optimizer.grad_clip,
        eps=optimizer.eps,
    )
    eos = AutoConfig.from_pretrained(world.actor).eos_token_id
    return Reference(setting, Path(world.actor), Path(world.reward), eos)


def emulate(world: World, file: Path, staleness: int) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train on the tokens that a run sampled. Returns the weights after all steps, and the steps' metrics."""
    experiment = load_experiment(str(file))
    learner, tokens = make_learner(world, experiment), sampled(file)
    count = len(tokens) // (2 * STEPS)  # each sample also has the length of its prompt
    metrics = [
        learner.step(read_samples(tokens, step, count), sampled_with=max(0, step - staleness))
        for step in range(STEPS)
    ]
    return learner.weights(), metrics


def find_distance(file: Path, expected: Mapping[str, Tensor]) -> float:
    """Compute the largest difference between a weight after a run and the expected weight."""
    run = file.parent / "run"
    models = {"actor": AutoModelForCausalLM.from_pretrained(run / "final")}
    if (run / "final-critic").exists():
        models["critic"] = AutoModelForSequenceClassification.from_pretrained(run / "final-critic")
    found = {f"{role} {name}": p for role, model in models.items() for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    return max(float((found[name].detach() - weights).abs().max()) for name, weights in expected.items())


@pytest.mark.parametrize("case", [*SYNCHRONOUS, *STALE], ids=str)
def test_a_run_learns_what_the_emulation_learns(world: World, runs: Mapping[Case, Path], case: Case) -> None:
    weights, expected = emulate(world, runs[case], case.staleness)
    assert find_distance(runs[case], weights) <= TOLERANCE
    # The ratio of a whole answer has the rounding errors of all its log-probabilities.
    rel = 5e-5 if "sequence" in case.setting else 1e-5
    for ours, theirs in zip(read_metrics(runs[case].parent / "run"), expected, strict=True):
        # The actor's loss is the mean of numbers around 1 that nearly cancel, and keeps their rounding errors.
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=rel, abs=2e-6)


@pytest.mark.parametrize("case", STALE, ids=str)
def test_another_staleness_would_be_noticed(world: World, runs: Mapping[Case, Path], case: Case) -> None:
    for wrong in (0, case.staleness + 1):
        weights, _ = emulate(world, runs[case], wrong)
        assert find_distance(runs[case], weights) > 100 * TOLERANCE, f"staleness {wrong}"


@pytest.mark.parametrize("case", CORRECTED, ids=str)
def test_the_weights_of_stale_samples_matter(runs: Mapping[Case, Path], case: Case) -> None:
    first, *later = read_metrics(runs[case].parent / "run")
    assert first["actor.train/effective_sample_size"] == pytest.approx(1.0)
    assert first["actor.train/sampler_corrections_beyond_cap"] == 0
    assert all(0 < metrics["actor.train/effective_sample_size"] < 0.999 for metrics in later)
    beyond = [metrics["actor.train/sampler_corrections_beyond_cap"] for metrics in later]
    assert max(beyond) > 0.1
    assert max(beyond) < 1, "every step has tokens to learn from"


@pytest.mark.parametrize("case", STALE, ids=str)
def test_stale_kl_is_zero_only_in_the_first_step(runs: Mapping[Case, Path], case: Case) -> None:
    first, *later = (metrics["actor.train/stale_kl"] for metrics in read_metrics(runs[case].parent / "run"))
    assert first == pytest.approx(0.0, abs=1e-9)
    assert min(later) > 1e-4


@pytest.mark.parametrize("case", SYNCHRONOUS, ids=str)
def test_without_staleness_sampler_and_trainer_hold_the_same_weights(
    runs: Mapping[Case, Path], case: Case
) -> None:
    for metrics in read_metrics(runs[case].parent / "run"):
        assert metrics["actor.train/sampler_trainer_mismatch"] < 1e-4
        assert "actor.train/stale_kl" not in metrics
