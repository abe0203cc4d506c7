"""Policy gradients without a critic: settings, calls and descriptions. This module does not import torch."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.algorithms.policy import (
    GENERATE,
    KEYS,
    ClippedPolicyConfig,
    KLConfig,
    KLEstimator,
    PolicyModels,
    RewardedExperiment,
    check_correction,
    complete_reference,
    describe,
    infer_on_sequences,
    list_averages,
    train_on_sequences,
)
from realrl.algorithms.rewards.config import list_score_keys, score_sequences
from realrl.config.base import derive_settings
from realrl.config.lazy import import_later
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec


class PolicyKLConfig(KLConfig):
    """Divergence from the reference: a term of the loss, or a penalty on rewards."""

    place: Literal["loss", "reward", "token_reward"] = "loss"
    """`loss`: added to the loss of each token. `reward`: the sum over an answer is subtracted from its reward.
    `token_reward`: subtracted from the reward of each token. A token's advantage sums the rewards from this token
    on."""
    estimator: KLEstimator = "k3"
    """k1: log p_actor - log p_ref. k2: half of the square of k1. k3: p_ref / p_actor - 1 - log(p_ref / p_actor). k1
    is the usual choice in rewards. In the loss, k1 has no useful gradient."""

    @model_validator(mode="after")
    def _has_gradient(self) -> Self:
        if self.place == "loss" and self.estimator == "k1" and self.coef > 0:
            raise ValueError(
                "estimator=k1 with place=loss: the expected gradient of k1 is 0 whatever the reference is; choose"
                " k2 or k3, or place=reward"
            )
        return self


class PolicyGradientConfig(ClippedPolicyConfig):
    """Policy gradient without a critic: advantages come from the rewards of sampled answers alone."""

    samples: PositiveInt = 8
    """Answers sampled for each prompt. They form a group."""
    sampling_rounds: PositiveInt = 1
    """Maximum sampling rounds per step (dynamic sampling). A prompt whose answers all have the same score teaches
    nothing, so the next round replaces it by the next prompt of the data. Such prompts fill the batch only if it
    is not full after the last round. 1 keeps all answers of the only round."""
    baseline: Literal["group_mean", "leave_one_out", "greedy", "none"] = "group_mean"
    """Baseline that is subtracted from each reward: the mean reward of the group (`group_mean`), the mean of the
    other answers of the group (`leave_one_out`), or the reward of an extra greedy answer (`greedy`)."""
    scale: Literal["group_std", "batch_std", "batch_norm", "none"] = "group_std"
    """Divide advantages by the standard deviation of rewards in the group or in the batch. `batch_norm` shifts and
    scales them to mean 0 and deviation 1 over all tokens of the batch."""
    aggregate: Literal["sequence_mean", "token_mean", "sequence_sum", "constant"] = "sequence_mean"
    """Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers. Each answer then
    counts with the mean over its tokens (`sequence_mean`), their sum (`sequence_sum`), or their sum divided by
    generation.max_new_tokens (`constant`)."""
    ratio: Literal["token", "sequence_mean", "sequence"] = "token"
    """Importance ratio: one ratio for each token (`token`), the ratio of the whole answer (`sequence`), or the
    geometric mean of the ratios of the answer's tokens (`sequence_mean`)."""
    clip: PositiveFloat = 0.2
    """Clip the ratio from below at 1 - clip."""
    clip_high: PositiveFloat | None = None
    """Clip the ratio from above at 1 + clip_high. null takes `clip`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Maximum ratio if the advantage is negative. null for no limit."""
    kl: PolicyKLConfig = PolicyKLConfig(coef=0.0)
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch; must divide `data.batch`."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    mask_truncated: bool = False
    """Exclude answers without end of sequence from the loss. Their rewards still count in the group."""
    overlong_buffer: PositiveInt | None = None
    """Soft overlong punishment: an answer within this many tokens of generation.max_new_tokens loses reward, up to
    `overlong_penalty` at the limit. null for none."""
    overlong_penalty: PositiveFloat = 1.0
    """Maximum overlong punishment."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may fall below 1, and rise above 1."""
        return self.clip, self.clip if self.clip_high is None else self.clip_high

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.baseline in ("group_mean", "leave_one_out") and self.samples < 2:
            raise ValueError(
                f"baseline={self.baseline} compares the answers of a group; samples must be at least 2"
            )
        if self.scale == "group_std" and self.samples < 2:
            raise ValueError("scale=group_std is the deviation within a group; samples must be at least 2")
        if self.sampling_rounds > 1 and self.samples < 2:
            raise ValueError(
                f"sampling_rounds={self.sampling_rounds} compares the answers of a group; samples must be"
                " at least 2"
            )
        if self.baseline == "greedy" and self.samples > 1:
            raise ValueError(
                f"baseline=greedy takes one answer of each prompt beside the greedy one; set samples=1, not"
                f" {self.samples}, or baseline=leave_one_out"
            )
        if self.clip >= 1:
            raise ValueError(f"clip={self.clip:g} is a bound below the ratio 1; it must be below 1")
        return self


