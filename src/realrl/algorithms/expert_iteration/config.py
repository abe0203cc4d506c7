"""Recipes of expert iteration. No torch."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from realrl.algorithms.rewards.config import RewardSetting, check_models
from realrl.config.base import Settings
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig


class ExpertIterationConfig(Settings):
    """Choice of the sampled answers that are learnt, and their loss."""

    samples: PositiveInt = 8
    """Answers sampled for each prompt, a group."""
    keep: PositiveInt | None = 1
    """Learn this many answers of each group, those with the highest scores, of equal ones the first; null for no
    bound. 1 is RAFT (Dong et al. 2023)."""
    threshold: float | None = None
    """Learn only answers with at least this score; null for no bound. With keep=null, and a verifier that scores 1
    for right answers, a threshold of 1 is ReST-EM (Singh et al. 2023)."""
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Loss of a mini-batch: the mean of -log p over all tokens that are learnt, or over answers of the mean over
    their tokens. Probabilities are those at generation.temperature."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch; must divide `data.batch`. One without any answer to learn is left
    out."""
    epochs: PositiveInt = 1
    """Passes over each batch."""

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.keep is not None and self.keep > self.samples:
            raise ValueError(
                f"keep={self.keep} of {self.samples} samples; keep at most as many, or sample more"
            )
        if self.threshold is None and self.keep in (None, self.samples):
            bound = "null" if self.keep is None else self.keep
            raise ValueError(
                f"keep={bound} and threshold=null learn all {self.samples} samples whatever their scores; set keep"
                " below samples, or a threshold"
            )
        return self


class ExpertIterationModels(Models):
    """The models of expert iteration."""

    actor: TrainedModelConfig
    """The policy, which samples and learns."""
    ref: ModelConfig | None = None
    """Frozen reference policy that the divergence is measured from, where it is given; the actor's starting point
    when it has no `path`. Its `dtype` is the actor's if not given."""
    reward: ModelConfig | None = None
    """Frozen reward model, a sequence classifier with one label; null where `reward` names a function instead."""


class ExpertIterationExperiment(Experiment):
    """Expert iteration: fine-tuning on the best of the actor's own answers. Also known as rejection sampling,
    best-of-n, RAFT (Dong et al. 2023, arXiv 2304.06767) and ReST-EM (Singh et al. 2023, arXiv 2312.06585)."""

    models: ExpertIterationModels
    reward: RewardSetting = None
    """What takes the place of `models.reward`: a function, `FILE.py:FUNCTION` or `package.module:FUNCTION`; one
    term, such as `{verifier: {kind: exact_match}}`; or a weighted mixture, name -> function or term. See
    docs/rewards.md."""
    expert_iteration: ExpertIterationConfig = ExpertIterationConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        check_models(self.reward, self.models.reward, type(self.models).model_fields)
        return self
