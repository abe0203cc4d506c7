"""Compare a replayed step with its record, call by call."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realrl.data.batch import Ragged
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.engine.model import Model
from realrl.runtime.measure.metric_names import PERFORMANCE
from realrl.runtime.records.fingerprints import Fingerprint, Fingerprints, add_fingerprints, take_fingerprints
from realrl.runtime.records.step_record import StepRecord
from realrl.runtime.worker.store import Store


@dataclass(frozen=True, order=True)
class RowDifference:
    """The first place at which a row differs from the record."""

    item: int
    position: int
    """Position in the row; -1 if the row has another length."""
    recorded: float
    replayed: float


@dataclass
class KeyComparison:
    """Comparison of the rows of a key."""

    largest: float = 0.0
    """Largest relative deviation from the record."""
    items: int = 0
    """Number of items that differ by more than the tolerance."""
    first: RowDifference | None = None

    def add(self, other: "KeyComparison") -> None:
        """Add the comparison of other items."""
        self.largest, self.items = max(self.largest, other.largest), self.items + other.items
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first = other.first


@dataclass
class RankFindings:
    """What one rank has found in a step, in the order of calls."""

    keys: dict[str, KeyComparison] = field(default_factory=dict)
    fingerprints: dict[str, Fingerprints] = field(default_factory=dict)


class Comparer:
    """Compares each call of a step with the record, as a `StepWatch`.

    Later calls get the recorded outputs, so that every call is compared with the inputs that it had in the run.
    """

    def __init__(self, record: StepRecord, graph: DataflowGraph, tolerance: float) -> None:
        self._record, self._graph, self._tolerance = record, graph, tolerance
        self.findings = RankFindings()

    def begin_call(self, call: Call, model: Model) -> None:
        if call.name in self._record.fingerprints:
            self.findings.fingerprints[call.name] = take_fingerprints(model)

    def end_call(self, call: Call, store: Store) -> None:
        # A round of dynamic sampling has a graph and items of its own; only its result is compared.
        if store.graph is not self._graph:
            return
        for key in call.outputs:
            recorded = self._record.rows.get(key, {})
            items, rows = store.held(key)
            known = [i for i, item in enumerate(items) if item in recorded]
            now = rows.select(known)
            before = Ragged.of([recorded[items[i]] for i in known], dtype=now.values.dtype)
            chosen = [items[i] for i in known]
            found = compare_rows(chosen, before, now, self._tolerance)
            self.findings.keys.setdefault(key, KeyComparison()).add(found)
            store.put(key, chosen, before)


def compare_rows(items: Sequence[int], recorded: Ragged, replayed: Ragged, tolerance: float) -> KeyComparison:
    """Compare rows of items. Integers must be equal, and other numbers within a relative tolerance."""
    found = KeyComparison()
    for item, old, new in zip(items, recorded.rows(), replayed.rows(), strict=True):
        count = min(len(old), len(new))
        deviations = _find_deviations(old[:count], new[:count])
        limit = 0.0 if not old.is_floating_point() else tolerance
        differing = (deviations > limit).nonzero()
        found.largest = max(found.largest, float(deviations.max()) if deviations.numel() else 0.0)
        if len(differing):
            place = tuple(differing[0].tolist())
            first = RowDifference(item, place[0], float(old[place]), float(new[place]))
        elif len(old) != len(new):
            first = RowDifference(item, -1, float(len(old)), float(len(new)))
        else:
            continue
        found.items += 1
        found.first = first if found.first is None else min(found.first, first)
    return found


def _find_deviations(old: Tensor, new: Tensor) -> Tensor:
    """Compute deviations relative to 1 + |old|, as float64. NaN equals NaN."""
    old, new = old.double(), new.double()
    deviations = (old - new).abs() / (1 + old.abs())
    same = (old == new) | (old.isnan() & new.isnan())
    return torch.where(same, 0.0, deviations.nan_to_num(math.inf, math.inf))


@dataclass(frozen=True)
class CallComparison:
    """Comparison of one call with the record."""

    call: str
    problems: tuple[str, ...]
    """The quantities that differ: parameters first, then outputs, then metrics."""
    agreed: str
    """The quantities that agree, with the largest deviation of each."""
    reason: str | None = None
    """Where to look for the cause of the first problem."""


@dataclass(frozen=True, eq=False)
class StepComparer:
    """Turns the findings of all ranks into a comparison per call, on the rank that writes."""

    record: StepRecord
    graph: DataflowGraph
    tolerance: float
    prompts: Sequence[int]
    origins: Sequence[str]
    """Origin of each item's record, as FILE:LINE."""

    def compare(
        self, findings: Sequence[RankFindings], metrics: Mapping[str, float], store: Store
    ) -> list[CallComparison]:
        """Compare the records of the step, and the calls in the order in which they run.

        `metrics` have the names `call/name`. `store` has the records.
        """
        if list(self.prompts) != list(self.record.header.prompts):
            text = f"the step takes the records {_show(self.prompts)}, and took {_show(self.record.header.prompts)}"
            reason = (
                "data.train, data.shuffle or the seed has changed, or dynamic sampling chose other prompts"
            )
            return [CallComparison("records", (text,), "", reason)]
        changed = [*self._compare_records(store)]
        if changed:
            reason = "data.train, the tokenizer or the chat template has changed"
            return [CallComparison("records", tuple(changed), "", reason)]
        keys: dict[str, KeyComparison] = {}
        for one in findings:
            for key, of in one.keys.items():
                keys.setdefault(key, KeyComparison()).add(of)
        return [
            self._compare_call(
                call,
                keys,
                add_fingerprints(one.fingerprints.get(call.name, {}) for one in findings),
                metrics,
            )
            for call in self.graph.order
        ]

    def _compare_records(self, store: Store) -> Iterator[str]:
        """Compare the values that the records of the step give to calls."""
        produced = {key for call in self.graph.calls for key in call.outputs}
        for key, recorded in self.record.rows.items():
            if key not in produced and key in store.keys:
                items, rows = store.held(key)
                before = Ragged.of([recorded[item] for item in items], dtype=rows.values.dtype)
                found = compare_rows(items, before, rows, self.tolerance)
                if found.first is not None:
                    yield self._describe_rows(key, found)

    def _compare_call(
        self,
        call: Call,
        keys: Mapping[str, KeyComparison],
        fingerprints: Fingerprints,
        metrics: Mapping[str, float],
    ) -> CallComparison:
        parameters = self._compare_parameters(call, fingerprints)
        outputs, agreed = [], []
        if fingerprints and not parameters:
            agreed.append("parameters equal")
        for key in call.outputs:
            found = keys.get(key)
            if found is None:
                continue
            if found.first is None:
                agreed.append(f"{key} {_describe_deviation(found.largest)}")
            else:
                outputs.append(self._describe_rows(key, found))
        changed, close = self._compare_metrics(call, metrics)
        agreed += close
        problems = (*parameters, *outputs, *changed)
        reason = None
        if parameters:
            reason = (
                "weights or their files were changed after the checkpoint, or a copy in memory was damaged during"
                " the run"
            )
        elif problems:
            reason = _REASONS[call.kind]
        return CallComparison(call.name, problems, ", ".join(agreed), reason)

    def _compare_parameters(self, call: Call, replayed: Fingerprints) -> list[str]:
        """Compare parameters with the record. They must be equal if no training step lies between."""
        recorded = self.record.fingerprints.get(call.name, {})
        if not recorded or not replayed:
            return []
        header = self.record.header
        order = [other.name for other in self.graph.order]
        trained = any(
            other.kind is Kind.TRAIN and order.index(other.name) < order.index(call.name)
            for other in self.graph.order
        )
        exact = header.checkpoint == header.step - 1 and not trained
        differing = []
        for name in recorded.keys() | replayed.keys():
            old, new = recorded.get(name), replayed.get(name)
            if old is None or new is None:
                differing.append(f"{name} exists only {'now' if old is None else 'in the record'}")
            elif not _agree(old, new, self.tolerance, exact=exact):
                differing.append(f"{name} (norm {old.norm:.9g} in the record, {new.norm:.9g} now)")
        if not differing:
            return []
        differing.sort()
        more = f" and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
        return [f"parameters differ: {differing[0]}{more}"]

    def _describe_rows(self, key: str, found: KeyComparison) -> str:
        first = found.first
        assert first is not None, "something differs"
        origin = f" ({self.origins[first.item]})" if self.origins else ""
        where = f"{key} of item {first.item}{origin}"
        more = f"; {found.items} items differ" if found.items > 1 else ""
        if first.position < 0:
            return f"{where} has {first.recorded:g} values in the record, and {first.replayed:g} now{more}"
        return (
            f"{where}, position {first.position}, is {first.recorded:.9g} in the record, and"
            f" {first.replayed:.9g} now{more}"
        )

    def _compare_metrics(self, call: Call, metrics: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """Compare the metrics of a call. Returns those that differ, and the loss if it agrees."""
        differing, close = [], []
        prefix = f"{call.name}/"
        for name, old in self.record.metrics.items():
            if not name.startswith(prefix) or name.startswith(PERFORMANCE):
                continue
            new = metrics.get(name)
            if new is None:
                differing.append(f"{name} is missing now; it was {old:.9g}")
                continue
            deviation = float(_find_deviations(torch.tensor(old), torch.tensor(new)))
            if deviation > self.tolerance:
                differing.append(f"{name} is {old:.9g} in the record, and {new:.9g} now")
            elif name.endswith(("/loss", "/grad_norm")):
                close.append(f"{name.removeprefix(prefix)} {_describe_deviation(deviation)}")
        return differing, close


_REASONS = {
    Kind.GENERATE: "the parameters agree; if a single token differs, two tokens may be nearly equally likely under"
    " rounding, otherwise sampling settings or the computation differ",
    Kind.INFERENCE: "the call had the recorded inputs, so its computation differs: settings, kernels or the"
    " precision of the device",
    Kind.FUNCTION: "the function had the recorded inputs, so it returned something else: its file, its data or a"
    " service has changed, or it is not deterministic",
    Kind.TRAIN: "the call had the recorded inputs, so its loss, gradient or optimizer step differs: the algorithm's"
    " code, its state, settings or the precision of the device",
}
"""Where to look if a call gives other results from the recorded inputs."""


def _agree(old: Fingerprint, new: Fingerprint, tolerance: float, *, exact: bool) -> bool:
    if old.dtype == new.dtype and exact:
        return old.bits == new.bits
    if old.dtype != new.dtype:
        tolerance = max(tolerance, _ROUNDING)
    return math.isclose(old.norm, new.norm, rel_tol=tolerance, abs_tol=1e-12)


_ROUNDING = 4e-3
"""Largest relative deviation of a number that is rounded to bfloat16."""


def _describe_deviation(largest: float) -> str:
    return "equal" if largest == 0 else f"within {largest:.1e}"


def _show(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, …" if len(numbers) > 8 else shown
