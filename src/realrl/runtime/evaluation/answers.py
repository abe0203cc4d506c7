"""Generated answers of an evaluation, and metrics of them together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from realrl.recipe.algorithm import SCORE
from realrl.recipe.evaluation import JUDGE, JUDGE_WIN_RATE, WIN_RATE, AnswerReader, EvaluationConfig
from realrl.runtime.evaluation.estimators import compute_win_rate, estimate_majority, estimate_pass

PROMPTS = "prompts"
"""End of the name of a metric: the number of prompts that another one is a mean over."""


@dataclass(kw_only=True)
class Answer:
    """Answer to a prompt."""

    prompt: str
    completion: str
    tokens: list[int]
    """Tokens of the completion, special ones included."""
    finished: bool
    """Whether it ended by itself."""
    values: Mapping[str, float]
    """Keys of the evaluation graph with one number per item, by name."""
    judge: float | None = None
    """Score of `evaluation.judge`."""


@dataclass
class EvaluationResult:
    """Result of an evaluation; empty except on the rank that writes."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by `call/name`, and those that no call gives."""
    answers: list[Answer] = field(default_factory=list)
    """Generated answers, in the order of records; those to one prompt follow each other."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """A row for each answer, as samples files have them."""


@dataclass(frozen=True)
class EvaluationReport:
    """Result of an evaluation alone, on the rank that writes."""

    result: EvaluationResult
    origins: list[str]
    """Where each record comes from, FILE:LINE; the prompts, where something is generated."""
    seconds: float
    """Duration of the evaluation, without loading models."""


class AnswerMetrics:
    """Metrics of all answers of an evaluation, see `EvaluationConfig`. Those to a prompt follow each other."""

    def __init__(self, settings: EvaluationConfig, reader: AnswerReader | None) -> None:
        """`reader` is for majority votes."""
        self._settings, self._reader = settings, reader if settings.majority_at else None

    def compute(self, answers: Sequence[Answer], others: Sequence[Answer] | None) -> dict[str, float]:
        """Compute the metrics. `others`: answers of another model to the same prompts, equally many.

        Answers without a score leave them, and so do prompts that have too few left; a metric without any prompt is
        NaN. `pass@k/prompts` and `majority@k/prompts` are the numbers of prompts that these are means over.
        """
        prompts = list(self._group(answers))
        found: dict[str, float] = {}
        for name, estimate, ks in (
            ("pass", self._pass, self._settings.pass_at),
            ("majority", self._majority, self._settings.majority_at),
        ):
            for k in ks:
                values = [value for prompt in prompts if (value := estimate(prompt, k)) is not None]
                found[f"{name}@{k}"] = _mean(values)
                found[f"{name}@{k}/{PROMPTS}"] = len(values)
        judged = [answer.judge for answer in answers if answer.judge is not None]
        if others is not None:
            theirs = list(self._group(others))
            found[WIN_RATE] = _compare(prompts, theirs, lambda answer: answer.values[SCORE])
            if judged:
                found[JUDGE_WIN_RATE] = _compare(prompts, theirs, lambda answer: answer.judge)
        if judged:
            found[JUDGE] = sum(judged) / len(judged)
        return found

    def _group(self, answers: Sequence[Answer]) -> Iterator[Sequence[Answer]]:
        n = self._settings.samples
        return (answers[i : i + n] for i in range(0, len(answers), n))

    def _pass(self, answers: Sequence[Answer], k: int) -> float | None:
        scores = _select_finite(answer.values[SCORE] for answer in answers)
        if len(scores) < k:
            return None
        return estimate_pass(len(scores), sum(score >= self._settings.right for score in scores), k)

    def _majority(self, answers: Sequence[Answer], k: int) -> float | None:
        assert self._reader is not None, "majority_at needs one"
        read, key = self._reader.read, self._reader.key
        votes = [(read(a.completion), a.values[key] >= 1) for a in answers if isfinite(a.values[key])]
        return estimate_majority(votes, k) if len(votes) >= k else None

    def write_rows(
        self, answers: Sequence[Answer], others: Sequence[Answer] | None, keys: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Write a row of a samples file for each answer; `keys` are values that it shows."""
        rows = []
        for i, answer in enumerate(answers):
            row: dict[str, Any] = {
                "prompt": answer.prompt,
                "completion": answer.completion,
                "finished": answer.finished,
                **{key: answer.values[key] for key in keys},
            }
            if answer.judge is not None:
                row["judge"] = answer.judge
            if self._reader is not None:
                row["answer"] = self._reader.read(answer.completion)
            if others is not None:
                row |= {"against": others[i].completion, "against_score": others[i].values[SCORE]}
                if others[i].judge is not None:
                    row["against_judge"] = others[i].judge
            rows.append(row)
        return rows


def _compare(
    ours: Sequence[Sequence[Answer]],
    theirs: Sequence[Sequence[Answer]],
    score: Callable[[Answer], float | None],
) -> float:
    """Compute the mean win rate over prompts to which both models have an answer with a score."""
    rates = []
    for mine, other in zip(ours, theirs, strict=True):
        a, b = (_select_finite(score(answer) for answer in answers) for answers in (mine, other))
        rates.append(compute_win_rate(a, b) if a and b else None)
    return _mean(rates)


def _select_finite(scores: "Iterator[float | None]") -> list[float]:
    return [score for score in scores if score is not None and isfinite(score)]


def _mean(values: "Iterator[float | None] | Sequence[float | None]") -> float:
    """Compute the mean of the values that are there."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else nan
