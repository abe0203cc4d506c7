"""Will it fit? The sentence about a plan that does not, with the change that helps. No torch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from realrl.config.errors import UserError
from realrl.config.units import format_bytes
from realrl.plan.presets import PRESETS, SEARCH
from realrl.planner.cluster.spec import ClusterSpec
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.compile import Compiled, compile_recipe
from realrl.runtime.prepare.fit import Fullest, fullest
from realrl.runtime.prepare.fit_changes import Change, Draft, Group, changes, field, smaller_batches
from realrl.runtime.prepare.gpu import Here
from realrl.runtime.prepare.scenario import host_is_device, memory_spec, spec_of
from realrl.runtime.prepare.searched_plan import search_plan

_NAMED = 3
"""Parts of what a device holds that are named."""
_SECONDS = 5.0
"""For a search, to see whether any plan fits; and for single changes, and for several together, each of which takes
seconds where there are a thousand devices."""


def check_fit(experiment: Experiment, compiled: Compiled, here: Here | None = None) -> None:
    """UserError if a device has to hold more than it can: which, when, what of, and what to change.

    `here`: what the machine computes with, if that is known.
    """
    cluster = compiled.train.plan.cluster
    known = spec_of(experiment, cluster, here)
    spec = known or memory_spec(experiment, cluster, here)
    worst = fullest(experiment, compiled, spec)
    if worst.missing <= 0:
        return
    device, peak = worst.device, worst.device.peak
    biggest = sorted(peak.parts, key=lambda name: -peak.parts[name])
    parts = ", ".join(f"{name} {format_bytes(peak.parts[name])}" for name in biggest[:_NAMED])
    rest = f" and {len(biggest) - _NAMED} more" if len(biggest) > _NAMED else ""
    when = f"the evaluation's {peak.during}" if worst.phase == "eval" else peak.during
    own_plan = None if experiment.plan in PRESETS else compiled.train.plan
    searchable = known is not None and experiment.plan != SEARCH and not compiled.unknown
    remedies = _Remedies(Draft(experiment, own_plan), compiled, spec, worst, searchable)
    raise UserError(
        f"plan {experiment.plan}: device {device.rank} needs {format_bytes(peak.bytes)} of"
        f" {format_bytes(max(0, device.capacity))}{_source(experiment, spec)} during {when} ({parts}{rest});"
        f" {remedies.sentence()}"
    )


def _source(experiment: Experiment, spec: ClusterSpec) -> str:
    """How it is known what a device has, where that can be changed."""
    if not host_is_device(experiment, spec):
        return ""
    return f" (this machine's memory over {spec.cluster.devices_per_node} processes, as device_memory is not given)"


@dataclass(frozen=True)
class _Remedies:
    """Changes of a draft that does not fit, tried out one after the other."""

    draft: Draft
    compiled: Compiled
    spec: ClusterSpec
    worst: Fullest
    searchable: bool

    def sentence(self) -> str:
        """The change that costs least and makes everything fit; else several that do together, or what there is to
        say where nothing does."""
        return (
            self._single()
            or (self._searched() if self.searchable else "")
            or self._other_preset()
            or self._together()
            or f"spread {self.worst.device.peak.during} over more devices; `realrl plan` finds over how many"
        )

    def _changes(self, draft: Draft, worst: Fullest) -> Iterator[Group]:
        offload = not host_is_device(draft.experiment, self.spec)
        return changes(draft, self.compiled.phases[worst.phase].graph, worst.device.peak, offload=offload)

    def _single(self) -> str:
        """A change that is enough by itself."""
        deadline = time.monotonic() + _SECONDS
        for change in chain.from_iterable(self._changes(self.draft, self.worst)):
            after = self._after(change.apply, self.draft)
            if after is not None and after[1].missing <= 0:
                return _says([change], after[1])
            if time.monotonic() > deadline:
                break
        return ""

    def _after(self, apply: Callable[[Draft], Draft], draft: Draft) -> tuple[Draft, Fullest] | None:
        """A draft after a change, and its fullest device; None where the change is not possible."""
        try:
            changed = apply(draft)
            return changed, self._fullest(changed)
        except UserError:
            return None

    def _fullest(self, draft: Draft) -> Fullest:
        compiled = compile_recipe(draft.experiment, self.spec.cluster, draft.plan)
        return fullest(draft.experiment, compiled, self.spec)

    def _searched(self) -> str:
        """What a search finds, or why it finds nothing; empty where that does not fit either."""
        experiment = self.draft.experiment
        try:
            found = search_plan(experiment, self.spec, seconds=_SECONDS)
            after = self._fullest(Draft(experiment, found.plan))
        except UserError as error:
            return str(error)
        if after.missing > 0:
            return ""
        return f"plan=search finds one that needs {_needs(after)} ({found.step_seconds:.3g} s a step)"

    def _other_preset(self) -> str:
        for name in PRESETS:
            change = field(f"plan={name}")
            after = self._after(change.apply, Draft(self.draft.experiment, None))
            if after is not None and after[1].missing <= 0:
                return _says([change], after[1])
        return ""

    def _together(self) -> str:
        """Changes that help only together, one after the other."""
        chosen: list[Change] = []
        draft, worst, deadline = self.draft, self.worst, time.monotonic() + _SECONDS
        while worst.missing > 0:
            step = self._next(draft, worst)
            if step is None or time.monotonic() > deadline:
                return ""
            change, draft, worst = step
            chosen.append(change)
        return _says(chosen, worst)

    def _next(self, draft: Draft, worst: Fullest) -> tuple[Change, Draft, Fullest] | None:
        """The cheapest change that helps, so much of it that all fits, or as much as there is."""
        for group in chain(self._changes(draft, worst), [smaller_batches(draft.experiment)]):
            best = None
            for change in group:
                after = self._after(change.apply, draft)
                if after is not None and after[1].missing < (best[2] if best is not None else worst).missing:
                    best = (change, *after)
                    if best[2].missing <= 0:
                        break
            if best is not None:
                return best
        return None


def _says(chosen: Group, after: Fullest) -> str:
    return f"with {' and '.join(change.text for change in chosen)} it needs {_needs(after)}"


def _needs(after: Fullest) -> str:
    return format_bytes(after.device.peak.bytes)
