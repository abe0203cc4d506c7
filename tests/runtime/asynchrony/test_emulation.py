"""Runs whose sampling runs ahead end with the weights of an independent emulation on transformers and AdamW.

The emulation takes only the sampled tokens from a run. It keeps the actor of every step, and computes the
log-probability of each token itself, with the actor that the setting `asynchrony` asks for.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from realrl.recipe.load import load_experiment
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import World, read_metrics
from tests.runtime.asynchrony.test_ahead_runs import part, write_recipe
from tests.runtime.policy_gradient_in_transformers import GRPO, ReinforcePlusPlus
from tests.runtime.ppo_in_transformers import Reference, Sample, Setting, read_samples

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
    "grpo, function": ("grpo", {**GROUPS, **correction("mask", 1.2), "ref_ema": 0.3}),
    "reinforce_pp, truncate": ("reinforce_pp", {"minibatches": 2, **correction("truncate", 1.1)}),
}
"""Name -> algorithm, and its section of the recipe."""

REWARD = """
def score(completion_ids):
    return [float(sum(tokens) % 5) for tokens in completion_ids]
"""
"""Reward of the setting `grpo, function`. Other settings have a reward model."""


FindVersion = Callable[[int, int], int]
"""Finds the number of training steps after which the actor draws token j of the answers for a step."""


@dataclass(frozen=True)
class Case:
    """A run. With several processes, the last one samples and the others train."""

    setting: str
    staleness: int
    processes: int = 1
    partial: bool = False
    overlap: bool = True

    def __str__(self) -> str:
        answers = ", partial" * self.partial + ", no overlap" * (not self.overlap)
        where = "alone" if self.processes == 1 else f"apart on {self.processes}"
        return f"{self.setting}, staleness {self.staleness}{answers}, {where}"

    @property
    def parts(self) -> int:
        """Number of steps that sample an answer."""
        return self.staleness + (not self.overlap) if self.partial else 1

    @property
    def tokens(self) -> int:
        """Limit of an answer; all its parts have the same share."""
        return 24 if self.partial else 12

    def find_version(self, step: int, token: int) -> int:
        """See `FindVersion`."""
        return max(0, step - self.staleness + token // (self.tokens // self.parts))

    def list_mistakes(self) -> dict[str, FindVersion]:
        """List functions like `find_version` that are wrong."""

        def all_of_age(steps: int) -> FindVersion:
            return lambda step, token: max(0, step - steps)

        if not self.partial:
            return {f"{steps} steps old": all_of_age(steps) for steps in (0, self.staleness + 1)}
        return {
            "as old as the first part": all_of_age(self.staleness),
            "as old as the last part": all_of_age(self.staleness - self.parts + 1),
            "parts begin one token late": lambda step, token: self.find_version(step, max(0, token - 1)),
        }


SYNCHRONOUS = [Case("ppo, truncate", 0), Case("ppo, behaviour policy", 0), Case("grpo, mask", 0)]
WHOLE = [
    *(
        Case(setting, k)
        for setting in SETTINGS
        if setting not in ("reinforce_pp, truncate", "grpo, function")
        for k in (1, 2, 4)
    ),
    Case("reinforce_pp, truncate", 2),
    Case("grpo, function", 2),
    Case("ppo, truncate", 1, 2),
    Case("ppo, sequence_mask", 4, 2),
    Case("grpo, mask", 2, 2),
]
PARTIAL = [
    Case("ppo, truncate", 2, partial=True),
    Case("ppo, truncate", 1, partial=True, overlap=False),
    Case("ppo, behaviour policy", 3, partial=True),
    Case("ppo, behaviour policy", 1, partial=True, overlap=False),
    Case("grpo, mask", 2, partial=True),
    Case("grpo, mask", 3, partial=True),
    Case("ppo, truncate", 3, 2, partial=True),
    Case("grpo, mask", 1, 2, partial=True, overlap=False),
    Case("ppo, behaviour policy", 2, 3, partial=True),
]
STALE = [*WHOLE, *PARTIAL]
CORRECTED = [case for case in STALE if "sampler_correction" in SETTINGS[case.setting][1]]


@pytest.fixture(scope="module")
def runs(world: World, actor: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[Case, Path]:
    """Recipes of runs that have ended."""
    found = {}
    for case in (*SYNCHRONOUS, *STALE):
        algorithm, settings = SETTINGS[case.setting]
        roles = ("actor", "critic") if algorithm == "ppo" else ("actor",)
        directory = tmp_path_factory.mktemp("run")
        changes = {
            "asynchrony": {"staleness": case.staleness, "partial": case.partial, "overlap": case.overlap},
            "generation__max_new_tokens": case.tokens,
            "data__batch": BATCH,
            "training__steps": STEPS,
            "ppo" if algorithm == "ppo" else "policy": settings,
            **{f"models__{role}__optimizer": OPTIMIZER for role in roles},
        }
        if case.partial:
            changes["models__actor__path"] = str(actor)
        if "function" in case.setting:
            (directory / "remainder.py").write_text(REWARD)
            changes["reward"] = f"{directory / 'remainder.py'}:score"
        else:
            changes |= {"reward": None, "models__reward": {"path": world.reward}}
        file = write_recipe(world, directory, algorithm, case.staleness, **changes)
        found[case] = part(file, case.processes) if case.processes > 1 else file
    for processes in (1, 2, 3):
        run_on_ranks(processes, [file for case, file in found.items() if case.processes == processes])
    return found


class FunctionGRPO(GRPO):
    """GRPO with the reward function of this file."""

    def _score(self, samples: Sequence[Sample]) -> Tensor:
        return torch.tensor([float(sum(sample.tokens[sample.prompt :]) % 5) for sample in samples])


def make_learner(world: World, experiment: Any) -> Reference | GRPO:
    actor, optimizer = experiment.models.actor.path, experiment.models.actor.optimizer
    if experiment.algorithm != "ppo":
        grpo = GRPO if experiment.reward is None else FunctionGRPO
        kind = grpo if experiment.algorithm == "grpo" else ReinforcePlusPlus
        return kind(experiment.policy, actor, world.reward, lr=optimizer.lr, eps=optimizer.eps)
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
    eos = AutoConfig.from_pretrained(actor).eos_token_id
    return Reference(setting, Path(actor), Path(world.reward), eos)


def read_steps(file: Path) -> list[list[Sample]]:
    """Read the samples of each step of a run."""
    tokens = sampled(file)
    count = len(tokens) // (2 * STEPS)  # each sample also has the length of its prompt
    return [read_samples(tokens, step, count) for step in range(STEPS)]


def emulate(
    world: World, file: Path, find_version: FindVersion
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train on the tokens that a run sampled. Returns the weights after all steps, and the steps' metrics."""
    learner = make_learner(world, load_experiment(str(file)))
    metrics = [
        learner.step(samples, partial(find_version, step)) for step, samples in enumerate(read_steps(file))
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
    weights, expected = emulate(world, runs[case], case.find_version)
    assert find_distance(runs[case], weights) <= TOLERANCE
    # The ratio of a whole answer has the rounding errors of all its log-probabilities; long answers have more.
    rel = 5e-5 if "sequence" in case.setting or case.partial else 1e-5
    for ours, theirs in zip(read_metrics(runs[case].parent / "run"), expected, strict=True):
        # The actor's loss is the mean of numbers around 1 that nearly cancel, and keeps their rounding errors.
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=rel, abs=2e-6)


