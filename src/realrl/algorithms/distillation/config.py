"""Recipes of on-policy distillation. No torch."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import Settings
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import ModelConfig, TrainedModelConfig
from realrl.recipe.settings import GenerationConfig


class DistillationConfig(Settings):
    """Divergence of the actor from the teacher, at each token of the actor's own answers.

    It is estimated from the tokens that were drawn, whose log-probabilities both models give: the gradient is that
    of the whole divergence in the mean over samples."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """`reverse_kl`: KL(actor || teacher), which keeps to what the teacher is likely to say. `forward_kl`:
    KL(teacher || actor), which covers all that the teacher may say. `jsd`: the Jensen-Shannon divergence of both
    (Agarwal et al. 2023, equation 1)."""
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of `jsd`; near 0 it is like forward, near 1 like reverse KL."""
    max_ratio: PositiveFloat = 10.0
    """Most that the teacher's probability of a token, relative to the actor's, counts for in `forward_kl`, which
    would otherwise follow single tokens."""
    samples: PositiveInt = 1
    """Answers sampled for each prompt."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch; must divide `data.batch`."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """After the first update of a batch, ratios of probabilities are clipped at 1 - clip and 1 + clip."""


class DistillationModels(Models):
    """The models of distillation."""

    actor: TrainedModelConfig
    """The student."""
    teacher: ModelConfig
    """The frozen teacher, a language model with the actor's vocabulary."""


class DistillationExperiment(Experiment):
    """On-policy distillation: an actor learns from a teacher's log-probabilities of the actor's own answers
    (Agarwal et al. 2023, arXiv 2306.13649)."""

    models: DistillationModels
    distillation: DistillationConfig = DistillationConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _unrestricted(self) -> Self:
        if self.generation.restricted:
            raise ValueError(
                "generation leaves tokens out, and the divergence is estimated from draws among all of them; set"
                " greedy=false, top_k=0, top_p=1 and min_new_tokens=0"
            )
        return self

    @model_validator(mode="after")
    def _evaluated_as_drawn(self) -> Self:
        if self.evaluation.change(self.generation).skews(self.generation.temperature):
            raise ValueError(
                "evaluation samples otherwise than training, and the divergence is estimated from draws by the"
                " actor's own probabilities; leave out evaluation.greedy, temperature, top_p and min_new_tokens"
            )
        return self
