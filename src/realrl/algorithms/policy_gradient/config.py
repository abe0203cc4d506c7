"""Recipes of critic-free policy gradients: one section of settings, one set of defaults per algorithm. No torch."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.algorithms.policy.config import KLConfig, KLEstimator, ReferenceConfig
from realrl.algorithms.policy.reference import complete_reference
from realrl.algorithms.rewards.config import RewardSetting, check_models
from realrl.config.base import PRESENCE
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig


class PolicyKLConfig(KLConfig):
    """Divergence from the reference: a term of the loss, or a penalty on rewards."""

    place: Literal["loss", "reward", "token_reward"] = "loss"
    """`loss`: added to the loss of each token. `reward`: its sum over the answer is subtracted from the reward.
    `token_reward`: subtracted at each token, whose advantage counts what comes after it."""
    estimator: KLEstimator = "k3"
    """k1: log p_actor - log p_ref. k2: half its square. k3: p_ref / p_actor - 1 - log(p_ref / p_actor). In the loss
    k1 has no useful gradient; in rewards k1 is the usual one."""

    @model_validator(mode="after")
    def _has_gradient(self) -> Self:
        if self.place == "loss" and self.estimator == "k1" and self.coef > 0:
            raise ValueError(
                "estimator=k1 with place=loss: the expected gradient of k1 is 0 whatever the reference is; choose"
                " k2 or k3, or place=reward"
            )
        return self


class PolicyGradientConfig(ReferenceConfig):
    """Policy gradient without a critic: advantages of sampled answers from their rewards alone."""

    samples: PositiveInt = 8
    """Answers sampled for each prompt, a group."""
    sampling_rounds: PositiveInt = 1
    """Dynamic sampling: prompts whose answers all have the same score, which teach nothing, are replaced by the
    next ones of the data, sampled in another round, until the batch is full or this many rounds are over; what is
    then still missing is filled up with such prompts. 1 takes all answers as they come."""
    baseline: Literal["group_mean", "leave_one_out", "greedy", "none"] = "group_mean"
    """Subtracted from the reward of each answer: the mean reward of its group (`group_mean`), of the others of its
    group (`leave_one_out`), or the reward of the prompt's greedy answer, which is generated besides (`greedy`)."""
    scale: Literal["group_std", "batch_std", "batch_norm", "none"] = "group_std"
    """Advantages are divided by the standard deviation of the rewards of the group, or of the batch; `batch_norm`
    shifts and scales them to mean 0 and deviation 1 over all tokens of the batch."""
    aggregate: Literal["sequence_mean", "token_mean", "sequence_sum", "constant"] = "sequence_mean"
    """Loss of a mini-batch: the mean over answers of the mean over their tokens (`sequence_mean`), of the sum over
    their tokens (`sequence_sum`), of that sum divided by generation.max_new_tokens (`constant`); or the mean over
    all tokens (`token_mean`)."""
    ratio: Literal["token", "sequence_mean", "sequence"] = "token"
    """Importance ratio: of each token, of the whole answer (`sequence`), or the geometric mean over its tokens
    (`sequence_mean`)."""
    clip: PositiveFloat = 0.2
    """The ratio is clipped from below at 1 - clip."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped from above at 1 + clip_high; null for `clip`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Highest ratio that counts where the advantage is negative; null for no bound."""
    kl: PolicyKLConfig = PolicyKLConfig(coef=0.0)
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch; must divide `data.batch`."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    recompute_logprobs: bool = False
    """Compute the log-probabilities that ratios start from by the trained model once more, in a call of its own,
    instead of taking those that the sampler recorded."""
    sampler_correction: Literal["none", "truncate", "mask"] = "none"
    """Weigh each token by its ratio of recomputed to recorded probability, at most `sampler_cap` (`truncate`), or
    0 above the cap and below its inverse (`mask`); needs `recompute_logprobs`."""
    sampler_cap: float = Field(default=2.0, gt=1)
    """Bound of `sampler_correction`."""
    mask_truncated: bool = False
    """Leave answers that were cut off without end of sequence out of the loss; their rewards stay in the group."""
    overlong_buffer: PositiveInt | None = None
    """Soft overlong punishment: answers within this many tokens of generation.max_new_tokens lose reward, up to
    `overlong_penalty` at the bound; null for none."""
    overlong_penalty: PositiveFloat = 1.0
    """Largest overlong punishment."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances that the ratio may fall below 1, and rise above it."""
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
        if self.sampler_correction != "none" and not self.recompute_logprobs:
            raise ValueError(
                f"sampler_correction={self.sampler_correction} compares recorded with recomputed log-probabilities;"
                " set recompute_logprobs=true"
            )
        return self


class PolicyGradientModels(Models):
    """The models of a policy gradient."""

    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig | None = Field(default=ModelConfig(), json_schema_extra=PRESENCE)
    """Frozen reference policy; the actor's starting point when it has no `path`. Its `dtype` is the actor's if not
    given. With `kl.coef=0` there is none unless it is given here, and then only measures the divergence."""
    reward: ModelConfig | None = None
    """Frozen reward model, a sequence classifier with one label; null where `reward` names a function instead."""


class PolicyGradientExperiment(Experiment):
    """Policy gradient without a critic."""

    models: PolicyGradientModels
    reward: RewardSetting = None
    """What takes the place of `models.reward`: a function, `FILE.py:FUNCTION` or `package.module:FUNCTION`; one
    term, such as `{verifier: {kind: exact_match}}`; or a weighted mixture, name -> function or term. See
    docs/rewards.md."""
    policy: PolicyGradientConfig = PolicyGradientConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _reference(self) -> Self:
        return complete_reference(self, "policy", self.policy.kl.coef, self.policy)

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        check_models(self.reward, self.models.reward, type(self.models).model_fields)
        return self

    @model_validator(mode="after")
    def _overlong(self) -> Self:
        buffer = self.policy.overlong_buffer
        if buffer is not None and buffer > self.generation.max_new_tokens:
            raise ValueError(
                f"policy.overlong_buffer={buffer} is above"
                f" generation.max_new_tokens={self.generation.max_new_tokens}"
            )
        return self
