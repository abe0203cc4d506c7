"""Run `realrl profile`: measure the missing entries of a request, and write the profile."""

import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, Protocol

import torch

from realrl.config.errors import UserError
from realrl.plan.placement import Dtype
from realrl.planner.cluster.devices import find_gpu_kind
from realrl.planner.profile.profile import (
    CollectiveTime,
    LayerTimes,
    Measurement,
    Profile,
    ShapeKey,
    SweepSpread,
    read_versions,
)
from realrl.runtime.processes.network import find_node_place
from realrl.runtime.processes.process import Process, connect
from realrl.runtime.profiler import machine
from realrl.runtime.profiler.points import (
    Bench,
    Entry,
    Measurer,
    Pace,
    Point,
    find_sweep_spread,
    take_medians,
)
from realrl.runtime.profiler.request import Request
from realrl.runtime.profiler.shapes import ShapeMeasurements


class ResultsStore:
    """A profile that grows while entries are measured."""

    def __init__(self, profile: Profile, *, again: bool = False) -> None:
        """Start from `profile`; with `again`, its entries are measured again and replaced."""
        self._old = profile
        self.collectives: dict[Hashable, CollectiveTime] = {}
        self._layers: dict[tuple[ShapeKey, Dtype], dict[Hashable, Measurement]] = {}
        self._sweeps = None if again else profile.sweeps
        if not again:
            self.collectives |= {c.key: c for c in profile.collectives}
            self._layers |= {(p.shape, p.dtype): {m.key: m for m in p.measurements} for p in profile.layers}

    def layers(self, shape: ShapeKey, dtype: Dtype) -> dict[Hashable, Measurement]:
        """Return the measured times of a shape in a data type."""
        return self._layers.setdefault((shape, dtype), {})

    def add_spread(self, kind: Literal["layers", "transfers"], spread: float | None) -> None:
        """Record by how much the sweeps of one part differ (`find_sweep_spread`). The largest spread is kept."""
        if spread is not None:
            old = self._sweeps or SweepSpread()
            self._sweeps = old.model_copy(update={kind: max(getattr(old, kind), spread)})

    @property
    def profile(self) -> Profile:
        """The profile with all results."""
        parts = [
            LayerTimes(shape=shape, dtype=dtype, measurements=tuple(times.values()))
            for (shape, dtype), times in self._layers.items()
        ]
        merged = self._old.merged(parts, self.collectives.values())
        return merged.model_copy(update={"sweeps": self._sweeps})


THOROUGH = Pace(5, 0.1, (1, 8), limit=2.0, total=60.0)
QUICK = Pace(1, 0.05, (1, 5), limit=0.2, total=20.0)


class MeasurementObserver(Protocol):
    """Interface for listening to the progress of a measurement, on the rank that writes."""

    def note(self, text: str) -> None:
        """Called with a note for the user."""

    def begin(self, what: str, points: int) -> None:
        """Called when a part begins, with its number of points."""

    def done(self) -> None:
        """Called after each point, whether it was measured or skipped."""

    def end(self, file: str, seconds: float) -> None:
        """Called at the end, with the file of the profile."""


def profile(request: Request, observer: MeasurementObserver | None) -> None:
    """Measure as one of several ranks, or alone. `observer` is set on the rank that writes.

    Raises UserError if an earlier profile is unreadable, or if another device or other processes measured it.
    """
    with connect(request.device) as process:
        with process.together():
            results = _load_results(request, process, observer)
        _Profiler(request, process, results, observer).run()


