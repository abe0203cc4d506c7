"""Ways to run a call on meshes of some sites, wherever these lie, and their costs, as columns."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from realrl.dataflow.call import Call, Kind
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.candidate import Candidate
from realrl.planner.workload.strategies import group_strategies
from realrl.program.arrays import Bools, Floats, Ints
from realrl.program.memory import StoredModel
from realrl.program.order import changed_sets

_WORTH_OFFLOADING = 0.05
"""Fraction of device memory below which offloading is not considered."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Ways to run a call with their costs, one entry each; see `Candidate`."""

    strategies: Sequence[Strategy]
    strategy: Ints
    """Index of the strategy of each way."""
    seconds: Floats
    weights_bytes: Floats
    resident_bytes: Floats
    working_bytes: Floats
    base_bytes: Floats
    communicator_bytes: Floats
    host_bytes: Floats
    load_seconds: Floats
    unload_seconds: Floats
    capture_seconds: Floats
    offload: Bools
    offload_optimizer: Bools
    keep: Bools

    def __len__(self) -> int:
        return len(self.strategy)

    def __getitem__(self, index: "Ints | Bools") -> "Ways":
        return replace(self, **{name: getattr(self, name)[index] for name in _COLUMNS})

    @property
    def bytes_alone(self) -> Floats:
        """Bytes that a device needs at least while the call runs in the role's primary placement."""
        held = self.resident_bytes + self.communicator_bytes + self.working_bytes
        return held + self.weights_bytes * self.offload

    @property
    def moving_seconds(self) -> tuple[Floats, Floats]:
        """Seconds to load offloaded parameters, and to offload them again."""
        return self.load_seconds, self.unload_seconds

    def candidates(self, meshes: Sequence[Mesh]) -> list[Candidate]:
        """Make the candidates on each of some meshes, all of one site."""
        costs = {name: getattr(self, name).tolist() for name in _COSTS}
        rows = [dict(zip(costs, row, strict=True)) for row in zip(*costs.values(), strict=True)]
        strategies = [self.strategies[i] for i in self.strategy.tolist()]
        return [
            Candidate(placement=Placement(mesh, strategy), **row)
            for strategy, row in zip(strategies, rows, strict=True)
            for mesh in meshes
        ]


_COLUMNS = tuple(field.name for field in fields(Ways) if field.name != "strategies")
_COSTS = tuple(name for name in _COLUMNS if name != "strategy")


def drop_dominated(ways: Ways) -> Ways:
    """Drop ways of one size that are no better in any cost than another one of the same layout.

    A plan that uses the other one is valid, too, and no slower (`search.prune`).
    """
    strategies = [ways.strategies[i] for i in ways.strategy.tolist()]
    layouts: dict[tuple[object, ...], list[int]] = {}
    for i, (s, keep) in enumerate(zip(strategies, ways.keep.tolist(), strict=True)):
        key = s.degrees, s.sequence_parallel, s.dtype, s.shards_parameters, keep
        layouts.setdefault(key, []).append(i)
    loaded = [np.where(ways.offload, column, 0.0) for column in (ways.weights_bytes, *ways.moving_seconds)]
    held = [ways.resident_bytes, ways.working_bytes, ways.weights_bytes, -ways.base_bytes, ways.host_bytes]
    costs = np.stack([ways.seconds, ways.capture_seconds, *held, *loaded], axis=1)
    stay = [np.array(members)[find_undominated(costs[members])] for members in layouts.values()]
    return ways[np.sort(np.concatenate(stay))]


def find_undominated(costs: Floats) -> Ints:
    """Find the rows of costs that no other row is at least as good as, [rows]; of equal ones the first."""
    better = (costs[:, None] <= costs[None]).all(axis=2)
    equal = better & better.T
    beaten = (better & ~equal) | (equal & np.tri(len(costs), k=-1, dtype=bool).T)
    return np.flatnonzero(~beaten.any(axis=0))


