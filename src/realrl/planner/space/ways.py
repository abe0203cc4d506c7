"""Ways to run a call, with their costs, as columns. A way is a candidate whose mesh has no position yet."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from realrl.dataflow.call import Call, Kind
from realrl.plan.placement import Mesh, Placement
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.candidate import COSTS, Candidate, Costs, find_undominated
from realrl.planner.workload.strategies import group_strategies
from realrl.program.arrays import Floats
from realrl.program.memory import StoredModel
from realrl.program.order import changed_sets

LEAST_SAVING = {Kind.INFERENCE: 0.1, Kind.TRAIN: 0.02}
"""A way with more virtual stages, or with a zero bubble, must save this fraction of a call's time. Inference is a
small part of a step."""
_WORTH_OFFLOADING = 0.05
"""State that takes less than this fraction of device memory is not offloaded."""


@dataclass(frozen=True, kw_only=True)
class Ways(Costs):
    """Ways to run a call with their costs, one entry per way."""

    strategies: NDArray[np.object_]
    """The `Strategy` of each way."""

    def __len__(self) -> int:
        return len(self.strategies)

    @classmethod
    def join(cls, *parts: "Ways") -> "Ways":
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def candidates(self, meshes: Sequence[Mesh]) -> list[Candidate]:
        """Make the candidates on each of several meshes, which all have the same site."""
        rows = zip(*(getattr(self, name).tolist() for name in COSTS), strict=True)
        return [
            Candidate(placement=Placement(mesh, strategy), **costs)
            for strategy, row in zip(self.strategies.tolist(), rows, strict=True)
            for costs in [dict(zip(COSTS, row, strict=True))]
            for mesh in meshes
        ]


def drop_dominated(ways: Ways) -> Ways:
    """Drop a way if another way of the same layout is at least as good in every cost.

    A plan with the better way is also valid, and at least as fast (`prune_candidates`). All ways must be for meshes
    of one size.
    """
    numbers: dict[tuple[object, ...], int] = {}
    layouts = [
        numbers.setdefault(
            (s.all_degrees, s.sequence_parallel, s.dtype, s.shards_parameters, keep), len(numbers)
        )
        for s, keep in zip(ways.strategies, ways.keep.tolist(), strict=True)
    ]
    moving = (ways.weights_bytes, ways.load_seconds, ways.unload_seconds)
    loaded = [np.where(ways.offload, column, 0.0) for column in moving]
    held = [ways.resident_bytes, ways.working_bytes, ways.weights_bytes, -ways.base_bytes, ways.host_bytes]
    return ways[find_undominated(np.array(layouts), [ways.seconds, ways.capture_seconds, *held, *loaded])]


def drop_slow_variants(kind: Kind, ways: Ways, needed: Floats) -> Ways:
    """Drop ways with several turns or a zero bubble that are hardly faster than some simpler way that needs no more
    memory: one with fewer turns, or with as many and no zero bubble. All ways must be for one mesh; `needed` has
    their bytes.

    This is a heuristic, because the way with fewer turns may have another layout. But more turns make no
    reallocation shorter, because calls that generate are not interleaved.
    """
    ranks = np.array([2 * strategy.vpp + strategy.zero_bubble for strategy in ways.strategies])
    kept = ranks == 2  # one turn, and no zero bubble
    for rank in np.unique(ranks[~kept]).tolist():
        simpler, same = ranks < rank, ranks == rank
        least = find_least(ways.seconds[simpler], needed[simpler], needed[same])
        kept[same] = ways.seconds[same] < (1 - LEAST_SAVING[kind]) * least
    return ways[kept]


def find_least(seconds: Floats, needed: Floats, limits: Floats | None = None) -> Floats:
    """Find the least seconds of all ways that need at most some bytes, for each of `limits`, or for the bytes
    that each way needs. They are infinite if no way needs so little."""
    order = np.argsort(needed, kind="stable")
    least = np.minimum.accumulate(np.append(np.inf, seconds[order]))
    return np.asarray(
        least[np.searchsorted(needed[order], needed if limits is None else limits, side="right")]
    )


def list_ways(scenario: Scenario, call: Call, placements: Sequence[Placement], *, shares: bool) -> Ways:
    """List the ways to run a call under each placement. They offload nothing and keep no copies.

    All placements are on one kind of device. `shares`: whether other roles have the same frozen weights. Raises
    UserError if some strategy has more data-parallel ranks than there are records.
    """
    model = scenario.models[call.model_role]
    strategies = [placement.strategy for placement in placements]
    first = placements[0].mesh.first
    n = len(strategies)
    weights, resident, whole, base = (np.zeros(n) for _ in range(4))
    for members, alike in group_strategies(strategies):
        held, used = scenario.memory.needs(call, model, first, alike, scenario.workload)
        there = np.arange(int(alike.pp.max()))[:, None] < alike.pp
        static = sum(held.values())
        weights[members] = held["parameters"].max(axis=0)
        resident[members] = np.max(static, axis=0)
        # Resident and total bytes may peak on different stages.
        whole[members] = np.where(there, static + sum(used.values()), 0).max(axis=0)
        if shares:
            base[members] = scenario.memory.least_base_bytes(model, alike)
    terms = scenario.cost.terms(call, model, placements, scenario.workload)
    captures = np.zeros(n)
    if scenario.keeps_graphs:
        captures = scenario.cost.captures(call, model, placements, scenario.workload)
    nothing, no = np.zeros(n), np.zeros(n, dtype=bool)
    return Ways(
        strategies=np.array(strategies, dtype=object),
        sequence_parallel=np.array([strategy.sequence_parallel for strategy in strategies]),
        seconds=np.asarray(sum(terms.values()) - captures, dtype=np.float64),
        weights_bytes=weights,
        resident_bytes=resident,
        working_bytes=whole - resident,
        base_bytes=base,
        communicator_bytes=np.array([float(scenario.memory.communicators([p])) for p in placements]),
        capture_seconds=captures,
        host_bytes=nothing,
        load_seconds=nothing,
        unload_seconds=nothing,
        offload=no,
        offload_optimizer=no,
        keep=no,
    )


def add_keeping(ways: Ways) -> Ways:
    """Add variants of all ways that keep copies of the role's parameters in other layouts."""
    return Ways.join(ways, replace(ways, keep=np.ones(len(ways), dtype=bool)))