class _Profiler:
    def __init__(
        self, request: Request, process: Process, results: ResultsStore, observer: MeasurementObserver | None
    ) -> None:
        self._request = request
        self._process = process
        self._results = results
        self._observer = observer
        self._pace = QUICK if request.sizes.thin else THOROUGH
        self._bench = Bench(process, patience=self._pace.patience, repetitions=self._pace.repetitions)

    def run(self) -> None:
        """Measure everything. The file is written after each part."""
        started = time.monotonic()
        request = self._request
        results = self._results
        clock = self._bench.clock
        per_node = count_local_processes()
        rows = list(machine.make_rows(self._process, per_node, clock, thin=request.sizes.thin))
        self._measure("links and memory", lambda: rows, results.collectives, "transfers")
        for shape, dtype in request.models:
            degrees = request.degrees(per_node, shape)
            part = ShapeMeasurements(
                shape=shape,
                dtype=dtype,
                sizes=request.sizes,
                sampling=request.sampling,
                degrees=degrees,
                clock=clock,
            )
            entries = results.layers(ShapeKey.of(shape), dtype)
            self._measure(f"hidden size {shape.hidden_size}, {dtype}", part.rows, entries, "layers")
        if self._observer is not None:
            self._observer.end(str(request.out), time.monotonic() - started)

    def _measure(
        self,
        what: str,
        rows: Callable[[], Iterable[Sequence[Point[Entry]]]],
        entries: dict[Hashable, Entry],
        kind: Literal["layers", "transfers"],
    ) -> None:
        """Measure the missing entries of one part of the profile.

        `rows` creates new points for each sweep, because points keep the models that they measure in memory.
        """
        observer = self._observer
        sweeps = self._pace.sweeps
        if observer is not None:
            observer.begin(what, sweeps * sum(map(len, rows())))
        found = []
        for _ in range(sweeps):
            measurer = Measurer(dict(entries), self._bench, self._pace, self._done)
            for row in rows():
                measurer.measure(row)
            found.append(measurer.entries)
        self._results.add_spread(kind, find_sweep_spread(found, frozenset(entries)))
        entries |= take_medians(found)
        if observer is not None:
            self._results.profile.save(self._request.out)
            left_out = sum(not point.known(entries) for row in rows() for point in row)
            if left_out:
                observer.note(
                    f"{what}: left out {left_out} points that take long, or more memory than there is"
                )

    def _done(self) -> None:
        if self._observer is not None:
            self._observer.done()


def count_local_processes() -> int:
    """Count the processes on this node. Raises UserError if other nodes have a different number."""
    place = find_node_place()
    if not place.even:
        raise UserError(
            "nodes were started with different numbers of processes; a profile needs equal numbers"
        )
    return len(place.ranks)


def _load_results(request: Request, process: Process, observer: MeasurementObserver | None) -> ResultsStore:
    """Load the results of an earlier measurement, or begin with an empty profile."""
    software = read_versions()
    fresh = Profile(
        device=_device_name(request, process.device),
        processes=count_local_processes(),
        threads=torch.get_num_threads() if process.device.type == "cpu" else None,
        software=software,
    )
    if not request.out.exists():
        return ResultsStore(fresh)
    old = Profile.load(request.out)
    if old.device != fresh.device:
        raise UserError(
            f"{request.out} is for device {old.device}, but this is {fresh.device}; give another file with --out"
        )
    measured_by, here = _processes(old), _processes(fresh)
    if process.device.type == "cpu" and measured_by != here:
        if request.again:
            return ResultsStore(fresh)
        raise UserError(
            f"{request.out} was measured by {measured_by}, and here there are {here}, whose times differ; give"
            " another file with --out, or --again to replace this one"
        )
    if old.software != fresh.software:
        if observer is not None:
            changed = ", ".join(n for n, v in software.items() if old.software.get(n) != v)
            observer.note(
                f"{request.out} was measured with another {changed}, so everything is measured again"
            )
        return ResultsStore(fresh)
    if request.again:
        # Drop corrections, which belong to the old measurements.
        old = old.model_copy(update={"corrections": ()})
    return ResultsStore(old, again=request.again)


def _processes(profile: Profile) -> str:
    """Describe the processes that measured on a node."""
    number, threads = profile.processes, profile.threads
    each = "" if threads is None else f" with {threads} thread{'s' * (threads > 1)} each"
    return f"{number} process{'es' * (number > 1)}{each}"


def _device_name(request: Request, device: torch.device) -> str:
    """Return the name of the device: the name that the user has requested, or that of its built-in kind.

    For other devices, this is the name from the driver, in the same style.
    """
    if request.group is not None:
        return request.group.device.name
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    kind = find_gpu_kind(name)
    plain = name.lower().removeprefix("nvidia ").removeprefix("geforce ")
    return kind.name if kind is not None else re.sub(r"[^a-z0-9.]+", "-", plain).strip("-")
