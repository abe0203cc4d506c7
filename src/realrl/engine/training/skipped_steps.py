"""Skipped optimizer steps: gradients that are not finite, their first cause, and the error for too many."""

from collections import Counter
from collections.abc import Iterator
from math import isfinite

from realrl.algorithms.method import Metrics
from realrl.data.batch import Batch
from realrl.engine.finite import all_finite
from realrl.engine.flat import FlatBuffer
from realrl.engine.model import Model


class SkippedStepsError(Exception):
    """Too many optimizer steps that were skipped because the gradient was not finite.

    call: the train call; what: how many were skipped, in words; quantity: the first quantity of the last mini-batch
    that was not finite; minibatch: this rank's part of the last one, with all that the loss was computed from, None
    where another rank has the same.
    """

    def __init__(self, call: str, what: str, quantity: str, minibatch: Batch | None) -> None:
        super().__init__(f"{call}: {what}: {quantity} is not finite")
        self.call, self.what, self.quantity, self.minibatch = call, what, quantity, minibatch


class SkippedSteps:
    """Counter of the skipped optimizer steps of a role, and whether they are too many.

    Too many are `limit` in a row, or some in each of `limit` train calls in a row; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._in_a_row = self._calls = self._calls_in_a_row = self._applied = 0
        self._call = ""
        self._by_quantity = Counter[str]()
        self._last: tuple[str, Batch | None] | None = None

    def begin(self, call: str) -> None:
        """Begin a train call of this name."""
        self._call, self._applied = call, 0
        self._by_quantity.clear()
        self._last = None

    def applied(self) -> None:
        """Count an applied step."""
        self._in_a_row = 0
        self._applied += 1

    def skipped(self, quantity: str, minibatch: Batch | None) -> None:
        """Count a skipped step; SkippedStepsError where it is once too often in a row."""
        self._in_a_row += 1
        self._by_quantity[quantity] += 1
        self._last = quantity, minibatch
        if self._in_a_row == self._limit:
            raise self._error(f"{self._in_a_row} optimizer steps in a row were skipped")

    def end(self) -> dict[str, int]:
        """End a train call: its metrics by name. SkippedStepsError after too many calls with skipped steps."""
        self._calls += 1
        self._calls_in_a_row = self._calls_in_a_row + 1 if self._by_quantity else 0
        if self._by_quantity and self._calls_in_a_row == self._limit:
            raise self._error(
                f"optimizer steps were skipped in {self._calls_in_a_row} training steps in a row"
            )
        figures = {"skipped_steps": self._by_quantity.total()}
        return figures | {f"skipped_for/{name}": count for name, count in self._by_quantity.items()}

    def check(self) -> None:
        """Check that training makes progress; else SkippedStepsError.

        The last train call must have made a step, and not each of several calls may have skipped some.
        """
        if not self._by_quantity:
            return
        if not self._applied:
            raise self._error("all optimizer steps of the last training step were skipped")
        if self._calls_in_a_row == self._calls > 1:
            raise self._error("optimizer steps were skipped in every training step")

    def _error(self, what: str) -> SkippedStepsError:
        assert self._last is not None, "something was skipped"
        return SkippedStepsError(self._call, what, *self._last)


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
    """Check whether each of `_names` is finite, as far as this rank holds it."""
    held = {tensor.name for tensor in model.parameters.tensors}
    for field in minibatch.fields.values():
        yield all_finite(field.values)
    for spec in model.layout.specs:
        yield spec.name not in held or all_finite(model.parameters[spec.name])
    results = figures.result()
    for name in figures.means:
        yield isfinite(results[name])
    for spec in model.layout.specs:
        yield spec.name not in gradients or all_finite(gradients[spec.name])
