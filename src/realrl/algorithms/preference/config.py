"""Recipes of learning from preference pairs: one section, one set of defaults per algorithm. No torch."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from realrl.algorithms.policy.config import ReferenceConfig
from realrl.algorithms.preference.reference import PreferenceModels, leave_out_reference
from realrl.recipe.experiment import Experiment

_PER_TOKEN = ("ipo", "odds_ratio")
"""Losses of scores per token. Sums would make the target of `ipo`, a fixed difference, depend on lengths."""


class PreferenceConfig(ReferenceConfig):
    """Loss of preference pairs. The score of an answer is its log-probability, minus that under the reference if
    there is one; the reward is `beta` times the score. A reference that follows the actor is that of TR-DPO
    (Gorbatovski et al. 2024)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "odds_ratio"] = "sigmoid"
    """With d the score of the chosen answer minus that of the rejected one, `sigmoid`:
    -log sigmoid(beta d - gamma) (Rafailov et al. 2023). `robust`: the same without the bias that wrong labels cause
    (Chowdhury et al. 2024). `hinge`: max(0, 1 - beta d) (Zhao et al. 2023). `ipo`: (d - 1 / (2 beta))^2 (Azar et
    al. 2023), of scores per token as in the authors' experiments. `odds_ratio`: -beta log sigmoid of the difference
    of log odds (Hong et al. 2024), without a reference."""
    beta: PositiveFloat = 0.1
    """Scale of rewards; the higher, the nearer to the reference the actor stays."""
    gamma: NonNegativeFloat = 0.0
    """Margin by which the chosen answer's reward should be above the other's; for loss=sigmoid."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that the label of a pair is wrong; for loss=sigmoid (Mitchell 2023) and loss=robust."""
    length_normalization: bool | None = None
    """Divide each answer's score by its number of tokens; null does so for loss=ipo and loss=odds_ratio."""
    reference: Literal["model", "records", "none"] = "model"
    """Source of the reference's log-probabilities: the model `models.ref`; the fields `ref_chosen_logps` and
    `ref_rejected_logps` of records, sums over the tokens of each answer; or none, for scores that are the actor's
    log-probabilities alone."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of chosen answers, mean per token, which is added to the loss."""
    nll_prompts: bool = False
    """Whether that likelihood is of the prompt as well."""

    @property
    def per_token(self) -> bool:
        """Whether scores are divided by the number of tokens."""
        if self.length_normalization is None:
            return self.loss in _PER_TOKEN
        return self.length_normalization

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.gamma > 0 and self.loss != "sigmoid":
            raise ValueError(
                f"gamma={self.gamma:g} is the margin of loss=sigmoid; set gamma=0 for {self.loss}"
            )
        if self.label_smoothing > 0 and self.loss not in ("sigmoid", "robust"):
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} goes with loss=sigmoid or robust; set it to 0 for"
                f" {self.loss}"
            )
        if self.loss in _PER_TOKEN and not self.per_token:
            raise ValueError(
                f"length_normalization=false: loss={self.loss} compares means over tokens; leave it out, or choose"
                " another loss"
            )
        if self.loss == "odds_ratio" and self.reference != "none":
            raise ValueError(
                "loss=odds_ratio compares log-probabilities of the actor alone; set reference=none"
            )
        if self.following is not None and self.reference != "model":
            raise ValueError(f"{self.following} moves models.ref, and reference={self.reference}")
        return self


class PreferenceExperiment(Experiment):
    """Learning from preference pairs without sampling."""

    models: PreferenceModels
    preference: PreferenceConfig = PreferenceConfig()

    @model_validator(mode="after")
    def _reference(self) -> Self:
        needed = self.preference.reference == "model"
        return leave_out_reference(self, needed, f"preference.reference={self.preference.reference}")
