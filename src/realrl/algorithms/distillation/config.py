"""Recipes of distillation, on samples or on records. No torch."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import Settings
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig


class DivergenceConfig(Settings):
    """Divergence of the actor from the teacher."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """`reverse_kl`: KL(actor || teacher), which keeps to what the teacher is likely to say. `forward_kl`:
    KL(teacher || actor), which covers all that the teacher may say. `jsd`: the Jensen-Shannon divergence of both
    (Agarwal et al. 2023, equation 1)."""
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of `jsd`; near 0 it is like forward, near 1 like reverse KL."""


class DistillationConfig(DivergenceConfig):
    """Divergence of the actor from the teacher, mean over the tokens of the actor's own answers.

    At each token it is that of the distributions of both models over the teacher's `top_k` likeliest tokens and, as
    one more outcome, all others together; or it is estimated from the tokens that were drawn."""

    top_k: PositiveInt | None = 64
    """Tokens whose log-probabilities the teacher gives at each position, 8 bytes each; as many as the vocabulary
    has make the divergence exact. null: only those of the tokens that were drawn, from which the divergence is
    estimated and lowered by a policy gradient, the same in the mean over samples; `clip` and `max_ratio` are for
    this."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """With top_k=null, after the first update of a batch, ratios of probabilities are clipped at 1 - clip and
    1 + clip."""
    max_ratio: PositiveFloat = 10.0
    """With top_k=null, most that the teacher's probability of a token, relative to the actor's, counts for in
    `forward_kl`, which would otherwise follow single tokens."""
    samples: PositiveInt = 1
    """Answers sampled for each prompt."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch; must divide `data.batch`."""
    epochs: PositiveInt = 1
    """Passes over each batch."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        for name in ("clip", "max_ratio"):
            if self.top_k is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is for an estimate from drawn tokens; leave it out, or set top_k=null"
                )
        return self


class OfflineDistillationConfig(DivergenceConfig):
    """Divergence of the actor from the teacher, mean over the tokens of the records' answers.

    At each token it is that of the distributions of both models over the teacher's `top_k` likeliest tokens and, as
    one more outcome, all others together."""

    top_k: PositiveInt = 64
    """Tokens whose log-probabilities the teacher gives at each position, 8 bytes each; as many as the vocabulary
    has make the divergence exact."""
    temperature: PositiveFloat = 1.0
    """What divides the logits of both models."""


class DistillationModels(Models):
    """The models of distillation."""

    actor: TrainedModelConfig
    """The student."""
    teacher: ModelConfig
    """The frozen teacher, a language model with the actor's vocabulary."""


class DistillationExperiment(Experiment):
    """On-policy distillation: an actor learns a teacher's distributions at each token of the actor's own answers
    (Agarwal et al. 2023, arXiv 2306.13649)."""

    models: DistillationModels
    distillation: DistillationConfig = DistillationConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _unrestricted(self) -> Self:
        if self.distillation.top_k is None and self.generation.restricted:
            raise ValueError(
                "generation leaves tokens out, and the divergence is estimated from draws among all of them; set"
                " greedy=false, top_k=0, top_p=1 and min_new_tokens=0, or a distillation.top_k"
            )
        return self

    @model_validator(mode="after")
    def _evaluated_as_drawn(self) -> Self:
        drawn = self.distillation.top_k is None
        if drawn and self.evaluation.change(self.generation).skews(self.generation.temperature):
            raise ValueError(
                "evaluation samples otherwise than training, and the divergence is estimated from draws by the"
                " actor's own probabilities; leave out evaluation.greedy, temperature, top_p and min_new_tokens"
            )
        return self


class OfflineDistillationExperiment(Experiment):
    """Off-policy distillation: an actor learns a teacher's distributions at each token of the answers of records
    (Hinton et al. 2015, arXiv 1503.02531)."""

    models: DistillationModels
    distillation: OfflineDistillationConfig = OfflineDistillationConfig()