def join_ways(parts: Sequence[Ways]) -> Ways:
    """Join ways of the same strategies."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return Ways(strategies=parts[0].strategies, **columns)


def list_ways(scenario: Scenario, call: Call, placements: Sequence[Placement], *, shares: bool) -> Ways:
    """List the ways to run a call under each placement, which offload and keep nothing, all on one kind of device.

    `shares`: whether other roles have the same frozen weights. UserError if some strategy has more data-parallel
    ranks than there are records.
    """
    model = scenario.models[call.model_role]
    strategies = [placement.strategy for placement in placements]
    first = placements[0].mesh.first
    n = len(strategies)
    weights, resident, whole, base = (np.zeros(n) for _ in range(4))
    for members, alike in group_strategies(strategies):
        needs = scenario.memory.needs(call, model, first, alike, scenario.workload)
        there = np.arange(int(alike.pp.max()))[:, None] < alike.pp
        static = sum(needs.static.values())
        weights[members] = needs.static["parameters"].max(axis=0)
        resident[members] = np.max(static, axis=0)
        # Resident and total bytes may peak on different stages.
        whole[members] = np.where(there, static + sum(needs.dynamic.values()), 0).max(axis=0)
        if shares:
            base[members] = scenario.memory.least_base_bytes(model, alike)
    terms = scenario.cost.terms(call, model, placements, scenario.workload)
    captures = np.zeros(n)
    if scenario.keeps_graphs:
        captures = scenario.cost.captures(call, model, placements, scenario.workload)
    return Ways(
        strategies=strategies,
        strategy=np.arange(n),
        seconds=np.asarray(sum(terms.values()) - captures, dtype=np.float64),
        weights_bytes=weights,
        resident_bytes=resident,
        working_bytes=whole - resident,
        base_bytes=base,
        communicator_bytes=np.array([float(scenario.memory.communicators([p])) for p in placements]),
        host_bytes=np.zeros(n),
        load_seconds=np.zeros(n),
        unload_seconds=np.zeros(n),
        capture_seconds=captures,
        offload=np.zeros(n, dtype=bool),
        offload_optimizer=np.zeros(n, dtype=bool),
        keep=np.zeros(n, dtype=bool),
    )


def add_keeping(ways: Ways) -> Ways:
    """Add the variants of ways that keep copies of a role's parameters in other layouts."""
    return join_ways([ways, replace(ways, keep=np.ones(len(ways), dtype=bool))])


def add_offloading(scenario: Scenario, call: Call, first: int, ways: Ways, limit: float) -> Ways:
    """Add the variants of ways that offload what is a considerable part of `limit` bytes of device memory.

    The call is the home of its role.
    """
    model = scenario.models[call.model_role]
    parts = [ways]
    if call.kind is Kind.TRAIN:
        parts.append(_offload_optimizer(scenario, model, first, ways, limit))
    every = join_ways(parts)
    return join_ways([every, _offload_parameters(scenario, call, model, first, every, limit)])


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
    for members, alike in group_strategies([some.strategies[i] for i in some.strategy.tolist()]):
        for name, size in scenario.memory.largest_sets(model, alike).items():
            sizes.setdefault(name, np.zeros(len(some)))[members] = size
    copies = {name: np.asarray(scenario.cost.offload(size, first)) for name, size in sizes.items()}
    nothing = np.zeros(len(some))
    return replace(
        some,
        # Parameters and state may be largest on different stages, where a model is trained in part.
        resident_bytes=np.where(some.offload_optimizer, 0.0, state),
        base_bytes=nothing,
        host_bytes=some.host_bytes + sum(sizes.values(), nothing),
        offload=np.ones(len(some), dtype=bool),
        load_seconds=sum(copies.values(), nothing),
        unload_seconds=sum((s for name, s in copies.items() if name in changing), nothing),
    )


def _states(scenario: Scenario, model: StoredModel, ways: Ways) -> tuple[Floats, Floats]:
    """Bytes that optimizer offloading frees on the peak device, and those that it keeps on the host."""
    state, kept = np.zeros(len(ways)), np.zeros(len(ways))
    for members, alike in group_strategies([ways.strategies[i] for i in ways.strategy.tolist()]):
        state[members], kept[members] = scenario.memory.states(model, alike)
    return state, kept