class PolicyGradientExperiment(RewardedExperiment):
    """Policy gradient without a critic."""

    models: PolicyModels
    policy: PolicyGradientConfig = PolicyGradientConfig()

    @model_validator(mode="after")
    def _reference(self) -> Self:
        return complete_reference(self, "policy", self.policy.kl.coef, self.policy)

    @model_validator(mode="after")
    def _correction(self) -> Self:
        return check_correction(self, "policy", self.policy)

    @model_validator(mode="after")
    def _overlong(self) -> Self:
        buffer = self.policy.overlong_buffer
        if buffer is not None and buffer > self.generation.max_new_tokens:
            raise ValueError(
                f"policy.overlong_buffer={buffer} is above"
                f" generation.max_new_tokens={self.generation.max_new_tokens}"
            )
        return self


GREEDY = "greedy_"
"""Prefix of the keys of greedy answers."""

_EXTRA_KEYS = (
    Key(f"{GREEDY}sequences", "int64"),
    Key(f"{GREEDY}prompt_length", "int64", "one"),
    Key(f"{GREEDY}finished", "float32", "one"),
)


def make_policy_gradient_graph(experiment: PolicyGradientExperiment) -> DataflowGraph:
    """Make the graph that samples, scores and trains.

    Depending on the recipe, it also has calls for a reference, greedy answers, or recomputed log-probabilities.
    """
    config, models, reward = experiment.policy, experiment.models, experiment.reward
    calls = [GENERATE, *score_sequences(reward)]
    made = ["logprobs", "score"]
    if config.baseline == "greedy":
        outputs = tuple(f"{GREEDY}{key}" for key in ("sequences", "prompt_length", "finished"))
        name, rows = "actor.generate_greedy", ("prompts",)
        calls.append(Call(name, "actor", Kind.GENERATE, rows, outputs, work=rows, prefix=GREEDY))
        calls += score_sequences(reward, prefix=GREEDY)
        made.append(f"{GREEDY}score")
    if models.ref is not None:
        calls.append(infer_on_sequences("ref.inference", "ref_logprobs"))
        made.append("ref_logprobs")
    if config.recompute_logprobs:
        calls.append(infer_on_sequences("actor.inference", "old_logprobs"))
        made.append("old_logprobs")
    calls.append(train_on_sequences("actor", tuple(made), config.minibatches))
    scores = [key for prefix in ("", GREEDY) for key in list_score_keys(reward, prefix)]
    averages = list_averages(config, models.actor, models.ref)
    return DataflowGraph.using(calls, (*KEYS, *_EXTRA_KEYS, *scores), averages)


