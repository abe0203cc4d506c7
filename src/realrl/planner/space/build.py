"""Construction of search problems: enumerate and cost the candidates of every call."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Kind
from realrl.plan.placement import Mesh, Placement, function_placement
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import Site
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.candidates import list_meshes, list_micro_batches, list_strategies
from realrl.planner.space.problem import Candidate, Problem
from realrl.program.memory import list_sharers
from realrl.program.order import changed_sets

_WORTH_OFFLOADING = 0.05
"""Fraction of device memory below which offloading is not considered."""


@dataclass(frozen=True)
class SearchSpace:
    """Dimensions that a search may vary besides meshes and parallel degrees."""

    micro_batch_tokens: tuple[int, ...] | None = None
    """Micro-batch sizes in tokens; None for those of `list_micro_batches`."""
    recompute: tuple[bool, ...] = (False, True)
    offload: bool = True
    per_size: int = 8
    """Number of candidates per call and mesh size: this many of the fastest strategies, and as many of those that
    take less memory than all faster ones."""


def build_problem(
    scenario: Scenario, *, search_space: SearchSpace | None = None, include: Iterable[Plan] = ()
) -> Problem:
    """Build the search problem of a step.

    The placements of plans in `include` are among the candidates even if they do not fit, unless a call has its own
    parameter type.
    """
    graph = scenario.graph
    spec = scenario.spec
    builder = _Builder(scenario, search_space or SearchSpace())
    plans = tuple(include)
    candidates = {call.name: builder.candidates(call, plans) for call in graph.calls}
    return Problem(
        graph=graph,
        cluster=spec.cluster,
        candidates=candidates,
        transfers=scenario.cost.transfers(graph, scenario.models),
        memory_bytes=tuple(float(scenario.memory.capacity(rank)) for rank in spec.cluster.bounds[:-1]),
        exchange=scenario.cost.exchange(graph, scenario.workload),
        sharers=tuple(builder.sharers),
        host_memory_bytes=tuple(map(scenario.memory.host_capacity, range(spec.cluster.nodes))),
    )


@dataclass(frozen=True)
class _Builder:
    scenario: Scenario
    search_space: SearchSpace

    @cached_property
    def sharers(self) -> list[tuple[str, ...]]:
        """Roles of the graph that have the same frozen weights."""
        models = {role: self.scenario.models[role] for role in self.scenario.graph.roles}
        return [roles for roles in list_sharers(models) if len(roles) > 1]

    def candidates(self, call: Call, plans: Iterable[Plan]) -> tuple[Candidate, ...]:
        """Cost every candidate of a call, those of the given plans included."""
        if call.is_function:
            return self._function_candidates(call, plans)
        work = self.scenario.workload.work(call)
        given = self.search_space.micro_batch_tokens
        candidates = self._candidates_on_meshes(
            call, list_micro_batches(call.kind, work) if given is None else given
        )
        if given is None and not any(map(self._fits, candidates)):
            # The smallest micro-batches are slow, but may be the only ones that fit.
            candidates += self._candidates_on_meshes(call, (work.longest,))
        for placement in (plan[call.name] for plan in plans):
            if placement.strategy.dtype is None:  # layouts of a problem have no parameter type
                sized = self._size_candidate(call, placement)
                candidates += self._variants(call, self._time_candidate(call, sized), 0.0)
        return tuple(dict.fromkeys(candidates))

    def _function_candidates(self, call: Call, plans: Iterable[Plan]) -> tuple[Candidate, ...]:
        """Every mesh with a record for each of its ranks, and what plans choose; of a function that no run has
        measured, and which may be slow, only the meshes with most ranks."""
        placements = [function_placement(mesh) for mesh in list_meshes(self.scenario.spec)]
        if self.search_space.micro_batch_tokens == ():  # only what plans choose
            placements = []
        found = [*self._on_hosts(call, placements)]
        widest = max((candidate.placement.mesh.size for candidate, _ in found), default=0)
        if all(measured for _, measured in found):
            found += self._on_hosts(call, [plan[call.name] for plan in plans])
        else:
            found = [pair for pair in found if pair[0].placement.mesh.size == widest]
        return tuple(dict.fromkeys(candidate for candidate, _ in found))

    def _on_hosts(self, call: Call, placements: Iterable[Placement]) -> Iterator[tuple[Candidate, bool]]:
        """Candidates of a function, which holds no device memory, and whether a run has measured it."""
        for placement in placements:
            try:
                cost = self.scenario.call_cost(call, placement)
            except UserError:  # fewer records than data-parallel ranks
                continue
            candidate = Candidate(
                placement=placement,
                seconds=cost.seconds,
                weights_bytes=0.0,
                resident_bytes=0.0,
                working_bytes=0.0,
            )
            yield candidate, bool(cost.terms)

    def _candidates_on_meshes(self, call: Call, tokens: tuple[int, ...]) -> list[Candidate]:
        """Cost candidates once per site, and replicate them over all meshes that have it."""
        kinds: dict[Site, list[Mesh]] = defaultdict(list)
        spec = self.scenario.spec
        for mesh in list_meshes(spec):
            kinds[spec.site(mesh)].append(mesh)
        candidates = []
        for alike in kinds.values():
            for candidate in self._candidates_of_size(call, alike[0], tokens):
                strategy = candidate.placement.strategy
                candidates += [replace(candidate, placement=Placement(mesh, strategy)) for mesh in alike]
        return candidates

    def _candidates_of_size(self, call: Call, mesh: Mesh, tokens: tuple[int, ...]) -> list[Candidate]:
        spec = self.scenario.spec
        model = self.scenario.models[call.model_role]
        shape = model.shape
        node = spec.cluster.ranks(spec.cluster.node(mesh.first))
        divided = math.gcd(len(node), *(devices for _, devices in spec.site(mesh).nodes.runs))
        limit = self.scenario.memory.capacity(mesh.first)
        recompute = self.search_space.recompute if call.kind is Kind.TRAIN else (False,)
        untimed = []
        for strategy in list_strategies(mesh.size, divided, shape.layers, shape.heads, tokens, recompute):
            if model.exact and strategy.tp > 1:
                continue
            with suppress(UserError):  # fewer records than data-parallel ranks
                untimed.append(self._size_candidate(call, Placement(mesh, strategy)))
        fitting = list(filter(self._fits, untimed))
        if not fitting:
            # The candidate with the smallest shortage serves the error message.
            nearest = sorted(untimed, key=lambda candidate: candidate.bytes_alone(is_home=True))[:1]
            return [self._time_candidate(call, candidate) for candidate in nearest]
        candidates = []
        for candidate in fitting:
            candidates += self._variants(call, self._time_candidate(call, candidate), limit)
        return _worthwhile(list(filter(self._fits, candidates)), self.search_space.per_size)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether the candidate alone fits into its devices."""
        limit = self.scenario.memory.capacity(candidate.placement.mesh.first)
        return candidate.bytes_alone(is_home=True) <= limit

    def _size_candidate(self, call: Call, placement: Placement) -> Candidate:
        """A candidate's memory; its time is 0."""
        scenario = self.scenario
        needs = scenario.memory.stages(call, scenario.models[call.model_role], placement, scenario.workload)
        resident = max(need.static_bytes for need in needs)
        shares = any(call.model_role in roles for roles in self.sharers)
        model = scenario.models[call.model_role]
        return Candidate(
            placement=placement,
            seconds=0.0,
            weights_bytes=max(need.static["parameters"] for need in needs),
            resident_bytes=resident,
            # Resident and total bytes may peak on different stages.
            working_bytes=max(need.bytes for need in needs) - resident,
            base_bytes=scenario.memory.base_bytes(model, placement) if shares else 0,
            communicator_bytes=scenario.memory.communicators([placement]),
        )

    def _time_candidate(self, call: Call, sized: Candidate) -> Candidate:
        return replace(sized, seconds=self.scenario.call_cost(call, sized.placement).seconds)

    def _variants(self, call: Call, candidate: Candidate, limit: float) -> list[Candidate]:
        """The candidate, and its variants with offloading."""
        graph = self.scenario.graph
        cost = self.scenario.cost
        memory = self.scenario.memory
        model = self.scenario.models[call.model_role]
        variants = [candidate]
        if graph.home(call.model_role) != call or not self.search_space.offload:
            return variants
        rank = candidate.placement.mesh.first
        # Parameters and state may be largest on different stages, where a model is trained in part.
        state = memory.state(model, candidate.placement) if call.kind is Kind.TRAIN else 0
        if state > _WORTH_OFFLOADING * limit:
            kept = memory.kept_state(model, candidate.placement)
            moved = cost.offload(kept, rank)
            variants.append(
                replace(
                    candidate,
                    seconds=candidate.seconds + 2 * moved,
                    resident_bytes=candidate.weights_bytes,
                    working_bytes=candidate.working_bytes
                    + candidate.resident_bytes
                    - candidate.weights_bytes,
                    host_bytes=kept,
                    offload_optimizer=True,
                )
            )
        if candidate.weights_bytes > _WORTH_OFFLOADING * limit:
            sizes = memory.set_bytes(model, candidate.placement)
            copies = {name: cost.offload(size, rank) for name, size in sizes.items()}
            changing = {
                name
                for other in graph.calls
                for name in changed_sets(graph, other, call.model_role, self.scenario.parts)
            }
            variants += [
                replace(
                    o,
                    resident_bytes=0 if o.offload_optimizer else state,
                    base_bytes=0,
                    host_bytes=o.host_bytes + sum(sizes.values()),
                    offload=True,
                    load_seconds=sum(copies.values()),
                    unload_seconds=sum(s for name, s in copies.items() if name in changing),
                )
                for o in tuple(variants)
            ]
        return variants


def _worthwhile(candidates: list[Candidate], most: int) -> list[Candidate]:
    """The `most` fastest candidates, and as many of those that keep, or need, less memory than all faster ones.

    Of the latter the leanest is taken, and others at equal distances.
    """
    ordered = sorted(candidates, key=lambda o: o.seconds + o.load_seconds + o.unload_seconds)
    lean: list[Candidate] = []
    least_kept = least_needed = math.inf
    for i, candidate in enumerate(ordered):
        needed = candidate.resident_bytes + candidate.working_bytes
        if i >= most and (candidate.resident_bytes < least_kept or needed < least_needed):
            lean.append(candidate)
        least_kept = min(least_kept, candidate.resident_bytes)
        least_needed = min(least_needed, needed)
    steps = min(most, len(lean))
    return ordered[:most] + [lean[len(lean) - 1 - i * len(lean) // steps] for i in range(steps)]
