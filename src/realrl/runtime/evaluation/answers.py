"""Generated answers of an evaluation and their metrics: pass@k, majority votes, win rates."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, isfinite, nan
from typing import Any

from realrl.recipe.algorithm import SCORE
from realrl.recipe.evaluation import JUDGE, JUDGE_WIN_RATE, WIN_RATE, AnswerReader, EvaluationConfig

PROMPTS = "prompts"
"""Last part of metric names such as `pass@8/prompts`, which counts the prompts in the mean `pass@8`."""


@dataclass(kw_only=True)
class Answer:
    """An answer to a prompt."""

    prompt: str
    completion: str
    """Text that functions score: in an environment, the last turn of the model."""
    tokens: list[int]
    """Tokens after the prompt, including special tokens and those of the environment."""
    finished: bool
    """Whether the answer ended by itself, before the length limit."""
    values: Mapping[str, float]
    """Numbers that the evaluation graph computed for this answer, such as its score, by key."""
    judge: float | None = None
    """Score by `evaluation.judge`."""
    trajectory: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a samples file about the turns; empty without an environment."""


@dataclass
class EvaluationResult:
    """Result of an evaluation. It is empty on ranks that do not write."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of calls, by `call/name`, and metrics that are computed from all answers."""
    answers: list[Answer] = field(default_factory=list)
    """Generated answers in the order of records; the answers to one prompt are adjacent."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One row per answer, as in samples files."""


@dataclass(frozen=True)
class EvaluationReport:
    """Result of an evaluation outside training, on the rank that writes."""

    result: EvaluationResult
    origins: list[str]
    """Origin of each record, as FILE:LINE."""
    seconds: float
    """Seconds that the evaluation took, without loading models."""


class AnswerMetrics:
    """Computes the metrics of all answers in an evaluation, see `EvaluationConfig`.

    Answers to one prompt are adjacent.
    """

    def __init__(self, settings: EvaluationConfig, reader: AnswerReader | None) -> None:
        """`reader` extracts final answers from completions, for majority votes."""
        self._settings, self._reader = settings, reader if settings.majority_at else None

    def compute(self, answers: Sequence[Answer], others: Sequence[Answer] | None) -> dict[str, float]:
        """Compute the metrics. `others`: as many answers of another model to the same prompts.

        Answers without a score are ignored, and so are prompts with too few scored answers. A metric is NaN if no
        prompt is left. `pass@k/prompts` and `majority@k/prompts` count the prompts that are averaged.
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
        assert self._reader is not None, "majority_at needs a reader"
        read, key = self._reader.read, self._reader.key
        votes = [(read(a.completion), a.values[key] >= 1) for a in answers if isfinite(a.values[key])]
        return estimate_majority(votes, k) if len(votes) >= k else None

    def write_rows(
        self, answers: Sequence[Answer], others: Sequence[Answer] | None, keys: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the rows of a samples file, one per answer. `keys` names the values that a row includes."""
        rows = []
        for i, answer in enumerate(answers):
            row: dict[str, Any] = {
                "prompt": answer.prompt,
                "completion": answer.completion,
                "finished": answer.finished,
                **{key: answer.values[key] for key in keys},
                **answer.trajectory,
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
    """Compute the mean win rate over prompts for which both models have scored answers."""
    rates = []
    for mine, other in zip(ours, theirs, strict=True):
        a, b = (_select_finite(score(answer) for answer in answers) for answers in (mine, other))
        rates.append(compute_win_rate(a, b) if a and b else None)
    return _mean(rates)


def _select_finite(scores: "Iterator[float | None]") -> list[float]:
    return [score for score in scores if score is not None and isfinite(score)]


def _mean(values: "Iterator[float | None] | Sequence[float | None]") -> float:
    """Compute the mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else nan


def estimate_pass(answers: int, right: int, k: int) -> float:
    """Estimate the probability that at least one of k answers is right, given that c of n answers are right.

    Here, n is `answers` and c is `right`. The estimate 1 - C(n - c, k) / C(n, k) is unbiased (Chen et al. 2021,
    arXiv 2107.03374, equation 1). It is the share of all sets of k answers that contain a right answer. k must not
    exceed n.
    """
    return 1 - comb(answers - right, k) / comb(answers, k)


def estimate_majority(votes: Sequence[tuple[str | None, bool]], k: int) -> float:
    """Estimate the probability that the majority of k answers is right.

    This is the mean of `judge_majority` over groups of k successive answers.

    `votes`: at least k pairs (answer, whether it is right). An answer that is None does not vote.
    """
    runs = [votes[first : first + k] for first in range(0, len(votes) - k + 1, k)]
    return sum(map(judge_majority, runs)) / len(runs)


def judge_majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Score the most frequent answer: 1 if it is right, 0 if it is wrong or no answer votes.

    In a tie, the score is the share of right answers among the most frequent ones, as if one were drawn at random.
    """
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return 0.0
    right = dict(reversed(votes))
    most = max(counts.values())
    first = [answer for answer, count in counts.items() if count == most]
    return sum(right[answer] for answer in first) / len(first)


def compute_win_rate(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Compute the share of pairs in which our score is higher; ties count half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in ours for b in theirs)
    return wins / (len(ours) * len(theirs))
