"""Recipes of PPO. No torch."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from realrl.algorithms.policy.config import KLConfig, ReferenceConfig
from realrl.algorithms.policy.reference import complete_reference
from realrl.algorithms.rewards.config import RewardSetting, check_models
from realrl.config.base import PRESENCE
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig


class PPOConfig(ReferenceConfig):
    """Proximal policy optimisation (Schulman et al. 2017) for language models."""

    kl: KLConfig = KLConfig()
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation (Schulman et al. 2016)."""
    clip: PositiveFloat = 0.2
    """The probability ratio is clipped to [1 - clip, 1 + clip]."""
    value_clip: PositiveFloat | None = 0.2
    """Values may move this far from the old ones before the loss is clipped, in rewards or, with `value_norm`, in
    deviations of the returns; null for no clipping."""
    minibatches: PositiveInt = 4
    """Optimizer steps per pass over a batch; must divide `data.batch`."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    advantage_norm: bool = True
    """Normalise advantages to mean 0 and deviation 1 over the whole batch."""
    value_norm: Literal["none", "running", "exponential"] = "none"
    """Measure the critic's errors in standard deviations of the returns, over all returns seen so far (`running`)
    or an exponential average of them. The critic itself predicts rewards whatever the statistics are."""
    value_norm_beta: float = Field(default=0.99, gt=0, lt=1)
    """Decay of the exponential average."""
    reward_scale: PositiveFloat = 1.0
    """Rewards are used as `clip((score - reward_bias) * reward_scale)`, and the critic's output as
    `(output - reward_bias) * reward_scale`: a critic speaks on the scale of the reward model's scores, on which it
    starts and is saved."""
    reward_bias: float = 0.0
    """Subtracted from the score."""
    reward_clip: PositiveFloat | None = 10.0
    """Bound on the absolute reward; null for no bound. Values have none."""
    early_stop_ratio: PositiveFloat | None = 5.0
    """Skip what is left of a batch when the mean probability ratio of a mini-batch exceeds this."""
    truncated: Literal["score", "bootstrap"] = "score"
    """A sequence cut off without end of sequence is either scored as it stands (`score`), or gets no score
    and the critic's value of its last state takes the place of what would have followed (`bootstrap`)."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward of a sequence cut off without end of sequence."""


class PPOModels(Models):
    """The models of PPO."""

    actor: TrainedModelConfig
    """The policy."""
    critic: TrainedModelConfig = TrainedModelConfig()
    """Value model; without a `path` it starts from the reward model or, where a function gives rewards, from the
    actor with a new scalar head. Its `dtype` is the actor's if not given."""
    ref: ModelConfig | None = Field(default=ModelConfig(), json_schema_extra=PRESENCE)
    """Frozen reference policy; the actor's starting point when it has no `path`. Its `dtype` is the actor's if not
    given. With `kl.coef=0` there is none unless it is given here, and then only measures the divergence."""
    reward: ModelConfig | None = None
    """Frozen reward model, a sequence classifier with one label; null where `reward` names a function instead."""


class PPOExperiment(Experiment):
    """RLHF with PPO: actor, critic, reference and reward model; or another reward in place of the model."""

    models: PPOModels
    reward: RewardSetting = None
    """What takes the place of `models.reward`: a function, `FILE.py:FUNCTION` or `package.module:FUNCTION`; one
    term, such as `{verifier: {kind: exact_match}}`; or a weighted mixture, name -> function or term. See
    docs/rewards.md."""
    ppo: PPOConfig = PPOConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _reference(self) -> Self:
        return complete_reference(self, "ppo", self.ppo.kl.coef, self.ppo)

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        check_models(self.reward, self.models.reward, type(self.models).model_fields)
        return self
