"""Construction of search problems, which enumerates the candidates of every call and computes their costs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import gcd

import numpy as np

from realrl.config.errors import UserError
from realrl.dataflow.asynchrony import overlap_all, overlap_sampling
from realrl.dataflow.call import Call, Kind
from realrl.families.shape import ModelShape
from realrl.layout.sets import QUANTISED
from realrl.plan.axes import Degrees, list_degrees
from realrl.plan.placement import (
    ELEMENT_BYTES,
    ZERO_STAGES,
    Dtype,
    Mesh,
    Placement,
    Strategy,
    divides_experts,
    function_placement,
)
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec, Site
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.memory.activations import kv_cache_bytes
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.candidate import Candidate, count_bytes_alone
from realrl.planner.space.problem import Problem
from realrl.planner.space.ways import (
    LEAST_SAVING,
    Ways,
    add_keeping,
    add_offloading,
    drop_dominated,
    drop_slow_variants,
    find_least,
    list_ways,
)
from realrl.planner.workload.batching import estimate_saving
from realrl.planner.workload.shard_sizes import size_shards
from realrl.planner.workload.workload import CallWork
from realrl.program.memory import StoredModel, list_sharers

_FEW_DEVICES = 16
"""Number of devices of the largest cluster for which every range of devices inside a node is a candidate mesh."""
_FEW_NODES = 16
"""Largest number of nodes for which every range of nodes is a candidate mesh."""
_SMALLEST_BATCH, _LARGEST_PASS = 4096, 16384
"""Tokens of the smallest micro-batch, and of the largest micro-batch outside generation."""
_SMALLEST_SHARE = 2048
"""Tokens that context-parallel ranks have at least of the longest sequence. Smaller shares do not keep a device
busy, and the activations of such sequences fit without context parallelism."""
_LARGEST_CONTEXT = 256
"""Largest CP degree of a candidate."""
_LARGE_ROW = 1 / 8
"""Share of a device's usable memory. If the KV cache of the longest row takes more, context-parallel ranks may
divide it."""
MANY_DEVICES = 2048
"""Number of devices of the largest cluster for which small meshes are candidates."""
_SMALLEST, _SMALLEST_OF_MANY = 128, 16
"""Meshes smaller than 1/128 of the cluster are left out. The limit is 1/16 if the cluster has more than
`MANY_DEVICES` devices."""


def list_meshes(spec: ClusterSpec) -> list[Mesh]:
    """Enumerate meshes: parts of one node, and ranges of whole nodes.

    On small clusters, parts of a node may begin and end anywhere. Otherwise their size divides the node's, and they
    begin at multiples of their size. On large clusters, the number of nodes of a range is 4 to 7 times a power of
    two (or 1, 2 or 3). The range begins or ends at a multiple of the smallest power of two that is not below this
    number.
    """
    meshes = [mesh for part in spec.uniform_parts for node in part for mesh in _list_inside(spec, node)]
    bounds = spec.cluster.bounds
    for part in spec.uniform_parts:
        for nodes in range(1, len(part) + 1):
            for begin in range(len(part) - nodes + 1):
                if len(part) <= _FEW_NODES or _tidy(begin, nodes, len(part)):
                    first = part.start + begin
                    meshes.append(Mesh(bounds[first], bounds[first + nodes] - bounds[first]))
    smallest = _SMALLEST if spec.size <= MANY_DEVICES else _SMALLEST_OF_MANY
    return [mesh for mesh in meshes if mesh.size * smallest >= spec.size]


def _list_inside(spec: ClusterSpec, node: int) -> Iterator[Mesh]:
    """Enumerate meshes that are smaller than a node."""
    ranks = spec.cluster.ranks(node)
    anywhere = spec.size <= _FEW_DEVICES
    for size in range(1, len(ranks)):
        if anywhere or len(ranks) % size == 0:
            for first in ranks[: len(ranks) - size + 1 : 1 if anywhere else size]:
                yield Mesh(first, size)


def list_strategies(
    size: int,
    divided: int,
    layers: int,
    heads: int,
    micro_batch_tokens: tuple[int, ...],
    recompute: tuple[bool, ...] = (False,),
    zero: tuple[int, ...] = (1,),
    dtypes: tuple[Dtype | None, ...] = (None,),
    contexts: tuple[int, ...] = (1,),
    experts: tuple[int, ...] = (1,),
) -> Iterator[Strategy]:
    """Enumerate strategies on `size` devices. The TP degree divides `divided`, the number of devices of each
    node. `contexts` are CP degrees, and `experts` EP degrees."""
    allowed = {
        "cp": contexts,
        "tp": [tp for tp in range(1, min(divided, heads) + 1) if divided % tp == 0],
        "pp": range(1, layers + 1),
    }
    for degrees in list_degrees(size, allowed, rest="dp"):
        stages = tuple(stage for stage in zero if stage == 1 or degrees.copies > 1)
        divided_experts = [ep for ep in experts if divides_experts(degrees, ep)]
        for tokens, recomputes, stage, dtype, ep in product(
            micro_batch_tokens, recompute, stages, dtypes, divided_experts
        ):
            yield Strategy(
                degrees=degrees,
                ep=ep,
                micro_batch_tokens=tokens,
                sequence_parallel=degrees["tp"] > 1,
                recompute=recomputes,
                zero=stage,
                dtype=dtype,
            )


def list_micro_batches(kind: Kind, work: CallWork) -> tuple[int, ...]:
    """Enumerate micro-batch sizes in tokens, from a size that keeps a device busy to a whole mini-batch.

    For generation, sizes count the capacity of the KV cache. They grow up to all sequences, because larger decode
    batches cost less per token.
    """
    whole = work.capacity
    sizes = [max(work.longest, min(_SMALLEST_BATCH, whole // 4))]
    largest, step = (whole, 4) if kind is Kind.GENERATE else (min(whole, _LARGEST_PASS), 2)
    while sizes[-1] < largest:
        sizes.append(min(largest, sizes[-1] * step))
    return tuple(sizes)


def list_context_degrees(kind: Kind, work: CallWork) -> tuple[int, ...]:
    """Enumerate CP degrees: powers of two that leave each rank a large part of the longest sequence, or of the
    longest row of generation."""
    longest = work.longest_row if kind is Kind.GENERATE else work.longest
    most = min(_LARGEST_CONTEXT, longest // _SMALLEST_SHARE)
    return tuple(1 << doublings for doublings in range(max(1, most.bit_length())))


def list_expert_degrees(shape: ModelShape) -> tuple[int, ...]:
    """Enumerate EP degrees: powers of two that divide the number of experts. Quantised experts have none."""
    if shape.mixture is None or shape.quantised is not None:
        return (1,)
    doublings = range(shape.mixture.experts.bit_length())
    return tuple(1 << n for n in doublings if shape.mixture.experts % (1 << n) == 0)


def list_virtual_stages(kind: Kind, layers: int) -> tuple[int, ...]:
    """Enumerate numbers of virtual stages of each pipeline stage: powers of two. Generation has one."""
    most = 1 if kind is Kind.GENERATE else layers // 2
    return tuple(1 << doublings for doublings in range(max(1, most.bit_length())))


def _tidy(begin: int, nodes: int, total: int) -> bool:
    if nodes == total:
        return True
    power = 1 << (nodes.bit_length() - 1)
    block = nodes if nodes == power else 2 * power
    return nodes % max(1, power // 4) == 0 and (begin % block == 0 or (begin + nodes) % block == 0)


@dataclass(frozen=True)
class SearchSpace:
    """Dimensions that a search may vary in addition to meshes and parallel degrees."""

    micro_batch_tokens: tuple[int, ...] | None = None
    """Micro-batch sizes in tokens. None means the sizes of `list_micro_batches`."""
    recompute: tuple[bool, ...] = (False, True)
    offload: bool = True
    keep: bool = True
    """Whether copies of parameters in the layouts of other calls may be kept between uses."""
    zero: tuple[int, ...] = ZERO_STAGES
    """Stages of ZeRO that train calls may have."""
    contexts: tuple[int, ...] | None = None
    """CP degrees of all calls. None means the degrees of `list_context_degrees`. For generation, it means the
    degrees among them that may be worth it."""
    experts: tuple[int, ...] | None = None
    """EP degrees, among those of `list_expert_degrees`. None means all of these."""
    virtual: tuple[int, ...] | None = None
    """Numbers of virtual stages of each pipeline stage, among those of `list_virtual_stages`. None means all of
    these."""
    zero_bubble: tuple[bool, ...] = (False, True)
    """Whether train calls may compute the gradients of weights apart from backward passes."""
    dtypes: tuple[Dtype, ...] = ()
    """Data types that parameters of calls may have in addition to the model's own. Train calls keep the model's own
    type."""


def build_problem(
    scenario: Scenario,
    *,
    search_space: SearchSpace | None = None,
    include: Iterable[Plan] = (),
    relaxed: bool = False,
) -> Problem:
    """Build the search problem of a step.

    The placements of plans in `include` are among the candidates even if they do not fit. If the step has portions,
    only sampling overlaps with other calls in the problem, or, if it is `relaxed`, all calls overlap. No problem
    describes portions themselves.
    """
    graph = scenario.graph
    spec = scenario.spec
    apart, portions = None, 1
    if graph.streaming is not None:
        apart, portions = graph.streaming.name, graph.streaming.portions
        if spec.size == 1:
            raise UserError(
                f"asynchrony.portions: {apart} needs devices of its own, and there is only one device"
            )
        graph = overlap_all(graph) if relaxed else overlap_sampling(graph)
        scenario = replace(scenario, graph=graph)
    builder = _Builder(scenario, search_space or SearchSpace(), apart, portions)
    plans = tuple(include)
    # Inference may run in the layouts of training, so candidates of training are found first.
    calls = sorted(graph.calls, key=lambda call: call.kind is not Kind.TRAIN)
    found = {call.name: builder.candidates(call, plans) for call in calls}
    candidates = {call.name: found[call.name] for call in graph.calls}
    return Problem(
        graph=graph,
        cluster=spec.cluster,
        candidates=candidates,
        transfers=scenario.cost.transfers(graph, scenario.models),
        memory_bytes=tuple(float(scenario.memory.capacity(rank)) for rank in spec.cluster.bounds[:-1]),
        exchange=scenario.cost.exchange(graph, scenario.workload),
        sharers=tuple(builder.sharers),
        host_memory_bytes=tuple(map(scenario.memory.host_capacity, range(spec.cluster.nodes))),
        parts=scenario.parts,
        apart=apart,
    )


@dataclass(frozen=True)
class _CacheDivision:
    """Decides whether context-parallel ranks may divide the cache of a generate call.

    A strategy with half the CP degree and twice the data-parallel degree reads the same bytes per rank, and gathers
    less. So a CP degree is a candidate only in two cases: there are too few records for the other strategy, or the
    cache of the longest row is large on each of its ranks. This is a heuristic. It leaves out some plans that
    generate in the layout of training, although another layout would be faster for the call alone.
    """

    work: CallWork
    model: StoredModel
    records: int
    """Maximum number of data-parallel ranks."""
    large_bytes: float
    """Bytes on a rank above which the cache of a row is large."""

    def limit(self, degrees: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Drop degrees that no strategy on `size` devices needs, even without tensor and pipeline parallelism."""
        whole = self._row_bytes(Strategy())
        return tuple(
            cp
            for cp in degrees
            if cp == 1 or size // cp * 2 > self.records or 2 * whole > cp * self.large_bytes
        )

    def may_help(self, strategy: Strategy) -> bool:
        few = 2 * strategy.dp > self.records
        return strategy.cp == 1 or few or 2 * self._row_bytes(strategy) > strategy.cp * self.large_bytes

    def _row_bytes(self, strategy: Strategy) -> float:
        """Bytes of the cache of the longest row on a rank of this strategy, if its CP ranks did not divide it."""
        sizes = size_shards(self.model, strategy.tp, strategy.ep)
        layers = -(-self.model.shape.layers // strategy.pp)
        width = ELEMENT_BYTES[strategy.dtype or self.model.dtype]
        tokens = self.work.longest_row
        return float(kv_cache_bytes(sizes, tokens=tokens, layers=layers, element_bytes=width))


@dataclass(frozen=True)
class _Builder:
    scenario: Scenario
    search_space: SearchSpace
    apart: str | None = None
    """As in `Problem`."""
    portions: int = 1
    """Number of portions that the call `apart` hands on."""
    interleaved: dict[str, set[tuple[Degrees, int, int]]] = field(default_factory=dict)
    """Degrees, EP degree and virtual stages of the interleaved candidates of train calls, by role."""

    @cached_property
    def meshes(self) -> list[Mesh]:
        return list_meshes(self.scenario.spec)

    @cached_property
    def sharers(self) -> list[tuple[str, ...]]:
        """Groups of at least two roles of the graph with the same frozen weights."""
        models = {role: self.scenario.models[role] for role in self.scenario.graph.roles}
        return [roles for roles in list_sharers(models) if len(roles) > 1]

    def candidates(self, call: Call, plans: Iterable[Plan]) -> tuple[Candidate, ...]:
        """Compute every candidate of a call, including the placements in `plans`."""
        if call.is_function:
            return self._function_candidates(call, plans)
        work = self.scenario.workload.work(call)
        given = self.search_space.micro_batch_tokens
        candidates = self._candidates_on_meshes(
            call, list_micro_batches(call.kind, work) if given is None else given
        )
        if given is None and not any(map(self._fits, candidates)):
            # Micro-batches of one sequence are slow, but may be the only size that fits.
            candidates += self._candidates_on_meshes(call, (work.longest,))
        if call.kind is Kind.TRAIN:
            known = self.interleaved.setdefault(call.model_role, set())
            strategies = (candidate.placement.strategy for candidate in candidates)
            known.update((of.degrees, of.ep, of.vpp) for of in strategies if of.vpp > 1)
        candidates += self._given(call, list(dict.fromkeys(plan[call.name] for plan in plans)))
        return tuple(dict.fromkeys(candidates))

    def _function_candidates(self, call: Call, plans: Iterable[Plan]) -> tuple[Candidate, ...]:
        """List candidates of a function: every mesh with a record for each rank, and the placements in `plans`.

        A function that no run has measured may be slow, so it gets only the meshes with the most ranks. If sampling
        runs ahead, half as many ranks are enough, because ranks that sample would send its outputs too late.
        """
        placements = [function_placement(mesh) for mesh in self.meshes]
        if self.search_space.micro_batch_tokens == ():  # only the placements in `plans`
            placements = []
        found = [*self._on_hosts(call, placements)]
        widest = max((candidate.placement.mesh.size for candidate, _ in found), default=0)
        if all(measured for _, measured in found):
            found += self._on_hosts(call, [plan[call.name] for plan in plans])
        else:
            least = widest / 2 if self.scenario.graph.ahead else widest
            least = (
                1 if self.apart else least
            )  # the search starts from the widest that leave room for sampling
            found = [pair for pair in found if pair[0].placement.mesh.size >= least]
        return tuple(dict.fromkeys(candidate for candidate, _ in found))

    def _on_hosts(self, call: Call, placements: Iterable[Placement]) -> Iterator[tuple[Candidate, bool]]:
        """Yield candidates of a function, which holds no device memory, and whether a run has measured it."""
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
        """Compute the costs of candidates once per site, and copy them to all meshes with this site."""
        spec = self.scenario.spec
        kinds: dict[DeviceKind, dict[Site, list[Mesh]]] = defaultdict(lambda: defaultdict(list))
        for mesh in self.meshes:
            site = spec.site(mesh)
            kinds[site.device][site].append(mesh)
        candidates = []
        for sites in kinds.values():
            every = [
                (number, Placement(alike[0], strategy))
                for number, alike in enumerate(sites.values())
                for strategy in self._strategies(call, alike[0], tokens)
            ]
            if not every:
                continue
            placements = [placement for _, placement in every]
            ways = list_ways(self.scenario, call, placements, shares=self._shares(call))
            number = np.array([number for number, _ in every])
            more = [
                (i, Placement(alike[0], strategy))
                for i, alike in enumerate(sites.values())
                for strategy in self._vary_pipelines(call, ways[number == i], alike[0].first)
            ]
            if more:
                placements = [placement for _, placement in more]
                ways = Ways.join(ways, list_ways(self.scenario, call, placements, shares=self._shares(call)))
                number = np.append(number, [i for i, _ in more])
            for i, meshes in enumerate(sites.values()):
                chosen = self._choose(call, ways[number == i], meshes[0].first)
                candidates += chosen.candidates(meshes)
        return candidates

    def _strategies(self, call: Call, mesh: Mesh, tokens: tuple[int, ...]) -> Iterator[Strategy]:
        """Yield the strategies on a mesh that give every data-parallel rank at least one record."""
        spec = self.scenario.spec
        model = self.scenario.models[call.model_role]
        shape = model.shape
        node = spec.cluster.ranks(spec.cluster.node(mesh.first))
        divided = gcd(len(node), *(devices for _, devices in spec.site(mesh).nodes.runs))
        recompute = self.search_space.recompute if call.kind is Kind.TRAIN else (False,)
        # All calls that train a role need the same ZeRO stage, but a candidate does not know the other calls'
        # stages.
        training = [c for c in self.scenario.graph.role_calls(call.model_role) if c.kind is Kind.TRAIN]
        zero = self.search_space.zero if training == [call] else (1,)
        work = self.scenario.workload.work(call)
        # Each rank that samples hands on whole prompts.
        least = self.portions * self.scenario.workload.samples if call.name == self.apart else 1
        contexts = self.search_space.contexts
        division = None
        if contexts is None:
            contexts = list_context_degrees(call.kind, work)
            if call.kind is Kind.GENERATE:
                large = _LARGE_ROW * self.scenario.memory.capacity(mesh.first)
                division = _CacheDivision(work, model, work.items // work.minibatches // least, large)
                contexts = division.limit(contexts, mesh.size)
        allowed = self.search_space.experts
        experts = tuple(ep for ep in list_expert_degrees(shape) if allowed is None or ep in allowed)
        for strategy in list_strategies(
            mesh.size,
            divided,
            shape.layers,
            shape.heads,
            tokens,
            recompute,
            zero,
            self._dtypes(call),
            contexts,
            experts,
        ):
            if strategy.dp * least > work.items // work.minibatches or (model.exact and strategy.tp > 1):
                continue
            if call.kind is Kind.GENERATE and not self._can_decode(call, strategy):
                continue
            if division is None or division.may_help(strategy):
                yield strategy

    def _vary_pipelines(self, call: Call, ways: Ways, first: int) -> list[Strategy]:
        """List variants of the strategies of a call on a mesh, with virtual stages or zero bubbles, that may be
        worth it: because they save time, or because inference finds its role's parameters in this layout."""
        shape, allowed = self.scenario.models[call.model_role].shape, self.search_space.virtual
        virtual = [n for n in list_virtual_stages(call.kind, shape.layers) if allowed is None or n in allowed]
        needed = count_bytes_alone(ways, is_home=True)
        fitting = needed <= self.scenario.memory.capacity(first)
        ways, needed = ways[fitting], needed[fitting]
        work, known = self.scenario.workload.work(call), self.interleaved.get(call.model_role)
        columns = zip(ways.strategies, ways.seconds.tolist(), find_least(ways.seconds, needed), strict=True)
        # Adapters have only small gradients of weights.
        leaves = call.kind is Kind.TRAIN and shape.lora is None
        apart = self.search_space.zero_bubble if leaves else (False,)
        options = [*product(sorted({1, *virtual}), apart)]
        found = []
        for strategy, seconds, least in columns:
            most = shape.layers // strategy.pp if strategy.pp > 1 and strategy.zero == 1 else 0
            for vpp, zero_bubble in options:
                if vpp > most or (vpp == 1 and not zero_bubble):
                    continue
                if call.kind is Kind.INFERENCE and known is not None:
                    worth = (strategy.degrees, strategy.ep, vpp) in known
                else:
                    saved = estimate_saving(work, strategy, vpp, zero_bubble=zero_bubble)
                    worth = seconds * (1 - saved) < (1 - LEAST_SAVING[call.kind]) * least
                if worth:
                    found.append(replace(strategy.with_degrees(vpp=vpp), zero_bubble=zero_bubble))
        return found

    def _can_decode(self, call: Call, strategy: Strategy) -> bool:
        """Check whether generation can have a strategy, and whether its degree of expert parallelism may be worth
        it. Ranks of a TP group that divide whole experts read as many bytes as ranks that cut them."""
        if strategy.cp > 1 and self.scenario.models[call.model_role].exact:
            return False
        if strategy.ep == 1:
            return True
        portions = self.portions if call.name == self.apart else call.portions
        return strategy.spreads_experts and strategy.can_generate(portions)

    def _dtypes(self, call: Call) -> tuple[Dtype | None, ...]:
        """Return the data types that a call's parameters may have. None means the model's own type."""
        graph, model = self.scenario.graph, self.scenario.models[call.model_role]
        # Moving averages and training change parameters in small steps, which another data type would lose.
        follows = graph.home(call.model_role) == call and call.role in {a.role for a in graph.averages}
        if call.kind is Kind.TRAIN or follows or model.exact or QUANTISED in model.sets:
            return (None,)
        return None, *(dtype for dtype in self.search_space.dtypes if dtype != model.dtype)

    def _choose(self, call: Call, ways: Ways, first: int) -> Ways:
        """Choose the ways to run a call on a mesh that a best plan may need."""
        limit = self.scenario.memory.capacity(first)
        needed = count_bytes_alone(ways, is_home=True)
        fitting = ways[needed <= limit]
        if call.kind is Kind.TRAIN or call.model_role not in self.interleaved:
            fitting = drop_slow_variants(call.kind, fitting, needed[needed <= limit])
        if not len(fitting):
            # The error message describes the way with the smallest shortage.
            return ways[np.argsort(needed, kind="stable")[:1]]
        variants = self._with_variants(call, fitting, first, limit)
        return drop_dominated(variants[count_bytes_alone(variants, is_home=True) <= limit])

    def _with_variants(self, call: Call, ways: Ways, first: int, limit: float) -> Ways:
        """Add variants that offload or keep copies, if the call is its role's home and the search space allows
        them."""
        graph, space = self.scenario.graph, self.search_space
        if graph.home(call.model_role) != call:
            return ways
        # With portions, gradients must stay in device memory, and they are a part of the optimizer's state.
        if space.offload and not (self.apart and call.kind is Kind.TRAIN):
            ways = add_offloading(self.scenario, call, first, ways, limit)
        return add_keeping(ways) if space.keep and len(graph.role_calls(call.model_role)) > 1 else ways

    def _shares(self, call: Call) -> bool:
        """Check whether other roles have the same frozen weights as a call's role."""
        return any(call.model_role in roles for roles in self.sharers)

    def _fits(self, candidate: Candidate) -> bool:
        """Check whether a candidate alone fits into its devices."""
        limit = self.scenario.memory.capacity(candidate.placement.mesh.first)
        return bool(count_bytes_alone(candidate, is_home=True) <= limit)

    def _given(self, call: Call, placements: Sequence[Placement]) -> list[Candidate]:
        """List the candidates of placements from plans, in the order of `placements`."""
        by_mesh: dict[Mesh, list[Placement]] = defaultdict(list)
        for placement in placements:
            by_mesh[placement.mesh].append(placement)
        found: dict[Placement, list[Candidate]] = defaultdict(list)
        for mesh, there in by_mesh.items():
            ways = list_ways(self.scenario, call, there, shares=self._shares(call))
            variants = self._with_variants(call, ways, mesh.first, 0.0)
            for candidate in variants.candidates([mesh]):
                found[candidate.placement].append(candidate)
        return [candidate for placement in placements for candidate in found[placement]]
