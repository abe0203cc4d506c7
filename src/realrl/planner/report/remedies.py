"""What would have to be different, where no plan fits: each change is tried by a short search."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.dataflow.call import Kind
from realrl.families.published import SHAPES
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.evaluate.shortage import DoesNotFit, Shortage
from realrl.planner.report.alternatives import shortage_text
from realrl.planner.report.sizes import on_cluster
from realrl.planner.search.plan_search import Wanted, find_plan
from realrl.planner.search.search import Effort
from realrl.planner.simulate.scenario import Scenario

_EFFORT = Effort(chains=128, rounds=100, nodes=2000)
_SEARCH_SECONDS = 2.0
_MOST_DEVICES = 1024
_PART = 0.6
"""Of the time that is left."""
_SHORTEST = 64
"""Tokens; fewer are not worth suggesting."""
_NAMED = 3
"""Changes that are named, if as many help."""


@dataclass(frozen=True)
class Remedy:
    """A change with which a plan fits."""

    text: str
    step_seconds: float

    def __str__(self) -> str:
        return f"{self.text} (step {self.step_seconds:.3g} s)"


def no_plan(
    scenario: Scenario, shortage: Shortage, wanted: Wanted | None = None, *, seconds: float = 15.0
) -> UserError:
    """What to tell the user where a search raised DoesNotFit; looks for changes for so many `seconds`."""
    found = [str(remedy) for remedy in remedies(scenario, wanted, seconds=seconds)]
    helps = f"it fits {', or '.join(found)}" if found else "no change that was tried would be enough"
    none = "no plan fits" if shortage.proven else "no plan was found that fits"
    even = ", even with recomputation and offloading" if (wanted or Wanted()).choices.offload else ""
    return UserError(
        f"{none} {_models(scenario)} on {scenario.spec.name}{even}: what comes nearest"
        f" {shortage_text(scenario, shortage)}, {shortage.factor:.3g} times what a device has; {helps}"
    )


def remedies(scenario: Scenario, wanted: Wanted | None = None, *, seconds: float = 15.0) -> list[Remedy]:
    """Changes with which a plan fits, by what they cost: other settings first, then other devices."""
    end = time.monotonic() + seconds
    found: list[Remedy] = []
    for attempt in (_narrower, _more_nodes, _larger_devices, _shorter, _fewer):
        if len(found) < _NAMED:
            # Each may take a part of what is left, so that something is left for the next.
            left = end - time.monotonic()
            trials = _Trials(wanted or Wanted(), time.monotonic() + _PART * left)
            remedy = attempt(scenario, trials)
            found += [remedy] if remedy is not None else []
    return found


@dataclass(frozen=True)
class _Trials:
    """Short searches until a deadline."""

    wanted: Wanted
    deadline: float

    def step_seconds(self, scenario: Scenario) -> float | None:
        """Seconds of a step under some plan that fits; None if none is found."""
        left = min(_SEARCH_SECONDS, self.deadline - time.monotonic())
        if left <= 0:
            return None
        try:
            # Without presets, at whose best a search of its own looks each time.
            found = find_plan(scenario, seconds=left, wanted=self.wanted, presets={}, effort=_EFFORT)
        except (DoesNotFit, UserError):
            return None
        return found.result.evaluation.seconds

    def first(self, candidates: Iterator[tuple[str, Scenario]]) -> Remedy | None:
        """The first that fits."""
        for text, scenario in candidates:
            seconds = self.step_seconds(scenario)
            if seconds is not None:
                return Remedy(text, seconds)
        return None


def _narrower(scenario: Scenario, trials: _Trials) -> Remedy | None:
    """Frozen roles in bfloat16, or all of them."""
    wide = [role for role, model in scenario.models.items() if model.element_bytes > 2]
    # A moving average needs all digits of float32.
    averages = {average.role for average in scenario.graph.averages}
    wide = [role for role in wide if role not in averages]
    frozen = [role for role in wide if not scenario.models[role].trained]

    def candidates() -> Iterator[tuple[str, Scenario]]:
        for roles in dict.fromkeys((tuple(frozen), tuple(wide))):
            if roles:
                models = {
                    role: replace(model, element_bytes=2) if role in roles else model
                    for role, model in scenario.models.items()
                }
                names = " ".join(f"models.{role}.dtype=bfloat16" for role in roles)
                yield f"with {names}", replace(scenario, models=models)

    return trials.first(candidates())


def _more_nodes(scenario: Scenario, trials: _Trials) -> Remedy | None:
    """The fewest nodes of the same kind: doubled until a plan fits, then bisected."""
    spec = scenario.spec
    if len(spec.groups) > 1:
        return None
    nodes, most = spec.nodes, _MOST_DEVICES // spec.groups[0].devices_per_node
    too_few, best = nodes, None
    while nodes < most and best is None:
        too_few, nodes = nodes, min(2 * nodes, most)
        best = _on(scenario, spec.with_nodes(nodes), trials)
    while best is not None and nodes - too_few > 1:
        middle = (too_few + nodes) // 2
        found = _on(scenario, spec.with_nodes(middle), trials)
        if found is None:
            too_few = middle
        else:
            nodes, best = middle, found
    return None if best is None else Remedy(f"on {nodes} nodes", best)


def _larger_devices(scenario: Scenario, trials: _Trials) -> Remedy | None:
    """The same number of devices of the built-in kind that has least memory of those that suffice, and of about
    equal ones the slowest."""
    groups = scenario.spec.groups
    present = max(group.device.memory_bytes for group in groups)
    kinds = sorted(DEVICES.values(), key=lambda kind: (kind.memory_bytes >> 33, kind.bf16_flops))
    larger = [kind for kind in kinds if not kind.cpu and kind.memory_bytes > 1.1 * present]
    if groups[0].device.cpu or len(groups) > 1:
        return None
    for kind in larger:
        group = replace(groups[0], device=kind, node_bytes_per_s=kind.node_bytes_per_s)
        found = _on(scenario, ClusterSpec(str(group), (group,)), trials)
        if found is not None:
            return Remedy(f"on {group}", found)
    return None


def _shorter(scenario: Scenario, trials: _Trials) -> Remedy | None:
    """Shorter prompts or answers, whichever are longer; shorter sequences where nothing is generated."""
    workload = scenario.workload
    generates = any(call.kind is Kind.GENERATE for call in scenario.graph.calls)
    by_answers = generates and workload.max_new_tokens >= max(workload.prompts)
    name = "generation.max_new_tokens" if by_answers else "data.max_prompt_tokens"
    name = name if generates else "data.max_tokens"

    def candidates() -> Iterator[tuple[str, Scenario]]:
        longest = workload.max_new_tokens if by_answers else max(workload.prompts)
        while longest > _SHORTEST:
            longest //= 2
            if by_answers:
                answers = tuple(min(n, longest) for n in workload.answers)
                shorter = replace(workload, answers=answers, max_new_tokens=longest)
            else:
                shorter = replace(workload, prompts=tuple(min(n, longest) for n in workload.prompts))
            yield f"with {name}={longest}", replace(scenario, workload=shorter)

    return trials.first(candidates())


def _fewer(scenario: Scenario, trials: _Trials) -> Remedy | None:
    """A smaller batch, which mini-batches still share out equally."""
    items, samples = scenario.workload.items, scenario.workload.samples
    minibatches = max(call.minibatches for call in scenario.graph.calls)

    def candidates() -> Iterator[tuple[str, Scenario]]:
        for part in (2, 4, 8):
            if items % (part * minibatches * samples) == 0:
                workload = replace(scenario.workload, items=items // part)
                yield f"with data.batch={items // part // samples}", replace(scenario, workload=workload)

    return trials.first(candidates())


def _on(scenario: Scenario, spec: ClusterSpec, trials: _Trials) -> float | None:
    return trials.step_seconds(on_cluster(scenario, spec))


def _models(scenario: Scenario) -> str:
    """Models by name where they have one, with their roles."""
    names = {shape: name for name, shape in SHAPES.items()}
    roles: dict[str, list[str]] = {}
    for role, model in scenario.models.items():
        roles.setdefault(names.get(model.shape, "models"), []).append(role)
    return " and ".join(f"{name} ({', '.join(of)})" for name, of in roles.items())
