"""Shared parts of all algorithms that train a policy on its own samples: settings, calls and reports.

This module does not import torch.
"""

from typing import Any, Literal, Self, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from realrl.algorithms.rewards.config import (
    Rewards,
    RewardSetting,
    check_environment_terms,
    check_models,
    environment_reward,
    find_answer_reader,
    list_score_keys,
    score_sequences,
)
from realrl.config.base import PRESENCE, Settings
from realrl.config.explain import brief
from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.environment import EnvironmentSetting, check_environment
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimator of a KL divergence from samples (Schulman 2020, "Approximating KL divergence")."""


class ReferenceConfig(Settings):
    """Settings of algorithms whose reference may follow the actor."""

    ref_ema: float | None = Field(default=None, gt=0, le=1)
    """After each step, move the reference this fraction of the way to the actor. null freezes the reference, unless
    `ref_every` is set."""
    ref_every: PositiveInt | None = None
    """Move the reference only once in this many steps. It moves by `ref_ema` or, if that is null, becomes a copy of
    the actor. null moves it after every step."""

    @property
    def following(self) -> str | None:
        """The setting that makes the reference follow the actor, with its value; None if it is frozen."""
        if self.ref_ema is not None:
            return f"ref_ema={self.ref_ema:g}"
        return None if self.ref_every is None else f"ref_every={self.ref_every}"


SamplerCorrection = Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"]


class ClippedPolicyConfig(ReferenceConfig):
    """Settings of algorithms that train a policy on its own samples with clipped probability ratios.

    The ratio that is clipped compares the trained policy with an old policy: the policy that drew the samples or,
    with `recompute_logprobs`, the policy at the start of the training step.
    """

    recompute_logprobs: bool = False
    """Recompute the old log-probabilities with the trained model at the start of each training step, in a separate
    call. false takes the log-probabilities that the sampler recorded."""
    sampler_correction: SamplerCorrection = "none"
    """Multiply the loss of each token by its recomputed probability divided by its recorded probability. `truncate`
    limits this weight to `sampler_cap` (Ionides 2008). `mask` sets it to 0 above the cap and below the inverse of
    the cap (IcePop, arXiv 2510.18855). With `sequence_truncate` and `sequence_mask`, all tokens of an answer have
    the same weight: the product of their ratios, limited in the same way. The weights correct for stale samples
    (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641; AReaL, arXiv 2505.24298) and for numerical differences.
    Needs `recompute_logprobs`."""
    sampler_cap: float = Field(default=2.0, gt=1)
    """Limit of `sampler_correction`."""

    @model_validator(mode="after")
    def _recomputes(self) -> Self:
        if self.sampler_correction != "none" and not self.recompute_logprobs:
            raise ValueError(
                f"sampler_correction={self.sampler_correction} compares recorded with recomputed log-probabilities;"
                " set recompute_logprobs=true"
            )
        return self


class KLConfig(Settings):
    """Penalty that keeps the actor near the reference."""

    coef: NonNegativeFloat = 0.1
    """Weight of the per-token penalty log p_actor - log p_ref; the initial weight if `adaptive`."""
    adaptive: bool = False
    """Steer `coef` so that the KL per sequence approaches `target` (Ziegler et al. 2019, section 2.2)."""
    target: PositiveFloat = 6.0
    """Target KL per sequence, in nats. If sampling excludes tokens (top_k, top_p, min_new_tokens), this KL and the
    metric `kl` are the generalised KL over the tokens that can be drawn, which is never negative."""
    horizon: PositiveInt = 1000
    """Number of sequences, over all devices, within which the adaptive coefficient changes by about 20 % at most.
    With 128 sequences per step, the coefficient needs at least 27 steps to double."""

    @model_validator(mode="after")
    def _steers_something(self) -> Self:
        for name in ("adaptive", "target", "horizon"):
            value = getattr(self, name)
            if self.coef == 0 and value != type(self).model_fields[name].default:
                shown = brief(value) if isinstance(value, bool) else f"{value:g}"
                raise ValueError(
                    f"{name}={shown} needs a coefficient that can adapt, and coef=0 always stays 0; set coef above"
                    f" 0, or leave {name} out"
                )
        return self


class PolicyModels(Models):
    """The models: the policy, its reference, and its reward model."""

    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig | None = Field(default=ModelConfig(), json_schema_extra=PRESENCE)
    """Frozen reference policy. Without a `path` it is the actor's starting point, and without a `dtype` it takes
    the actor's. With `kl.coef=0` there is no reference, unless the recipe has this section. The reference then only
    measures the divergence."""
    reward: ModelConfig | None = None
    """Frozen reward model, a sequence classifier with one label. null if `reward` names another reward."""


class RewardedExperiment(Experiment):
    """Recipe whose samples are scored by a reward."""

    reward: RewardSetting = None
    """Reward in place of `models.reward`: a function (`FILE.py:FUNCTION` or `package.module:FUNCTION`), one term
    such as `{verifier: {kind: exact_match}}`, or a weighted mixture (a mapping from names to functions or terms).
    See docs/rewards.md."""
    environment: EnvironmentSetting = None
    """Environment in which the actor acts, turn by turn: `FILE.py:CLASS`, `package.module:CLASS`, or a section.
    null for answers of a single turn. Without `reward`, the environment gives the reward. See
    docs/environments.md."""
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        models: Any = self.models
        if self.environment is not None:
            alone = self.reward is None and models.reward is not None
            check_environment(self.environment, self.generation, skips=not alone)
            if self.reward is None and models.reward is None:
                object.__setattr__(self, "reward", environment_reward())
        check_models(self.reward, models.reward, type(models).model_fields)
        check_environment_terms(self.reward, self.environment)
        return self


Recipe = TypeVar("Recipe", bound=Experiment)


def complete_reference(experiment: Recipe, section: str, kl_coef: float, settings: ReferenceConfig) -> Recipe:
    """Leave out the reference of a recipe with a KL coefficient of 0, unless the recipe gives a reference.

    A validator of the recipe calls this function. `section`: name of the recipe's section with the coefficient and
    the `settings`. Raises ValueError if there is no reference although the coefficient is above 0, or although
    `settings` make the reference follow the actor.
    """
    follows = settings.following
    models: Any = experiment.models
    if models.ref is None:
        if kl_coef > 0:
            raise ValueError(
                f"models.ref is null, and {section}.kl.coef={kl_coef:g} needs it; set one of them"
            )
        if follows is not None:
            raise ValueError(f"{section}.{follows} moves models.ref, which is null")
        return experiment
    if kl_coef == 0 and "ref" not in models.model_fields_set:
        if follows is not None:
            raise ValueError(
                f"{section}.{follows} moves the reference, which {section}.kl.coef=0 leaves out;"
                f" give models.ref, or set {follows.partition('=')[0]}=null"
            )
        drop_reference(experiment)
    return experiment


def samples_are_stale(experiment: Experiment) -> bool:
    """Return whether samples of a step may have been drawn with the weights of an earlier step."""
    return experiment.asynchrony.staleness > 0


def count_prompts(experiment: Experiment) -> int | None:
    """Return the number of prompts of a train call; None if it works on portions of any number of prompts."""
    return experiment.data.batch if experiment.asynchrony.portions == 1 else None


def check_correction(experiment: Recipe, section: str, settings: ClippedPolicyConfig) -> Recipe:
    """Check that a recipe does not ignore that its samples are stale. A validator of the recipe calls this.

    Raises ValueError if old log-probabilities are recomputed with newer weights than those that sampled, and no
    weight corrects for the difference. The loss would then take the samples for those of the newer weights.
    """
    recomputes = settings.recompute_logprobs and settings.sampler_correction == "none"
    if recomputes and samples_are_stale(experiment):
        raise ValueError(
            f"{section}.recompute_logprobs=true forgets which weights drew the samples, and with"
            f" asynchrony.staleness={experiment.asynchrony.staleness} they are older; set"
            f" {section}.sampler_correction (for example to truncate), or recompute_logprobs=false"
        )
    return experiment


def drop_reference(experiment: Experiment) -> None:
    """Set `models.ref` of a recipe to null. Only a validator of the recipe may call this function."""
    # Settings are frozen, but nobody else has seen this object yet.
    models = experiment.models.model_copy(update={"ref": None})
    object.__setattr__(experiment, "models", models)


# Keys that are `like sequences` have a number per token, at the token's own position: `logprobs[t]` is the
# log-probability of token t given the tokens before it.
KEYS = (
    Key("prompts", "int64"),
    Key("sequences", "int64"),
    Key("prompt_length", "int64", "one"),
    Key("finished", "float32", "one"),
    Key("logprobs", "float32", "sequences"),
    Key("ref_logprobs", "float32", "sequences"),
    Key("old_logprobs", "float32", "sequences"),
)

GENERATE = Call(
    "actor.generate",
    "actor",
    Kind.GENERATE,
    ("prompts",),
    ("sequences", "logprobs", "prompt_length", "finished"),
    work=("prompts",),
)


def infer_on_sequences(name: str, output: str, extra: tuple[str, ...] = ()) -> Call:
    """Make the inference call `name` (ROLE.inference) on prompts with answers. `extra`: further inputs."""
    role, _, kind = name.partition(".")
    return Call(name, role, Kind(kind), ("sequences", *extra), (output,), work=("sequences",))


def train_on_sequences(role: str, inputs: tuple[str, ...], minibatches: int) -> Call:
    """Make the train call of a role on prompts with answers. `inputs`: further inputs."""
    inputs = ("sequences", "prompt_length", "finished", *inputs)
    return Call(f"{role}.train", role, Kind.TRAIN, inputs, work=("sequences",), minibatches=minibatches)


def list_averages(
    config: ReferenceConfig, actor: ModelConfig, ref: ModelConfig | None
) -> tuple[MovingAverage, ...]:
    """List the moving average that makes the reference follow the actor. Empty if the reference is frozen."""
    if ref is None or config.following is None:
        return ()
    factor = 1.0 if config.ref_ema is None else config.ref_ema
    return (MovingAverage("ref", "actor", factor, ref.starts_like(actor), config.ref_every or 1),)


def make_eval_graph(*, reward: Rewards | None = None, reference: bool = True) -> DataflowGraph:
    """Make the graph that samples, scores and, with `reference`, measures the divergence from the reference.

    `reward`: see `score_sequences`. The inputs of inference calls include the keys that their metrics need.
    """
    calls = [GENERATE, *score_sequences(reward, ("prompt_length", "finished"))]
    if reference:
        calls.append(infer_on_sequences("ref.inference", "ref_logprobs", ("prompt_length", "logprobs")))
    return DataflowGraph.using(calls, (*KEYS, *list_score_keys(reward)))


OPTIONAL_CALLS = ("reward.inference", "reward.function", "reward.sum", "ref.inference")
"""Calls that only some recipes have."""

HEADLINES = (
    "reward.inference/score",
    "reward.inference/finished",
    "reward.function/score",
    "reward.function/finished",
    "reward.sum/score",
    "reward.sum/finished",
    "actor.train/score",
    "actor.train/finished",
    "actor.train/kl",
    "actor.train/response_tokens",
    "ref.inference/kl",
)

CURVES = {
    "score": "reward's score",
    "judge": "independent judge",
    "kl": "KL to the reference (nats)",
    "response_tokens": "tokens per completion",
}

ROLES = {
    "actor": RoleSpec("lm"),
    "ref": RoleSpec("lm", weights_from="actor", optional=True),
    "reward": RoleSpec("scalar", optional=True),
}


def describe(**fields: Any) -> AlgorithmSpec:
    """Describe an algorithm whose recipe is a `RewardedExperiment`.

    `fields` are the fields of `AlgorithmSpec` that have no default here, or that replace a default.
    """
    usual = {
        "roles": ROLES,
        "form": "prompt",
        "eval_graph": lambda experiment: make_eval_graph(
            reward=experiment.reward, reference=experiment.models.ref is not None
        ),
        "generation": lambda experiment: experiment.generation,
        "answers": lambda experiment: find_answer_reader(experiment.reward),
        "optional_calls": OPTIONAL_CALLS,
        "optional_metrics": ("kl",),
        "sample_keys": ("score",),
        "headlines": (*HEADLINES, "judge"),
        "curves": CURVES,
        "summary": (
            SummaryMetric("judge_before", "judge", "independent judge, before", at="first"),
            SummaryMetric("judge_after", "judge", "independent judge, after"),
            SummaryMetric("reward_before", "score", "reward's score, before", at="first"),
            SummaryMetric("reward_after", "score", "reward's score, after"),
            SummaryMetric("kl", "kl", "KL to the reference after (nats per sequence)"),
        ),
    }
    return AlgorithmSpec(**{**usual, **fields})
