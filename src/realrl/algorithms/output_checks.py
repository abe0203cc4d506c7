"""Checks of what methods give, against the graph; each returns what is wrong, in words, or None.

But for weights, none of them looks at values, which would wait for the device.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from realrl.algorithms.method import Metrics, ModelOutput
from realrl.config.errors import join
from realrl.data.batch import KEY_DTYPES, Batch, Ragged
from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph

Declared = Sequence[tuple[Call, DataflowGraph]]
"""A call, in each graph that has it."""


def check_sequences(given: Any, batch: Batch) -> str | None:
    """Check the rows that a model is run on: tokens, as many rows for each item."""
    wanted = "a Ragged of int64 tokens, with the same number of consecutive rows for every item"
    if not isinstance(given, Ragged):
        return f"gave {_shown(given)}; it must give {wanted}"
    if given.values.dtype != torch.int64:
        return f"gave values of {_name(given.values.dtype)}; it must give {wanted}"
    if not given.lengths or len(given) % len(batch):
        return f"gave {len(given)} rows for {len(batch)} items; it must give {wanted}"
    return None


def check_outputs(given: Any, declared: Declared, batch: Batch) -> str | None:
    """Check the outputs of a call for the items of `batch`, which has the call's inputs and nothing else.

    The call may be in both graphs, and have other inputs and outputs in each.
    """
    possible = [(call, graph) for call, graph in declared if set(call.inputs) == set(batch.fields)]
    problems = [_check_outputs(given, call, graph, batch) for call, graph in possible]
    return None if None in problems else problems[0]


def _check_outputs(given: Any, call: Call, graph: DataflowGraph, batch: Batch) -> str | None:
    wanted = _describe_outputs(call)
    if not isinstance(given, Mapping):
        return f"gave {_shown(given)}; it must give {wanted}"
    missing = [key for key in call.outputs if key not in given]
    if missing:
        return f"gave no key {missing[0]!r}; it must give {wanted}"
    unknown = [key for key in given if key not in call.outputs]
    if unknown:
        return f"gave a key {unknown[0]!r}, which the call does not have; it must give {wanted}"
    for key in call.outputs:
        problem = _check_rows(given[key], key, graph, {**batch.fields, **given}, len(batch))
        if problem is not None:
            return problem
    return None


def _check_rows(
    rows: Any, key: str, graph: DataflowGraph, fields: Mapping[str, Any], items: int
) -> str | None:
    """Check the rows of one key; `fields` are all keys that are known of the items."""
    declared = graph.keys[key]
    wanted = f"a Ragged of {declared.dtype} with one row for each of {items} items"
    if declared.width is not None:
        wanted += f", {declared.width} numbers at each position"
    if not isinstance(rows, Ragged):
        return f"gave {_shown(rows)} as {key!r}; it must be {wanted}"
    if len(rows) != items:
        return f"gave {len(rows)} rows of {key!r}; it must be {wanted}"
    if rows.values.dtype != KEY_DTYPES[declared.dtype]:
        return f"gave {key!r} as {_name(rows.values.dtype)}; it must be {wanted}"
    if rows.values.shape[1:] != ((declared.width,) if declared.width is not None else ()):
        return f"gave values of shape {list(rows.values.shape)} as {key!r}; it must be {wanted}"
    length_key = graph.length_key(key)
    if length_key is None:
        row = next((i for i, length in enumerate(rows.lengths) if length != 1), None)
        if row is not None:
            return (
                f"gave {rows.lengths[row]} numbers for row {row} of {key!r}; the graph declares one number per"
                " item"
            )
    elif length_key != key and isinstance(fields.get(length_key), Ragged):
        expected = fields[length_key].lengths
        differing = (
            i for i, pair in enumerate(zip(rows.lengths, expected, strict=False)) if pair[0] != pair[1]
        )
        row = next(differing, None)
        if row is not None:
            return (
                f"gave {rows.lengths[row]} numbers for row {row} of {key!r}; the graph declares as many as"
                f" {length_key!r} has, {expected[row]}"
            )
    return None


def check_function(given: Any, declared: Declared, batch: Batch) -> str | None:
    """Check what a function gives: outputs and metrics."""
    if not _is_pair(given):
        return f"gave {_shown(given)}; it must give a tuple of outputs and Metrics"
    return check_outputs(given[0], declared, batch) or check_metrics(given[1])


def check_metrics(given: Any) -> str | None:
    """Check metrics: single numbers."""
    if not isinstance(given, Metrics):
        return f"gave {_shown(given)}; it must give Metrics"
    values = {name: [value] for name, value in given.maxima.items()}
    values |= {name: [*pair] for name, pair in given.means.items()}
    for name, numbers in values.items():
        for value in numbers:
            if not isinstance(value, Tensor) or value.dim() > 0:
                return f"gave {_shown(value)} for the metric {name!r}; a metric is made of single numbers"
    return None


def check_prepared(given: Any, batch: Batch) -> str | None:
    """Check what `prepare` gives: the same items, and metrics."""
    if not _is_pair(given):
        return f"gave {_shown(given)}; it must give a tuple of a Batch and Metrics"
    prepared = given[0]
    if not isinstance(prepared, Batch):
        return f"gave {_shown(prepared)} and Metrics; it must give a Batch, such as batch.with_fields(...)"
    if prepared.ids != batch.ids:
        return (
            f"gave a Batch of {len(prepared)} items, not the {len(batch)} of its argument in their order;"
            " leave items out by their weight and loss"
        )
    wrong = next((key for key, rows in prepared.fields.items() if not isinstance(rows, Ragged)), None)
    if wrong is not None:
        return f"gave {_shown(prepared.fields[wrong])} as {wrong!r}; fields of a Batch are Ragged"
    return check_metrics(given[1])


def check_weight(given: Any) -> str | None:
    """Check the weight of a mini-batch."""
    if isinstance(given, Real) or (isinstance(given, Tensor) and given.dim() == 0):
        number = float(given)
        if isfinite(number) and number >= 0:
            return None
    return f"gave {_shown(given)}; it must give a finite number, 0 or above"


def check_loss(given: Any, output: ModelOutput) -> str | None:
    """Check the loss of a micro-batch: a scalar with a gradient, and metrics."""
    if not _is_pair(given):
        return f"gave {_shown(given)}; it must give a tuple of the loss and Metrics"
    loss = given[0]
    if not isinstance(loss, Tensor) or loss.dim() > 0 or not loss.is_floating_point():
        return f"gave {_shown(loss)} as the loss; it must be a scalar: a sum over the micro-batch"
    computed = (output.logprobs, output.values, output.candidate_logprobs)
    if not loss.requires_grad and any(tensor is not None and tensor.requires_grad for tensor in computed):
        return (
            "gave a loss without gradient; it must be computed from the model's output, by no detach(), item() or"
            " no_grad()"
        )
    return check_metrics(given[1])


def check_flag(given: Any) -> str | None:
    """Check a truth value."""
    return None if isinstance(given, bool) else f"gave {_shown(given)}; it must be True or False"


def check_positive(given: Any) -> str | None:
    """Check a factor."""
    if isinstance(given, Real) and isfinite(given) and float(given) > 0:
        return None
    return f"gave {_shown(given)}; it must be a number above 0"


def check_notes(given: Any) -> str | None:
    """Check notes for the user."""
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        return None
    return f"gave {_shown(given)}; it must give a list of texts"


def check_state(given: Any) -> str | None:
    """Check the state that is saved beside a checkpoint."""
    if not isinstance(given, Mapping):
        return f"gave {_shown(given)}; it must give a mapping from names to numbers"
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            return f"gave {_shown(value)} for {name!r}; it must give numbers, by names"
    return None


def check_nothing(given: Any) -> None:
    """Accept anything."""


def _describe_outputs(call: Call) -> str:
    keys = join([repr(key) for key in call.outputs]) if call.outputs else "no keys"
    return f"a dict of {keys}, a Ragged each" if call.outputs else "an empty dict"


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(value: Any) -> str:
    """Describe a wrong value: its type, and what it is where that is short."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and type {_name(value.dtype)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if value is None or isinstance(value, Real | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return f"a {type(value).__name__}"
