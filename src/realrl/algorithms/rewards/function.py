"""Method of a call that scores on the host: the limits on a scorer, and what becomes of its failures."""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from realrl.algorithms.method import FunctionInput, Metrics
from realrl.algorithms.rewards.config import RewardTerm
from realrl.algorithms.rewards.inference import compute_score_metrics
from realrl.algorithms.rewards.scorers import FunctionScorer, make_scorer
from realrl.algorithms.rewards.scoring.limits import Deadline, LimitedRunner, TimeLimitError
from realrl.algorithms.rewards.scoring.scores import NOT_APPLICABLE, SKIPPED, TEXTS, RewardFailure, Score
from realrl.config.errors import UserCodeError
from realrl.data.batch import Ragged

CULPRIT_SECONDS = 60.0
"""Longest search for the sample at which a function raises, in a run that fails anyway."""


class RewardFunction:
    """Score of each sequence by a function, a verifier or a service.

    A sample whose reward fails ends the run or, with `on_error: skip`, has the score SKIPPED. Where the reward does
    not apply to a sample, its score is NOT_APPLICABLE as a term of a mixture, and SKIPPED as the only reward.
    """

    def __init__(
        self,
        name: str,
        term: RewardTerm,
        *,
        key: str = "score",
        in_mixture: bool = False,
        finished_only: bool = False,
        prefix: str = "",
    ) -> None:
        """`name` is that of the term, `key` its output, `prefix` that of the keys of sequences.
        `finished_only` as of `RewardInference`."""
        self._term = term
        self._scorer = make_scorer(name, term)
        self._runner = LimitedRunner(self._scorer.label)
        self._key = key
        self._in_mixture = in_mixture
        self._finished_only = finished_only
        self._prefix = prefix
        self._noted = False

    def load(self) -> None:
        """Get the scorer ready; UserError where that fails."""
        self._scorer.load()

    def state_dict(self) -> Any:
        """Save what a function of the user's keeps from step to step, if it does."""
        return self._scorer.state_dict() if isinstance(self._scorer, FunctionScorer) else None

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` saved."""
        if isinstance(self._scorer, FunctionScorer):
            self._scorer.load_state_dict(state)

    def wants(self, field: str) -> bool:
        """Tell whether the scorer looks at a field."""
        return self._scorer.wants(field)

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that records have the fields that the scorer needs; else UserError."""
        self._scorer.check_fields(source, fields)

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """One number per sequence. UserCodeError, which names the reward, the record and the sample, where one
        fails, unless samples are skipped."""
        scores = self._score(inputs)
        failures = ((i, score) for i, score in enumerate(scores) if isinstance(score, RewardFailure))
        first = next(failures, None)
        if first is not None:
            self._refuse(*first, inputs)
        absent = NOT_APPLICABLE if self._in_mixture else SKIPPED
        numbers = [SKIPPED if isinstance(s, RewardFailure) else absent if s is None else s for s in scores]
        output = Ragged.scalars(torch.tensor(numbers, dtype=torch.float64))
        return {self._key: output}, self._summarize(scores, output, inputs)

    def _refuse(self, sample: int, failure: RewardFailure, inputs: FunctionInput) -> None:
        """End the run for a failure, or note the first one that is skipped."""
        message = f"{self._scorer.label} {failure.reason}; {inputs.describe(sample)}"
        if self._term.on_error == "fail":
            raise UserCodeError(message, failure.trace)
        if not self._noted:
            self._noted = True
            print(
                f"note: {message} (on_error=skip; later ones are only counted)", file=sys.stderr, flush=True
            )

    def _summarize(self, scores: Sequence[Score], output: Ragged, inputs: FunctionInput) -> Metrics:
        metrics, count = Metrics(), len(scores)
        if self._prefix:
            return metrics
        skipped = sum(isinstance(score, RewardFailure) for score in scores)
        if self._in_mixture:
            given = output.values[output.values.isfinite()]
            metrics.mean("term_score", given.sum(), len(given))
        else:
            metrics = compute_score_metrics(
                inputs.batch.with_fields(score=output), finished_only=self._finished_only
            )
        metrics.mean("skipped", torch.tensor(float(skipped)), count)
        metrics.mean("not_applicable", torch.tensor(float(scores.count(None))), count)
        return metrics

    def _score(self, inputs: FunctionInput) -> list[Score]:
        """Score all samples at once or, where that fails, one by one."""
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
        """Score sample by sample after the `error` of all at once: which ones make it fail."""
        skips = self._term.on_error == "skip"
        # What it gives wrong as a whole, such as a number too few, is the fault of no sample.
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
                return scores + [RewardFailure(f"ran out of time (timeout) after it failed: {error}")] * (
                    count - i
                )
            except UserCodeError as single:
                reason = str(single).removeprefix(f"{self._scorer.label} ")
                scores.append(RewardFailure(reason, single.trace))
                if not skips:
                    return [None] * i + scores[-1:]
        if not skips:  # what it raises depends on which samples it sees together
            raise error
        return scores

    def _ask(self, arguments: dict[str, list[Any]], count: int, limit: float | None) -> list[Score]:
        # A function may change the lists.
        task = partial(self._scorer.score, count, {name: list(values) for name, values in arguments.items()})
        return self._runner.run(torch.no_grad()(task), limit)

    def _arguments(self, inputs: FunctionInput) -> dict[str, list[Any]]:
        """List the texts and fields that the scorer looks at, by name."""
        wants = self._scorer.wants
        arguments = {name: list(values) for name, values in inputs.fields.items() if wants(name)}
        texts: tuple[Callable[[str], list[Any]], ...] = (
            inputs.prompts,
            inputs.completions,
            inputs.completion_ids,
        )
        for name, read in zip(TEXTS, texts, strict=True):
            if wants(name):
                arguments[name] = read(self._prefix)
        return arguments
