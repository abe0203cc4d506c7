"""Measures what a request asks for and is not known yet, and writes the profile."""

import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

import torch

from realrl.config.errors import UserError
from realrl.planner.cluster.devices import find_gpu_kind
from realrl.planner.profile.profile import Profile, ShapeKey
from realrl.planner.profile.versions import read_versions
from realrl.runtime.processes.process import Process, connect
from realrl.runtime.profiler.hardware import machine
from realrl.runtime.profiler.models.shapes import ShapeMeasurements
from realrl.runtime.profiler.points.bench import Bench
from realrl.runtime.profiler.points.notebook import Notebook
from realrl.runtime.profiler.points.point import Entry, Measurer, Pace, Point, medians
from realrl.runtime.profiler.request import Request

THOROUGH = Pace(5, 0.1, (1, 8), limit=2.0, total=60.0)
QUICK = Pace(1, 0.05, (1, 5), limit=0.2, total=20.0)


class Observer(Protocol):
    """Who is told how it goes, on the rank that writes."""

    def note(self, text: str) -> None:
        """Something worth knowing."""

    def begin(self, what: str, points: int) -> None:
        """So many points follow."""

    def done(self) -> None:
        """One of them has been measured, or need not be."""

    def end(self, file: str, seconds: float) -> None:
        """All of them; the profile is in a file."""


def profile(request: Request, observer: Observer | None) -> None:
    """Measure as one of the ranks that the launcher has started, or alone; `observer` on the rank that writes.

    UserError where the file of an earlier profile is of another device or cannot be read.
    """
    with connect(request.device) as process:
        with process.together():
            notebook = _notebook(request, process, observer)
        _Profiler(request, process, notebook, observer).run()


class _Profiler:
    def __init__(
        self, request: Request, process: Process, notebook: Notebook, observer: Observer | None
    ) -> None:
        self._request, self._process, self._notebook = request, process, notebook
        self._observer = observer
        self._pace = QUICK if request.sizes.thin else THOROUGH
        self._bench = Bench(process, patience=self._pace.patience, repetitions=self._pace.repetitions)

    def run(self) -> None:
        """All of it; the file is written after each part."""
        started = time.monotonic()
        request, notebook, clock = self._request, self._notebook, self._bench.clock
        per_node = local_processes(self._process.world)
        rows = list(machine.rows(self._process, per_node, clock, thin=request.sizes.thin))
        self._measure("links and memory", lambda: rows, notebook.collectives)
        for shape, dtype in request.models:
            degrees = request.degrees(per_node, shape)
            part = ShapeMeasurements(shape, dtype, request.sizes, request.sampling, degrees, clock)
            entries = notebook.layers(ShapeKey.of(shape), dtype)
            self._measure(f"hidden size {shape.hidden_size}, {dtype}", part.rows, entries)
        if self._observer is not None:
            self._observer.end(str(request.out), time.monotonic() - started)

    def _measure(
        self,
        what: str,
        rows: Callable[[], Iterable[Sequence[Point[Entry]]]],
        entries: dict[Hashable, Entry],
    ) -> None:
        """Add what is missing to `entries`; `rows` makes the points, which keep the models that they measure, anew
        for each sweep."""
        observer, sweeps = self._observer, self._pace.sweeps
        if observer is not None:
            observer.begin(what, sweeps * sum(map(len, rows())))
        found = []
        for _ in range(sweeps):
            measurer = Measurer(dict(entries), self._bench, self._pace, self._done)
            for row in rows():
                measurer.measure(row)
            found.append(measurer.entries)
        entries |= medians(found)
        if observer is not None:
            self._notebook.profile.save(self._request.out)
            left_out = sum(not point.known(entries) for row in rows() for point in row)
            if left_out:
                observer.note(
                    f"{what}: left out {left_out} points that take long, or more memory than there is"
                )

    def _done(self) -> None:
        if self._observer is not None:
            self._observer.done()


def local_processes(world: int) -> int:
    """Of all, those on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _notebook(request: Request, process: Process, observer: Observer | None) -> Notebook:
    """What is known already."""
    software = read_versions()
    fresh = Profile(
        device=_device_name(request, process.device),
        processes=local_processes(process.world),
        software=software,
    )
    if not request.out.exists():
        return Notebook(fresh)
    old = Profile.load(request.out)
    if old.device != fresh.device:
        raise UserError(
            f"{request.out} is of device {old.device}, and this one is {fresh.device}; give another file with --out"
        )
    cpu = process.device.type == "cpu"
    if cpu and old.processes != fresh.processes and not request.again:
        raise UserError(
            f"{request.out} was measured by {_processes(old.processes)}, and what each of"
            f" {_processes(fresh.processes)} reaches is another thing; give another file with --out, or --again to"
            " replace this one"
        )
    if cpu and old.processes != fresh.processes:
        return Notebook(fresh)
    if old.software != fresh.software:
        if observer is not None:
            changed = ", ".join(n for n, v in software.items() if old.software.get(n) != v)
            observer.note(
                f"{request.out} was measured with another {changed}, so all of it is measured again"
            )
        return Notebook(fresh)
    if request.again:
        # They correct what is measured anew.
        old = old.model_copy(update={"corrections": ()})
    return Notebook(old, again=request.again)


def _processes(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def _device_name(request: Request, device: torch.device) -> str:
    """What was named; else the built-in kind of a device, or what its driver calls it in the same style."""
    if request.group is not None:
        return request.group.device.name
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    kind = find_gpu_kind(name)
    plain = name.lower().removeprefix("nvidia ").removeprefix("geforce ")
    return kind.name if kind is not None else re.sub(r"[^a-z0-9.]+", "-", plain).strip("-")
