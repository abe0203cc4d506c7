"""From models, a cluster and a workload to a problem: enumerate candidates and cost them."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Kind
from realrl.layout.tensors import model_tensors
from realrl.plan.placement import Mesh, Placement
from realrl.plan.plan import Plan
from realrl.planner.candidates import meshes, micro_batches, strategies
from realrl.planner.problem import Option, Problem
from realrl.planner.scenario import Scenario
from realrl.planner.transfers import LinkTransfers

_WORTH_OFFLOADING = 0.05
"""Part of a device's memory; what is less stays there."""


@dataclass(frozen=True)
class Choices:
    """What a search may vary, besides meshes and degrees."""

    micro_batch_tokens: tuple[int, ...] | None = None
    """None for what `candidates.micro_batches` finds sensible for each call."""
    recompute: tuple[bool, ...] = (False, True)
    offload: bool = True
    per_size: int = 8
    """Of each call and size of mesh, so many of the fastest strategies are candidates, and as many of those that
    take less memory than all faster ones."""


def build_problem(
    scenario: Scenario, *, choices: Choices | None = None, include: Iterable[Plan] = ()
) -> Problem:
    """The problem of planning a step.

    What the plans of `include` choose is among the options, even if it does not fit.
    """
    graph, spec, models = scenario.graph, scenario.spec, scenario.models
    builder = _Builder(scenario, choices or Choices())
    plans = tuple(include)
    options = {call.name: builder.options(call, plans) for call in graph.calls}
    role_bytes = {
        role: models[role].element_bytes
        * sum(math.prod(t.shape) for t in model_tensors(models[role].shape, models[role].head))
        for role in graph.roles
    }
    first_ranks = [n * spec.cluster.devices_per_node for n in range(spec.cluster.nodes)]
    return Problem(
        graph,
        spec.cluster,
        options,
        LinkTransfers(spec.cluster, role_bytes, scenario.cost.links),
        tuple(float(scenario.memory.capacity(rank)) for rank in first_ranks),
    )


@dataclass(frozen=True)
class _Builder:
    scenario: Scenario
    choices: Choices

    def options(self, call: Call, plans: Iterable[Plan]) -> tuple[Option, ...]:
        """Candidates of a call, and what plans choose for it.

        What they cost depends on the size and the devices of a mesh, so it is asked for once per such kind.
        """
        kinds: dict[tuple[int, int], list[Mesh]] = defaultdict(list)
        spec = self.scenario.spec
        for mesh in meshes(spec):
            kinds[mesh.size, spec.group_index(mesh.first)].append(mesh)
        found = []
        for alike in kinds.values():
            for option in self._of_size(call, alike[0]):
                strategy = option.placement.strategy
                found += [replace(option, placement=Placement(mesh, strategy)) for mesh in alike]
        for plan in plans:
            found += self._variants(call, self._option(call, plan[call.name]), 0.0)
        return tuple(dict.fromkeys(found))

    def _of_size(self, call: Call, mesh: Mesh) -> list[Option]:
        spec, shape = self.scenario.spec, self.scenario.models[call.role].shape
        per_node = spec.groups[spec.group_index(mesh.first)].devices_per_node
        limit = self.scenario.memory.capacity(mesh.first)
        recompute = self.choices.recompute if call.kind is Kind.TRAIN else (False,)
        work = self.scenario.workload.work(call)
        tokens = self.choices.micro_batch_tokens or micro_batches(call.kind, work)
        found = []
        for strategy in strategies(mesh.size, per_node, shape.layers, shape.heads, tokens, recompute):
            try:
                option = self._option(call, Placement(mesh, strategy))
            except UserError:  # fewer sequences than data-parallel ranks
                continue
            found += self._variants(call, option, limit)
        fitting = [option for option in found if option.bytes_alone(is_home=True) <= limit]
        # Where nothing fits, what comes nearest says by how much.
        nearest = sorted(found, key=lambda option: option.bytes_alone(is_home=True))[:1]
        return _worthwhile(fitting, self.choices.per_size) if fitting else nearest

    def _option(self, call: Call, placement: Placement) -> Option:
        scenario = self.scenario
        arguments = (call, scenario.models[call.role], placement, scenario.workload)
        need = scenario.memory.call(*arguments)
        return Option(
            placement,
            scenario.cost.call(*arguments).seconds,
            weights_bytes=need.static["parameters"],
            resident_bytes=need.static_bytes,
            working_bytes=need.dynamic_bytes,
        )

    def _variants(self, call: Call, option: Option, limit: float) -> list[Option]:
        """The option, and what offloading makes of it."""
        graph, cost = self.scenario.graph, self.scenario.cost
        home = max(graph.role_calls(call.role), key=lambda c: c.kind is Kind.TRAIN)
        found = [option]
        if home != call or not self.choices.offload:
            return found
        rank = option.placement.mesh.first
        state = option.resident_bytes - option.weights_bytes
        if state > _WORTH_OFFLOADING * limit:
            found.append(
                replace(
                    option,
                    seconds=option.seconds + 2 * cost.offload(state, rank),
                    resident_bytes=option.weights_bytes,
                    working_bytes=option.working_bytes + state,
                    offload_optimizer=True,
                )
            )
        if option.weights_bytes > _WORTH_OFFLOADING * limit:
            load = 2 * cost.offload(option.weights_bytes, rank)
            found += [
                replace(o, resident_bytes=o.resident_bytes - o.weights_bytes, offload=True, load_seconds=load)
                for o in tuple(found)
            ]
        return found


def _worthwhile(options: list[Option], most: int) -> list[Option]:
    """The `most` fastest of them, and of the others as many that keep, or need, less memory than all faster ones:
    the leanest, and those at equal distances in between."""
    ordered = sorted(options, key=lambda o: o.seconds + o.load_seconds)
    lean: list[Option] = []
    least_kept = least_needed = math.inf
    for i, option in enumerate(ordered):
        needed = option.resident_bytes + option.working_bytes
        if i >= most and (option.resident_bytes < least_kept or needed < least_needed):
            lean.append(option)
        least_kept, least_needed = min(least_kept, option.resident_bytes), min(least_needed, needed)
    steps = min(most, len(lean))
    return ordered[:most] + [lean[len(lean) - 1 - i * len(lean) // steps] for i in range(steps)]