@pytest.mark.parametrize("case", STALE, ids=str)
def test_wrong_ages_of_tokens_would_be_noticed(world: World, runs: Mapping[Case, Path], case: Case) -> None:
    for mistake, find_version in case.list_mistakes().items():
        weights, _ = emulate(world, runs[case], find_version)
        assert find_distance(runs[case], weights) > 100 * TOLERANCE, mistake


@pytest.mark.parametrize("case", STALE, ids=str)
def test_the_mean_age_of_tokens_is_reported(runs: Mapping[Case, Path], case: Case) -> None:
    metrics = read_metrics(runs[case].parent / "run")
    for step, (samples, found) in enumerate(zip(read_steps(runs[case]), metrics, strict=True)):
        ages = [step - case.find_version(step, token) for sample in samples for token in range(sample.answer)]
        assert found["actor.train/staleness"] == pytest.approx(sum(ages) / len(ages))


@pytest.mark.parametrize("case", PARTIAL, ids=str)
def test_partial_answers_end_in_every_part(runs: Mapping[Case, Path], case: Case) -> None:
    lengths = [sample.answer for step in read_steps(runs[case]) for sample in step]
    share = case.tokens // case.parts
    ended = Counter((length - 1) // share for length in lengths)
    assert all(ended[number] > 4 for number in range(case.parts))
    assert 0.25 < sum(length < case.tokens for length in lengths) / len(lengths) < 0.75


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