def _needs_whole_batch(experiment: PolicyGradientExperiment) -> str | None:
    """Say why training needs the whole batch; None if it does not."""
    config = experiment.policy
    if config.scale in ("batch_std", "batch_norm"):
        return f"policy.scale={config.scale} compares the rewards of the whole batch"
    if config.kl.adaptive:
        return "policy.kl.adaptive=true compares the divergence of the whole batch with its target"
    if config.sampler_correction != "none":
        return "the effective sample size of policy.sampler_correction is about the whole batch"
    return None


def _describe(name: str, about: str, **defaults: Any) -> AlgorithmSpec:
    """Describe a policy-gradient algorithm. `defaults`: defaults that differ from `PolicyGradientConfig`."""
    title = name.title().replace("_", "")
    config = derive_settings(PolicyGradientConfig, f"{title}Config", about, defaults)
    recipe = derive_settings(PolicyGradientExperiment, f"{title}Experiment", about, {"policy": config()})
    return describe(
        name=name,
        recipe=recipe,
        train_graph=make_policy_gradient_graph,
        samples_per_prompt=lambda experiment: experiment.policy.samples,
        sampling_rounds=lambda experiment: experiment.policy.sampling_rounds,
        epochs=lambda experiment: experiment.policy.epochs,
        needs_whole_batch=_needs_whole_batch,
        methods=import_later("realrl.algorithms.policy_gradient_loss:PolicyGradientAlgorithm"),
    )


GRPO = _describe(
    "grpo",
    "GRPO: rewards relative to those of a group of answers to the same prompt (Shao et al. 2024, arXiv 2402.03300)",
    kl=PolicyKLConfig(coef=0.04),
)
DR_GRPO = _describe(
    "dr_grpo",
    "Dr. GRPO: GRPO without its biases towards long wrong answers and towards prompts of little variance (Liu et"
    " al. 2025, arXiv 2503.20783)",
    scale="none",
    aggregate="constant",
)
DAPO = _describe(
    "dapo",
    "DAPO: GRPO with dynamic sampling, a higher upper clip bound, token-level loss, and no reference (Yu et al."
    " 2025, arXiv 2503.14476)",
    sampling_rounds=4,
    aggregate="token_mean",
    clip_high=0.28,
)
GSPO = _describe(
    "gspo",
    "GSPO: GRPO with one importance ratio per answer (Zheng et al. 2025, arXiv 2507.18071)",
    ratio="sequence_mean",
    clip=3e-4,
    clip_high=4e-4,
)
RLOO = _describe(
    "rloo",
    "RLOO: REINFORCE with the mean reward of the other answers to the prompt as baseline (Ahmadian et al. 2024,"
    " arXiv 2402.14740)",
    samples=4,
    baseline="leave_one_out",
    scale="none",
    ratio="sequence",
    kl=PolicyKLConfig(coef=0.05, place="reward", estimator="k1"),
)
REINFORCE_PP = _describe(
    "reinforce_pp",
    "REINFORCE++: one answer per prompt, advantages normalised over the batch (Hu 2025, arXiv 2501.03262)",
    samples=1,
    baseline="none",
    scale="batch_norm",
    aggregate="token_mean",
    kl=PolicyKLConfig(coef=0.01, place="token_reward", estimator="k1"),
)
REINFORCE_PP_BASELINE = _describe(
    "reinforce_pp_baseline",
    "REINFORCE++ with the mean reward of the group as baseline (Hu 2025, arXiv 2501.03262)",
    scale="batch_norm",
    aggregate="token_mean",
    kl=PolicyKLConfig(coef=0.01, place="loss", estimator="k2"),
)
REMAX = _describe(
    "remax",
    "ReMax: REINFORCE with the reward of the greedy answer as baseline (Li et al. 2023, arXiv 2310.10505)",
    samples=1,
    baseline="greedy",
    scale="none",
    aggregate="sequence_sum",
    kl=PolicyKLConfig(coef=0.01, place="token_reward", estimator="k1"),
)
