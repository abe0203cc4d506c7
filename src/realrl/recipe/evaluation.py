"""Settings of evaluations, both during training and by `realrl eval`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.paths import PathOrName
from realrl.config.user_code import FunctionReference
from realrl.recipe.generation import GenerationConfig

JUDGE = "judge"
"""Metric of evaluations with `evaluation.judge`: the judge's mean score."""
WIN_RATE = "win_rate"
"""Metric of evaluations with `evaluation.against`: the win rate by rewards."""
JUDGE_WIN_RATE = "judge_win_rate"
"""Metric of evaluations with `evaluation.against` and `evaluation.judge`: the win rate by the judge's scores."""


@dataclass(frozen=True)
class AnswerReader:
    """Reads the final answers in completions, for majority votes."""

    key: str
    """Key of the evaluation graph with the score of each answer: 1 if it is right. Equal answers have equal
    scores."""
    read: Callable[[str], str | None]
    """Returns the answer in a completion as text. Equal answers have the same text. None if there is no answer."""


class BestConfig(Settings):
    """The metric that decides which evaluation is best. The trained models of this evaluation are kept in
    RUN_DIR/best."""

    metric: str
    """Name of a metric of evaluations: `call/name` as in metrics.jsonl, or `pass@1`, `majority@8`, `win_rate`,
    `judge`."""
    keep: Literal["highest", "lowest"]
    """Which value counts as best."""


class EvaluationConfig(Settings):
    """Evaluation on `data.eval`, in training and by `realrl eval`."""

    every: PositiveInt | None = None
    """Training steps between evaluations. Null evaluates only at the start and at the end. These two evaluations
    always take place."""
    best: BestConfig | None = None
    """Keep the trained models of the best evaluation in RUN_DIR/best; null keeps no such copy."""
    samples: PositiveInt = 1
    """Number of answers to each prompt. This setting and all settings below are for algorithms that generate
    text."""
    min_new_tokens: NonNegativeInt | None = None
    """Value for evaluation instead of `generation.min_new_tokens`; null for the same value. If training forbids
    early ends, 0 evaluates the model without this restriction, as in later use."""
    greedy: bool | None = None
    """Value for evaluation instead of `generation.greedy`; null for the same value."""
    temperature: float | None = Field(default=None, ge=0.01, le=100)
    """Value for evaluation instead of `generation.temperature`; null for the same value."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Value for evaluation instead of `generation.top_p`; null for the same value."""
    right: float = 1.0
    """Minimum score for an answer to count as right in `pass_at`."""
    pass_at: list[PositiveInt] = Field(default=[])
    """Report `pass@k` for each of these k, at most `samples`: the probability that at least one of k answers is
    right, averaged over prompts (unbiased estimate of Chen et al. 2021, arXiv 2107.03374, equation 1)."""
    majority_at: list[PositiveInt] = Field(default=[])
    """Report `majority@k` for each of these k, at most `samples`: the share of prompts for which the most frequent
    of k answers is right. This needs a verifier that reads answers."""
    against: PathOrName | None = None
    """Directory of another model, which is compared on the same prompts by the same rewards. `win_rate` is the
    share of pairs of answers in which the run's model scores higher; ties count half."""
    judge: FunctionReference | None = None
    """`FILE.py:FUNCTION`: a function that scores answers independently of training. It takes the same arguments as
    a reward function. The metric `judge` is its mean score."""
    shown: PositiveInt = 16
    """Number of prompts per evaluation of a training run whose answers are written to RUN_DIR/samples."""

    @field_validator("pass_at", "majority_at")
    @classmethod
    def _once(cls, value: list[int]) -> list[int]:
        twice = next((k for k in value if value.count(k) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is listed twice")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, listed in (("pass_at", self.pass_at), ("majority_at", self.majority_at)):
            if listed and max(listed) > self.samples:
                raise ValueError(
                    f"{name}: {max(listed)} is above samples={self.samples}, the answers to a prompt"
                )
        if self.right != 1.0 and not self.pass_at:
            raise ValueError(f"right={self.right:g} is for pass_at, which lists nothing")
        if self.greedy:
            for name in ("temperature", "top_p"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name):g} changes nothing where greedy=true; leave it out"
                    )
        return self

    @property
    def of_text(self) -> list[str]:
        """Names of the settings for generated text that differ from their defaults."""
        fields = type(self).model_fields
        return [
            name
            for name, field in fields.items()
            if name not in ("every", "best") and getattr(self, name) != field.get_default()
        ]

    @property
    def measures(self) -> list[str]:
        """Names of the settings that request additional metrics."""
        return [
            name for name in ("best", "pass_at", "majority_at", "against", "judge") if getattr(self, name)
        ]

    @property
    def metrics(self) -> list[str]:
        """Metrics that are computed from all answers of an evaluation, not by a call."""
        return [
            *(f"pass@{k}" for k in self.pass_at),
            *(f"majority@{k}" for k in self.majority_at),
            *([WIN_RATE] if self.against else []),
            *([JUDGE] if self.judge else []),
            *([JUDGE_WIN_RATE] if self.against and self.judge else []),
        ]

    def change(self, sampling: GenerationConfig) -> GenerationConfig:
        """Copy the sampling settings of training, and apply the changes for evaluation."""
        names = ("min_new_tokens", "greedy", "temperature", "top_p")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return sampling.model_copy(update={name: value for name, value in given.items() if value is not None})
