"""Methods of the calls that score sequences: reward models, scorers on the host, and sums of terms."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from realrl.algorithms.base.method import FunctionInput, Method, Metrics, ModelOutput
from realrl.algorithms.base.rows import add_answer_means, last_of_rows
from realrl.algorithms.base.scoring import (
    NOT_APPLICABLE,
    SKIPPED,
    TEXTS,
    Deadline,
    LimitedRunner,
    RewardFailure,
    Score,
    TimeLimitError,
)
from realrl.algorithms.rewards.config import SINGLE, SUM, Rewards, RewardTerm, is_mixture, name_call, name_key
from realrl.algorithms.rewards.scorers import make_scorer
from realrl.config.errors import UserCodeError
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.environment import ENVIRONMENT_FAILED, ENVIRONMENT_REWARD


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Options of a method that scores sequences."""

    key: str = "score"
    """Key of the output."""
    in_mixture: bool = False
    """Whether the reward is one term of several."""
    finished_only: bool = False
    """Whether training uses only the scores of answers with an end of sequence."""
    prefix: str = ""
    """Prefix of the keys of sequences. Methods with a prefix report no metrics."""


def make_reward_methods(
    reward: Rewards | None, *, finished_only: bool = False, prefix: str = ""
) -> dict[str, Method]:
    """Make the methods of the calls from `score_sequences`, by call name.

    `finished_only` and `prefix`: see `ScoreOptions`.
    """
    options = ScoreOptions(key=f"{prefix}score", finished_only=finished_only, prefix=prefix)
    if reward is None:
        return {name_call(SINGLE, None, prefix): RewardInference(options)}
    mixed = is_mixture(reward)
    methods: dict[str, Method] = {}
    for name, term in reward.items():
        of_term = replace(options, key=name_key(name, prefix), in_mixture=True) if mixed else options
        alone = RewardFunction(name, term, of_term) if term.model is None else RewardInference(of_term)
        methods[name_call(name, term, prefix)] = alone
    if mixed:
        methods[f"{SUM}_{prefix}".rstrip("_")] = RewardSum(reward, options)
    return methods


def compute_score_metrics(batch: Batch, *, finished_only: bool = False, skips: bool = True) -> Metrics:
    """Compute metrics of scored answers in evaluations: the mean score that training would use, and mean lengths.

    In training, the batch has no key `finished`, and the train call reports these metrics. skips: whether NaN is
    the score of a skipped answer, which the metric `score` leaves out.
    """
    metrics = Metrics()
    if "prompt_length" in batch.fields and "finished" in batch.fields:
        trained_on = (batch["finished"].values != 0) | (not finished_only)
        if skips:
            trained_on &= ~batch["score"].values.isnan()
        metrics.mean("score", batch["score"].values[trained_on].sum(), trained_on.sum())
        add_answer_means(metrics, batch)
    return metrics


_USUAL = ScoreOptions()


def find_whole(batch: Batch, prefix: str = "") -> Tensor:
    """Find the samples whose environment has not failed; without an environment, all. [N] bool"""
    key = f"{prefix}{ENVIRONMENT_FAILED}"
    if key not in batch.fields:
        return torch.ones(len(batch), dtype=torch.bool)
    return batch[key].values.cpu() == 0


