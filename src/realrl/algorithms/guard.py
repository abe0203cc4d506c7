"""Guards around a user's own algorithm: its exceptions and wrong outputs become one error message.

Each check returns a description of what is wrong with an output, or None. Only the check of weights reads numbers
of a tensor, because reading them waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from realrl.algorithms.base.method import Algorithm, FunctionInput, Method, Metrics, ModelOutput, Sum
from realrl.config.errors import RunError, UserCodeError, UserError, join
from realrl.config.user_code import UserCode, find_definition, is_own_module
from realrl.data.batch import KEY_DTYPES, Batch, Ragged
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph

Declared = Sequence[tuple[Call, DataflowGraph]]
"""One call: (call, graph) for each graph that has it."""


def check_sequences(given: Any, batch: Batch) -> str | None:
    """Check the rows that a model runs on: they must be tokens, with the same number of rows for each item."""
    wanted = "a Ragged of int64 tokens, with the same number of consecutive rows for every item"
    if not isinstance(given, Ragged):
        return f"gave {_show(given)}; it must give {wanted}"
    if given.values.dtype != torch.int64:
        return f"gave values of {_name(given.values.dtype)}; it must give {wanted}"
    if not given.lengths or len(given) % len(batch):
        return f"gave {len(given)} rows for {len(batch)} items; it must give {wanted}"
    return None


def check_outputs(given: Any, declared: Declared, batch: Batch) -> str | None:
    """Check the outputs of a call for the items of `batch`, whose fields are exactly the call's inputs.

    A call that is in both graphs may have different inputs and outputs in the two graphs.
    """
    possible = [(call, graph) for call, graph in declared if set(call.inputs) == set(batch.fields)]
    problems = [_check_outputs(given, call, graph, batch) for call, graph in possible]
    return None if None in problems else problems[0]


def _check_outputs(given: Any, call: Call, graph: DataflowGraph, batch: Batch) -> str | None:
    listed = [repr(key) for key in call.outputs]
    wanted = f"a dict of {join(listed)}, a Ragged each" if listed else "an empty dict"
    if not isinstance(given, Mapping):
        return f"gave {_show(given)}; it must give {wanted}"
    if missing := [key for key in call.outputs if key not in given]:
        return f"gave no key {missing[0]!r}; it must give {wanted}"
    if unknown := [key for key in given if key not in call.outputs]:
        return f"gave a key {unknown[0]!r}, which the call does not have; it must give {wanted}"
    fields = {**batch.fields, **given}
    problems = (_check_rows(given[key], key, graph, fields, len(batch)) for key in call.outputs)
    return next((problem for problem in problems if problem is not None), None)


def _check_rows(
    rows: Any, key: str, graph: DataflowGraph, fields: Mapping[str, Any], items: int
) -> str | None:
    """Check the rows of one key. `fields`: inputs and outputs of the call, by key."""
    declared = graph.keys[key]
    wanted = f"a Ragged of {declared.dtype} with one row for each of {items} items"
    if declared.width is not None:
        wanted += f", {declared.width} numbers at each position"
    if not isinstance(rows, Ragged):
        return f"gave {_show(rows)} as {key!r}; it must be {wanted}"
    if len(rows) != items:
        return f"gave {len(rows)} rows of {key!r}; it must be {wanted}"
    if rows.values.dtype != KEY_DTYPES[declared.dtype]:
        return f"gave {key!r} as {_name(rows.values.dtype)}; it must be {wanted}"
    if rows.values.shape[1:] != ((declared.width,) if declared.width is not None else ()):
        return f"gave values of shape {list(rows.values.shape)} as {key!r}; it must be {wanted}"
    length_key = graph.length_key(key)
    if length_key is None:
        wanted_lengths, why = (1,) * items, "the graph declares one number per item"
    elif length_key != key and isinstance(fields.get(length_key), Ragged):
        wanted_lengths, why = fields[length_key].lengths, f"the graph declares as many as {length_key!r} has"
    else:
        return None
    pairs = enumerate(zip(rows.lengths, wanted_lengths, strict=False))
    row = next((i for i, (found, right) in pairs if found != right), None)
    if row is None:
        return None
    expected = "" if length_key is None else f", {wanted_lengths[row]}"
    return f"gave {rows.lengths[row]} numbers for row {row} of {key!r}; {why}{expected}"


def check_metrics(given: Any, *_: Any) -> str | None:
    if not isinstance(given, Metrics):
        return f"gave {_show(given)}; it must give Metrics"
    means = [(name, value) for name, pair in given.means.items() for value in pair]
    for name, value in (*given.maxima.items(), *means):
        if not isinstance(value, Tensor) or value.dim() > 0:
            return f"gave {_show(value)} for the metric {name!r}; a metric is made of single numbers"
    return None


def check_prepared(given: Any, batch: Batch, _: Sum) -> str | None:
    """Check the result of `prepare`: a batch with the same items, and metrics."""
    if not _is_pair(given):
        return f"gave {_show(given)}; it must give a tuple of a Batch and Metrics"
    prepared = given[0]
    if not isinstance(prepared, Batch):
        return f"gave {_show(prepared)} and Metrics; it must give a Batch, such as batch.with_fields(...)"
    if prepared.ids != batch.ids:
        return (
            f"gave a Batch of {len(prepared)} items, not the {len(batch)} of its argument in their order;"
            " leave items out by their weight and loss"
        )
    wrong = next((key for key, rows in prepared.fields.items() if not isinstance(rows, Ragged)), None)
    if wrong is not None:
        return f"gave {_show(prepared.fields[wrong])} as {wrong!r}; fields of a Batch are Ragged"
    return check_metrics(given[1])


def check_weight(given: Any, _: Batch) -> str | None:
    if isinstance(given, Real) or (isinstance(given, Tensor) and given.dim() == 0):
        number = float(given)
        if isfinite(number) and number >= 0:
            return None
    return f"gave {_show(given)}; it must give a finite number, 0 or above"


def check_loss(given: Any, _: Batch, output: ModelOutput) -> str | None:
    """Check the loss of a micro-batch: a scalar with a gradient, and metrics."""
    if not _is_pair(given):
        return f"gave {_show(given)}; it must give a tuple of the loss and Metrics"
    loss = given[0]
    if not isinstance(loss, Tensor) or loss.dim() > 0 or not loss.is_floating_point():
        return f"gave {_show(loss)} as the loss; it must be a scalar: a sum over the micro-batch"
    computed = (output.logprobs, output.values, output.candidate_logprobs)
    if not loss.requires_grad and any(tensor is not None and tensor.requires_grad for tensor in computed):
        return (
            "gave a loss without gradient; it must be computed from the model's output, by no detach(), item() or"
            " no_grad()"
        )
    return check_metrics(given[1])


def check_flag(given: Any, *_: Any) -> str | None:
    return None if isinstance(given, bool) else f"gave {_show(given)}; it must be True or False"


def check_positive(given: Any) -> str | None:
    fits = isinstance(given, Real) and isfinite(given) and float(given) > 0
    return None if fits else f"gave {_show(given)}; it must be a number above 0"


def check_notes(given: Any, _: Mapping[str, float]) -> str | None:
    fits = isinstance(given, list) and all(isinstance(text, str) for text in given)
    return None if fits else f"gave {_show(given)}; it must give a list of texts"


def check_state(given: Any) -> str | None:
    if not isinstance(given, Mapping):
        return f"gave {_show(given)}; it must give a mapping from names to numbers"
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            return f"gave {_show(value)} for {name!r}; it must give numbers, by names"
    return None


def check_nothing(*_: Any) -> None:
    """Accept anything."""


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show(value: Any) -> str:
    """Describe a wrong value: its type, or the value itself if it is short."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and type {_name(value.dtype)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if value is None or isinstance(value, Real | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return f"a {type(value).__name__}"


