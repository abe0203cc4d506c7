"""Methods of a user's own algorithm, guarded: their exceptions and wrong outputs become one error message."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from realrl.algorithms import output_checks as checks
from realrl.algorithms.method import (
    Algorithm,
    FunctionInput,
    FunctionMethod,
    InferenceMethod,
    Method,
    Metrics,
    ModelOutput,
    Sum,
    TrainMethod,
)
from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.config.user_code import UserCode, find_definition, is_own_module
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Kind

Check = Callable[[Any], str | None]
"""What is wrong with a value, in words, or None."""

_PASSING = (UserError, RunError, MemoryError, torch.OutOfMemoryError)
"""Exceptions with messages of their own, which no line of the user's has to explain."""


class UserObject:
    """An object of the user's, each of whose functions and attributes is asked for under a check.

    UserCodeError where one raises, or gives what its check refuses. Only errors of code in this package go through.
    """

    def __init__(self, code: UserCode, target: Any, owner: str) -> None:
        """`owner` is what error messages say the object's functions are of, such as `actor.train`."""
        self._code, self._target, self._owner = code, target, owner

    def ask(self, name: str, check: Check, *arguments: Any, alone: bool = True) -> Any:
        """Call a function; `alone`: whether it may fail on this rank only."""
        function = getattr(self._target, name)
        given = self._run(name, function, arguments, alone)
        self._refuse(check(given), name, function, alone)
        return given

    def read(self, name: str, check: Check) -> Any:
        """Read an attribute or property."""
        found = getattr(type(self._target), name, None)
        getter = found.fget if isinstance(found, property) else None
        read = getter or (lambda target: getattr(target, name))
        given = self._run(name, read, (self._target,), True)
        self._refuse(check(given), name, getter, True)
        return given

    def _run(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], alone: bool) -> Any:
        if is_own_module(getattr(function, "__module__", None)):
            return function(*arguments)
        verb = f"raised in {name} of {self._owner}:"
        with self._code.errors(verb, _PASSING, function=function, alone=alone):
            return function(*arguments)

    def _refuse(
        self, problem: str | None, name: str, function: Callable[..., Any] | None, alone: bool
    ) -> None:
        if problem is None:
            return
        found = None if function is None else find_definition(function)
        where = f" ({found[0]}:{found[1]})" if found is not None else ""
        raise UserCodeError(f"{self._code.label}: {name} of {self._owner}{where} {problem}", alone=alone)


class UserInference(UserObject):
    """Method of an inference call."""

    def __init__(self, code: UserCode, method: InferenceMethod, declared: checks.Declared) -> None:
        super().__init__(code, method, declared[0][0].name)
        self._declared = declared

    def sequences(self, batch: Batch) -> Ragged:
        """Select the token rows."""
        rows: Ragged = self.ask("sequences", lambda given: checks.check_sequences(given, batch), batch)
        return rows

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute the call's output keys."""

        def check(given: Any) -> str | None:
            return checks.check_outputs(given, self._declared, batch)

        return dict(self.ask("outputs", check, batch, output))

    def metrics(self, batch: Batch) -> Metrics:
        """Compute metrics."""
        metrics: Metrics = self.ask("metrics", checks.check_metrics, batch)
        return metrics


class _ReductionError(BaseException):
    """Failure of a reduction over ranks, which is not of the user's code; none of which catches it."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(error)
        self.error = error


class UserTrain(UserObject):
    """Method of a train call."""

    def __init__(self, code: UserCode, method: TrainMethod, call: str) -> None:
        super().__init__(code, method, call)
        self.epochs: int = self.read("epochs", checks.check_positive)
        self.entropy: bool = self.read("entropy", checks.check_flag)

    @property
    def head_scale(self) -> float:
        """Factor of the head's learning rate."""
        return float(self.read("head_scale", checks.check_positive))

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Prepare the items of the call."""

        def reduce(tensor: Tensor) -> Tensor:
            try:
                return dp_sum(tensor)
            except RuntimeError as error:  # another rank has gone
                raise _ReductionError(error) from error

        try:
            prepared: tuple[Batch, Metrics] = self.ask(
                "prepare", lambda given: checks.check_prepared(given, batch), batch, reduce
            )
        except _ReductionError as failed:
            raise failed.error from None
        return prepared

    def sequences(self, batch: Batch) -> Ragged:
        """Select the token rows."""
        rows: Ragged = self.ask("sequences", lambda given: checks.check_sequences(given, batch), batch)
        return rows

    def weight(self, batch: Batch) -> float:
        """Weigh a mini-batch."""
        return float(self.ask("weight", checks.check_weight, batch))

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the loss of a micro-batch."""
        loss: tuple[Tensor, Metrics] = self.ask(
            "loss", lambda given: checks.check_loss(given, output), batch, output
        )
        return loss

    def stop(self, metrics: dict[str, float]) -> bool:
        """Decide whether to stop."""
        stops: bool = self.ask("stop", checks.check_flag, metrics)
        return stops

    def finish(self) -> Metrics:
        """End the call."""
        metrics: Metrics = self.ask("finish", checks.check_metrics)
        return metrics


class UserFunctionMethod(UserObject):
    """Method of a function. Ranks make all but its calls together."""

    def __init__(self, code: UserCode, method: FunctionMethod, declared: checks.Declared) -> None:
        super().__init__(code, method, declared[0][0].name)
        self._declared = declared

    def load(self) -> None:
        """Get ready."""
        self.ask("load", checks.check_nothing, alone=False)

    def wants(self, field: str) -> bool:
        """Tell whether it looks at a field."""
        wanted: bool = self.ask("wants", checks.check_flag, field, alone=False)
        return wanted

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check the fields of a source."""
        self.ask("check_fields", checks.check_nothing, source, fields, alone=False)

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """Compute the call's output keys, and metrics."""

        def check(given: Any) -> str | None:
            return checks.check_function(given, self._declared, inputs.batch)

        outputs, metrics = self.ask("call", check, inputs)
        return dict(outputs), metrics


class UserAlgorithm(UserObject):
    """Algorithm of a user's, with methods that are checked, too."""

    def __init__(
        self, code: UserCode, algorithm: Algorithm, name: str, methods: Mapping[str, Method]
    ) -> None:
        super().__init__(code, algorithm, name)
        self.graph, self.eval_graph = algorithm.graph, algorithm.eval_graph
        self.temperature = float(self.read("temperature", checks.check_positive))
        self._methods = methods

    def method(self, call: str) -> Method:
        """Find the method of a call of either graph."""
        return self._methods[call]

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """List notes on a training step."""
        notes: list[str] = self.ask("notes", checks.check_notes, metrics)
        return notes

    def state_dict(self) -> dict[str, float]:
        """Save numbers that outlast a step."""
        return dict(self.ask("state_dict", checks.check_state))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load what `state_dict` saved."""
        self.ask("load_state_dict", checks.check_nothing, state)


def guard_method(code: UserCode, method: Method, declared: checks.Declared) -> Method:
    """Make the method of a call that turns its errors into one message. `declared`: the call in its graphs."""
    call = declared[0][0]
    match call.kind:
        case Kind.INFERENCE:
            return UserInference(code, cast(InferenceMethod, method), declared)
        case Kind.TRAIN:
            return UserTrain(code, cast(TrainMethod, method), call.name)
        case Kind.FUNCTION:
            return UserFunctionMethod(code, cast(FunctionMethod, method), declared)
        case Kind.GENERATE:
            return method
