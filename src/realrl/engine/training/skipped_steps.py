"""Optimizer steps skipped because a loss or gradient is not finite: their count, first cause, and limit."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import isfinite

from torch import Tensor

from realrl.algorithms.base.method import Metrics
from realrl.data.batch import Batch
from realrl.engine.buffers import FlatBuffer
from realrl.engine.finite import all_finite
from realrl.engine.model import Model


class SkippedStepsError(Exception):
    """Too many optimizer steps were skipped because the loss or gradient was not finite.

    `call` names the train call. `what` describes in words how many steps were skipped. `quantity` is the first
    quantity of the last mini-batch that was not finite. `minibatch` is this rank's part of the last mini-batch,
    with all inputs of the loss; None if another rank reports the same part.
    """

    def __init__(self, call: str, what: str, quantity: str, minibatch: Batch | None) -> None:
        super().__init__(f"{call}: {what}: {quantity} is not finite")
        self.call = call
        self.what = what
        self.quantity = quantity
        self.minibatch = minibatch


class SkippedSteps:
    """Counter of a role's skipped optimizer steps.

    There are too many if `limit` steps in a row are skipped, or if each of `limit` train calls in a row skips some.
    None means no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._calls = 0
        self._calls_in_a_row = 0
        self._applied = 0
        self._call = ""
        self._by_quantity = Counter[str]()
        self._last: tuple[str, Batch | None] | None = None

    def state_dict(self) -> dict[str, int]:
        """Save the counts that are compared with the limit."""
        return {"in_a_row": self._in_a_row, "calls": self._calls, "calls_in_a_row": self._calls_in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._in_a_row = state["in_a_row"]
        self._calls = state["calls"]
        self._calls_in_a_row = state["calls_in_a_row"]

    def begin_call(self, call: str) -> None:
        self._call = call
        self._applied = 0
        self._by_quantity.clear()
        self._last = None

    def count_applied(self) -> None:
        self._in_a_row = 0
        self._applied += 1

    def count_skipped(self, quantity: str, minibatch: Batch | None) -> None:
        """Count a skipped step. Raises SkippedStepsError if `limit` steps in a row were skipped."""
        self._in_a_row += 1
        self._by_quantity[quantity] += 1
        self._last = quantity, minibatch
        if self._in_a_row == self._limit:
            raise self._error(f"{self._in_a_row} optimizer steps in a row were skipped")

    def end_call(self) -> dict[str, int]:
        """End a train call and return its metrics. Raises SkippedStepsError if `limit` calls in a row skipped
        steps."""
        self._calls += 1
        self._calls_in_a_row = self._calls_in_a_row + 1 if self._by_quantity else 0
        if self._by_quantity and self._calls_in_a_row == self._limit:
            raise self._error(
                f"optimizer steps were skipped in {self._calls_in_a_row} training steps in a row"
            )
        total = {"skipped_steps": self._by_quantity.total()}
        return total | {f"skipped_for/{name}": count for name, count in self._by_quantity.items()}

    def check(self) -> None:
        """Raise SkippedStepsError unless training makes progress.

        The last train call must have applied a step. If there were several calls, at least one must have skipped no
        step.
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


def find_first_not_finite(
    model: Model, minibatch: Batch, metrics: Metrics, loss: Tensor, gradients: FlatBuffer
) -> str:
    """Find the first quantity that is not finite on any rank; all ranks of the model get the same answer.

    Quantities are checked in the order of computation: fields of the mini-batch, parameters, metrics of the loss,
    the loss, gradients. `metrics` belong to this mini-batch and are summed over ranks. `loss` and `gradients` are
    this rank's, which are not yet summed over ranks.
    """
    # Every rank has the same names in the same order, so an index identifies a quantity.
    names = list(_list_names(model, minibatch, metrics))
    all_are_finite = _check_finite(model, minibatch, metrics, loss, gradients)
    local_place = next((place for place, finite in enumerate(all_are_finite) if not finite), len(names))
    first_place = gradients.data.new_tensor(float(local_place))
    place = -int(model.groups.mesh.max(-first_place))
    return names[place] if place < len(names) else "the gradient norm"


def _list_names(model: Model, minibatch: Batch, metrics: Metrics) -> Iterator[str]:
    yield from minibatch.fields
    for spec in model.layout.specs:
        yield f"parameter {spec.name}"
    yield from metrics.means
    yield "loss"
    for spec in model.layout.specs:
        yield f"the gradient of {spec.name}"


def _check_finite(
    model: Model, minibatch: Batch, metrics: Metrics, loss: Tensor, gradients: FlatBuffer
) -> Iterator[bool]:
    """Check for each quantity of `_list_names` whether this rank's part of it is finite."""
    local_names = {tensor.name for tensor in model.parameters.tensors}
    for field in minibatch.fields.values():
        yield all_finite(field.values)
    for spec in model.layout.specs:
        yield spec.name not in local_names or all_finite(model.parameters[spec.name])
    results = metrics.result()
    for name in metrics.means:
        yield isfinite(results[name])
    yield isfinite(loss)
    for spec in model.layout.specs:
        yield spec.name not in gradients or all_finite(gradients[spec.name])
