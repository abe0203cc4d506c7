"""Optimizer steps that are skipped because a gradient is not finite: what was so first, and the error for many."""

from collections.abc import Iterator
from math import isfinite

from realrl.algorithms.method import Metrics
from realrl.data.batch import Batch
from realrl.engine.finite import all_finite
from realrl.engine.flat import FlatBuffer
from realrl.engine.model import Model


class SkippedStepsError(Exception):
    """Optimizer steps that were skipped since the gradient was not finite.

    call: the train call; quantity: the first quantity of the last mini-batch that was not finite; steps: how many
    were skipped in a row; minibatch: this rank's part of the last one, with all that the loss was computed from,
    None where another rank has the same.
    """

    def __init__(self, call: str, quantity: str, steps: int, minibatch: Batch | None) -> None:
        super().__init__(f"{call}: {steps} optimizer steps in a row were skipped: {quantity} is not finite")
        self.call, self.quantity, self.steps, self.minibatch = call, quantity, steps, minibatch


def first_not_finite(model: Model, minibatch: Batch, figures: Metrics, gradients: FlatBuffer) -> str:
    """The first quantity that is not finite on any rank, in the order of computation: what the mini-batch holds,
    parameters, figures of the loss, gradients. The same on every rank of the model.

    figures: those of this mini-batch on all ranks; gradients: accumulated by this rank, not yet added up.
    """
    # Every rank has the same names in the same order, so that the place among them says which it is.
    names = list(_names(model, minibatch, figures))
    suspects = _suspects(model, minibatch, figures, gradients)
    mine = next((place for place, finite in enumerate(suspects) if not finite), len(names))
    first = gradients.data.new_tensor(float(mine))
    place = -int(model.parallel.everyone.max(-first))
    return names[place] if place < len(names) else "the gradient norm"


def _names(model: Model, minibatch: Batch, figures: Metrics) -> Iterator[str]:
    yield from minibatch.fields
    for spec in model.layout.specs:
        yield f"parameter {spec.name}"
    yield from figures.means
    for spec in model.layout.specs:
        yield f"the gradient of {spec.name}"


def _suspects(model: Model, minibatch: Batch, figures: Metrics, gradients: FlatBuffer) -> Iterator[bool]:
    """Whether each of `_names` is finite, as far as this rank holds it."""
    held = {tensor.name for tensor in model.parameters.tensors}
    for field in minibatch.fields.values():
        yield all_finite(field.values)
    for spec in model.layout.specs:
        yield spec.name not in held or all_finite(model.parameters[spec.name])
    results = figures.result()
    for name in figures.means:
        yield isfinite(results[name])
    for spec in model.layout.specs:
        yield spec.name not in held or all_finite(gradients[spec.name])
