"""A function of the user's in place of a reward model."""

from collections.abc import Collection

import torch

from realrl.algorithms.method import FunctionInput, Metrics
from realrl.algorithms.rewards.inference import compute_score_metrics
from realrl.config.errors import UserCodeError, UserError
from realrl.config.user_function import UserFunction
from realrl.config.words import join
from realrl.data.batch import Ragged

TEXTS = ("prompts", "completions")
"""Arguments besides fields of records."""


class RewardFunction:
    """Score of each sequence: what the function that `reward` names says of its texts.

    It is called as reward functions of TRL are: with keyword arguments `prompts`, `completions` and every further
    field of the records, as lists; one without `**kwargs` gets only those that it names.
    """

    def __init__(self, reference: str, *, finished_only: bool = False, prefix: str = "") -> None:
        """`finished_only` and `prefix` as of `RewardInference`."""
        self._reference = reference
        self._finished_only = finished_only
        self._prefix = prefix
        self._loaded: UserFunction | None = None

    @property
    def _function(self) -> UserFunction:
        assert self._loaded is not None, "only ranks that have loaded it ask for it"
        return self._loaded

    def load(self) -> None:
        """Import the function; UserError where there is none, or it cannot be called by keywords."""
        self._loaded = UserFunction("reward", self._reference)
        if self._loaded.positional:
            name = self._loaded.positional[0]
            raise UserError(
                f"{self._loaded.label} takes {name} by position only; it is called with keyword arguments"
            )

    def wants(self, field: str) -> bool:
        """Tell whether the function takes an argument of that name."""
        return self._function.accepts(field)

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that records have the fields that the function needs.

        UserError where it needs an argument that is neither a text nor a field, or where a field has the name of
        the texts.
        """
        clash = next((name for name in TEXTS if name in fields), None)
        if clash is not None:
            raise UserError(
                f"{self._function.label}: records of {source} have a field {clash!r}, which is the name of an"
                " argument; rename the field"
            )
        missing = [name for name in self._function.required if name not in (*TEXTS, *fields)]
        if missing:
            known = join([*TEXTS, *sorted(fields)])
            raise UserError(
                f"{self._function.label} needs {missing[0]!r}, which no record of {source} has; there are {known}"
            )

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """`score`: one number per sequence. UserCodeError where the function gives anything else."""
        function = self._function
        arguments = {name: list(values) for name, values in inputs.fields.items() if function.accepts(name)}
        if function.accepts("prompts"):
            arguments["prompts"] = inputs.prompts(self._prefix)
        if function.accepts("completions"):
            arguments["completions"] = inputs.completions(self._prefix)
        values = function.numbers(len(inputs.batch), **arguments)
        scores = torch.tensor(values, dtype=torch.float32)
        if not bool(scores.isfinite().all()):
            raise UserCodeError(
                f"{function.label} gave {max(values, key=abs)}, which is too large for float32"
            )
        score = Ragged.scalars(scores)
        if self._prefix:
            return {f"{self._prefix}score": score}, Metrics()
        scored = inputs.batch.with_fields(score=score)
        return {"score": score}, compute_score_metrics(scored, finished_only=self._finished_only)