Check = Callable[..., str | None]
"""Check of a function's result. The arguments after the result are the arguments of that function."""

_PASSING = (UserError, RunError, MemoryError, torch.OutOfMemoryError)
"""Exceptions that are clear without naming a line of the user's code."""

_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "outputs": dict,
    "weight": float,
    "state_dict": dict,
    "call": lambda given: (dict(given[0]), given[1]),
}
"""Conversion of a checked result, by function name."""


class GuardedObject:
    """Wrapper of a user's object that checks the result of each function.

    Raises UserCodeError if a function raises, or returns a result that its check refuses. Exceptions in code of
    this package pass unchanged.
    """

    def __init__(
        self, code: UserCode, target: Any, owner: str, checks: Mapping[str, Check], *, alone: bool = True
    ) -> None:
        """`owner`: name of the object in error messages, such as `actor.train`. `checks`: the check of each
        function's result, by function name. `alone`: whether one rank may fail while the others succeed.
        """
        self._code, self._target, self._owner = code, target, owner
        self._checks, self._alone = checks, alone

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in vars(self).get("_checks", ()):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._target, name)
        # Ranks make all calls of a function's method together, except `call` itself.
        alone = self._alone or name == "call"
        given = self._run(name, function, arguments, alone)
        self._refuse(self._checks[name](given, *arguments), name, function, alone)
        return _CONVERT.get(name, lambda value: value)(given)

    def _read(self, name: str, check: Check) -> Any:
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