class RewardInference:
    """Score of each sequence: the reward model's value at its last token."""

    def __init__(self, options: ScoreOptions = _USUAL) -> None:
        self._options = options

    def sequences(self, batch: Batch) -> Ragged:
        return batch[f"{self._options.prefix}sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        assert output.values is not None
        return {self._options.key: Ragged.scalars(last_of_rows(output.values, output.lengths).double())}

    def metrics(self, batch: Batch) -> Metrics:
        """Report the metrics of `compute_score_metrics` or, in a mixture, the mean `term_score`.

        With a prefix, there are no metrics.
        """
        metrics = Metrics()
        if self._options.prefix:
            return metrics
        if self._options.in_mixture:
            scores = batch[self._options.key].values[find_whole(batch)]
            metrics.mean("term_score", scores.sum(), len(scores))
            return metrics
        return compute_score_metrics(batch, finished_only=self._options.finished_only, skips=False)


CULPRIT_SECONDS = 60.0
"""Maximum seconds of the search for the sample at which a function raises. The run fails in any case."""


class RewardFunction:
    """Score of each sequence by a function, a verifier or a service.

    If the reward fails for a sample, the run ends or, with `on_error: skip`, the score is SKIPPED. If the reward
    does not apply to a sample, the score is NOT_APPLICABLE in a mixture, and SKIPPED otherwise.
    """

    def __init__(self, name: str, term: RewardTerm, options: ScoreOptions = _USUAL) -> None:
        self._term, self._options = term, options
        self._scorer = make_scorer(name, term)
        self._runner = LimitedRunner(self._scorer.label)
        self._noted = False

    def load(self) -> None:
        self._scorer.load()

    def state_dict(self) -> Any:
        return self._scorer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._scorer.load_state_dict(state)

    def wants(self, field: str) -> bool:
        return self._scorer.wants(field)

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        self._scorer.check_fields(source, fields)

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """Score each sequence. With on_error=fail, raises UserCodeError, which names the sample that failed."""
        whole, everything = find_whole(inputs.batch, self._options.prefix), inputs
        if not whole.all():
            inputs = inputs.select(whole.nonzero().flatten().tolist())
        scores = self._score(inputs)
        failures = ((i, score) for i, score in enumerate(scores) if isinstance(score, RewardFailure))
        first = next(failures, None)
        if first is not None:
            self._refuse(*first, inputs)
        absent = NOT_APPLICABLE if self._options.in_mixture else SKIPPED
        numbers = [SKIPPED if isinstance(s, RewardFailure) else absent if s is None else s for s in scores]
        values = torch.full((len(everything.batch),), SKIPPED, dtype=torch.float64)
        values[whole] = torch.tensor(numbers, dtype=torch.float64)
        output = Ragged.scalars(values)
        return {self._options.key: output}, self._summarize(scores, output, everything)

    def _refuse(self, sample: int, failure: RewardFailure, inputs: FunctionInput) -> None:
        """Raise UserCodeError for a failure or, if failures are skipped, print a note about the first one."""
        message = f"{self._scorer.label} {failure.reason}; {inputs.describe(sample)}"
        if self._term.on_error == "fail":
            raise UserCodeError(message, failure.trace)
        if not self._noted:
            self._noted = True
            print(
                f"note: {message} (on_error=skip; later ones are only counted)", file=sys.stderr, flush=True
            )

    def _summarize(self, scores: Sequence[Score], output: Ragged, inputs: FunctionInput) -> Metrics:
        metrics, count = Metrics(), len(inputs.batch)
        if self._options.prefix:
            return metrics
        skipped = sum(isinstance(score, RewardFailure) for score in scores) + count - len(scores)
        if self._options.in_mixture:
            given = output.values[output.values.isfinite()]
            metrics.mean("term_score", given.sum(), len(given))
        else:
            batch = inputs.batch.with_fields(score=output)
            metrics = compute_score_metrics(batch, finished_only=self._options.finished_only)
        metrics.mean("skipped", torch.tensor(float(skipped)), count)
        metrics.mean("not_applicable", torch.tensor(float(scores.count(None))), count)
        return metrics

    def _score(self, inputs: FunctionInput) -> list[Score]:
        """Score all samples at once or, if that fails, one by one."""
        count, deadline = len(inputs.batch), Deadline(self._term.timeout)
        arguments = self._arguments(inputs)
        try:
            return self._ask(arguments, count, deadline.left)
        except TimeLimitError:
            reason = (
                f"did not give the scores of {count} completions within {self._term.timeout:g} s (timeout)"
            )
            if self._runner.exhausted:
                raise UserCodeError(
                    f"{self._scorer.label} {reason}, and neither did it earlier; too many of its calls are still"
                    " running"
                ) from None
            return [RewardFailure(reason)] * count
        except UserCodeError as error:
            return self._score_singly(error, arguments, count, deadline)

    def _score_singly(
        self, error: UserCodeError, arguments: dict[str, list[Any]], count: int, deadline: Deadline
    ) -> list[Score]:
        """Score the samples one by one after scoring all at once raised `error`, to find the samples that fail."""
        skips = self._term.on_error == "skip"
        # If the result as a whole is wrong, for example one number short, no single sample is the cause.
        if not skips and not error.trace:
            raise error
        if not skips:
            left = deadline.left
            deadline = Deadline(CULPRIT_SECONDS if left is None else min(left, CULPRIT_SECONDS))
        scores: list[Score] = []
        for i in range(count):
            one = {name: values[i : i + 1] for name, values in arguments.items()}
            try:
                scores += self._ask(one, 1, deadline.left)
            except TimeLimitError:
                if not skips:
                    raise error from None
                late = RewardFailure(f"ran out of time (timeout) after it failed: {error}")
                return scores + [late] * (count - i)
            except UserCodeError as single:
                reason = str(single).removeprefix(f"{self._scorer.label} ")
                scores.append(RewardFailure(reason, single.trace))
                if not skips:
                    return [None] * i + scores[-1:]
        if not skips:  # the function only fails when it sees certain samples together
            raise error
        return scores

    def _ask(self, arguments: dict[str, list[Any]], count: int, limit: float | None) -> list[Score]:
        # Copies, because a function may change the lists.
        task = partial(self._scorer.score, count, {name: list(values) for name, values in arguments.items()})
        return self._runner.run(torch.no_grad()(task), limit)

    def _arguments(self, inputs: FunctionInput) -> dict[str, list[Any]]:
        """List the texts and columns that the scorer reads, by name."""
        wants = self._scorer.wants
        arguments = {name: list(values) for name, values in inputs.fields.items() if wants(name)}
        rewards = f"{self._options.prefix}{ENVIRONMENT_REWARD}"
        if rewards in inputs.batch.fields and wants(ENVIRONMENT_REWARD):
            arguments[ENVIRONMENT_REWARD] = inputs.batch[rewards].values.tolist()
        for name in TEXTS:  # `FunctionInput` has a function with each of these names
            if wants(name):
                arguments[name] = getattr(inputs, name)(self._options.prefix)
        return arguments


class RewardSum:
    """Weighted sum of the scores of terms.

    A sample has no score if a term skipped it, or if no term applies to it.
    """

    def __init__(self, reward: Rewards, options: ScoreOptions = _USUAL) -> None:
        self._reward, self._options = reward, options

    def load(self) -> None:
        pass

    def wants(self, field: str) -> bool:
        return False

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        pass

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        batch = inputs.batch
        total = torch.zeros(len(batch), dtype=torch.float64)
        applies = torch.zeros(len(batch), dtype=torch.bool)
        for name, term in self._reward.items():
            if term.weight == 0:
                continue
            scores = batch[name_key(name, self._options.prefix)].values
            if term.model is not None:
                # A model's NaN is a mistake and must not look like a skipped sample. An infinite score makes the
                # step not finite, and training reports that.
                total = torch.where(scores.isfinite(), total + term.weight * scores, torch.inf)
                applies[:] = True
                continue
            given = scores != NOT_APPLICABLE
            total = torch.where(given, total + term.weight * scores, total)
            applies |= given
        # Rounding makes 0.1 + 0.2 equal to 0.3, so that samples with equal scores count as equal.
        total = torch.tensor([float(f"{value:.12g}") for value in total.tolist()], dtype=torch.float64)
        score = Ragged.scalars(torch.where(applies & find_whole(batch, self._options.prefix), total, SKIPPED))
        if self._options.prefix:
            return {f"{self._options.prefix}score": score}, Metrics()
        metrics = compute_score_metrics(
            batch.with_fields(score=score), finished_only=self._options.finished_only
        )
        metrics.mean("skipped", score.values.isnan().double().sum(), len(batch))
        return {"score": score}, metrics