def add_offloading(scenario: Scenario, call: Call, first: int, ways: Ways, limit: float) -> Ways:
    """Add variants of ways that offload optimizer state, parameters, or both.

    State is offloaded only if it takes a considerable part of `limit`, the usable bytes of a device. The call must
    be the home of its role.
    """
    model = scenario.models[call.model_role]
    if call.kind is Kind.TRAIN:
        ways = Ways.join(ways, _offload_optimizer(scenario, model, first, ways, limit))
    return Ways.join(ways, _offload_parameters(scenario, call, model, first, ways, limit))


def _offload_optimizer(scenario: Scenario, model: StoredModel, first: int, ways: Ways, limit: float) -> Ways:
    state, kept = _states(scenario, model, ways)
    worth = np.flatnonzero(state > _WORTH_OFFLOADING * limit)
    moved = np.asarray(scenario.cost.offload(kept[worth], first))
    some = ways[worth]
    return replace(
        some,
        seconds=some.seconds + 2 * moved,
        resident_bytes=some.weights_bytes,
        working_bytes=some.working_bytes + some.resident_bytes - some.weights_bytes,
        host_bytes=kept[worth],
        offload_optimizer=np.ones(len(worth), dtype=bool),
    )


def _offload_parameters(
    scenario: Scenario, call: Call, model: StoredModel, first: int, ways: Ways, limit: float
) -> Ways:
    some = ways[ways.weights_bytes > _WORTH_OFFLOADING * limit]
    graph = scenario.graph
    changing = {
        name for other in graph.calls for name in changed_sets(graph, other, call.model_role, scenario.parts)
    }
    state = _states(scenario, model, some)[0] if call.kind is Kind.TRAIN else np.zeros(len(some))
    sizes: dict[str, Floats] = {}
    for members, alike in group_strategies(some.strategies.tolist()):
        for name, size in scenario.memory.largest_sets(model, alike).items():
            sizes.setdefault(name, np.zeros(len(some)))[members] = size
    copies = {name: np.asarray(scenario.cost.offload(size, first)) for name, size in sizes.items()}
    nothing = np.zeros(len(some))
    return replace(
        some,
        # If only a part of a model is trained, parameters and training state may be largest on different stages.
        resident_bytes=np.where(some.offload_optimizer, 0.0, state),
        base_bytes=nothing,
        host_bytes=some.host_bytes + sum(sizes.values(), nothing),
        offload=np.ones(len(some), dtype=bool),
        load_seconds=sum(copies.values(), nothing),
        unload_seconds=sum((s for name, s in copies.items() if name in changing), nothing),
    )


def _states(scenario: Scenario, model: StoredModel, ways: Ways) -> tuple[Floats, Floats]:
    """Return the most bytes that optimizer offloading frees on any device, and the most host bytes that it needs
    per device."""
    state, kept = np.zeros(len(ways)), np.zeros(len(ways))
    for members, alike in group_strategies(ways.strategies.tolist()):
        state[members], kept[members] = scenario.memory.states(model, alike)
    return state, kept