class _ReductionError(BaseException):
    """Failure of a reduction over ranks, which is not the user's fault.

    It is a BaseException, so that `except Exception` in user code does not catch it.
    """

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(error)
        self.error = error


_TRAIN_CHECKS: Mapping[str, Check] = {
    "sequences": check_sequences,
    "weight": check_weight,
    "loss": check_loss,
    "stop": check_flag,
    "finish": check_metrics,
    "prepare": check_prepared,
}


class GuardedTrain(GuardedObject):
    """Wrapper of a user's method of a train call."""

    def __init__(self, code: UserCode, method: Method, call: str) -> None:
        super().__init__(code, method, call, _TRAIN_CHECKS)
        self.epochs: int = self._read("epochs", check_positive)
        self.entropy: bool = self._read("entropy", check_flag)

    @property
    def head_scale(self) -> float:
        return float(self._read("head_scale", check_positive))

    def prepare(self, batch: Batch, dp_sum: Sum) -> Any:
        def reduce(tensor: Tensor) -> Tensor:
            try:
                return dp_sum(tensor)
            except RuntimeError as error:  # another rank has failed
                raise _ReductionError(error) from error

        try:
            return self._call("prepare", batch, reduce)
        except _ReductionError as failed:
            raise failed.error from None


_ALGORITHM_CHECKS: Mapping[str, Check] = {
    "notes": check_notes,
    "state_dict": check_state,
    "load_state_dict": check_nothing,
}


class GuardedAlgorithm(GuardedObject):
    """A user's algorithm, with guarded methods."""

    def __init__(
        self, code: UserCode, algorithm: Algorithm, name: str, methods: Mapping[str, Method]
    ) -> None:
        super().__init__(code, algorithm, name, _ALGORITHM_CHECKS)
        self.graph, self.eval_graph = algorithm.graph, algorithm.eval_graph
        self.temperature = float(self._read("temperature", check_positive))
        self.method = methods.__getitem__


def guard_method(code: UserCode, method: Method, declared: Declared) -> Method:
    call = declared[0][0]

    def check_call(given: Any, inputs: FunctionInput) -> str | None:
        if not _is_pair(given):
            return f"gave {_show(given)}; it must give a tuple of outputs and Metrics"
        return check_outputs(given[0], declared, inputs.batch) or check_metrics(given[1])

    guarded: Any = method
    if call.kind is Kind.TRAIN:
        guarded = GuardedTrain(code, method, call.name)
    elif call.kind is Kind.INFERENCE:
        checks: dict[str, Check] = {
            "sequences": check_sequences,
            "outputs": lambda given, batch, _: check_outputs(given, declared, batch),
            "metrics": check_metrics,
        }
        guarded = GuardedObject(code, method, call.name, checks)
    elif call.kind is Kind.FUNCTION:
        checks = {
            "load": check_nothing,
            "wants": check_flag,
            "check_fields": check_nothing,
            "call": check_call,
        }
        guarded = GuardedObject(code, method, call.name, checks, alone=False)
    return cast(Method, guarded)
