"""Cost model: seconds of calls, reallocations and offloading on a cluster."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.limits import message_limits
from realrl.layout.sets import BASE
from realrl.plan.cluster import Links
from realrl.plan.placement import ELEMENT_BYTES, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec, Site
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.generation import cost_generation, cost_kept_captures
from realrl.planner.cost.network import Network
from realrl.planner.cost.passes import cost_inference, cost_training
from realrl.planner.cost.portions import share_portions
from realrl.planner.cost.timing import Timing
from realrl.planner.moves.exchange import ExchangeModel, count_exchanged_bytes
from realrl.planner.moves.links import LinkTransfers, ParameterBytes
from realrl.planner.moves.transfers import Layouts, name_mixing, name_refreshing
from realrl.planner.profile.corrections import find_correction
from realrl.planner.profile.profile import Profile
from realrl.planner.workload.batching import records_per_rank
from realrl.planner.workload.shard_sizes import size_shards
from realrl.planner.workload.strategies import Strategies, group_strategies
from realrl.planner.workload.workload import Workload
from realrl.program.arrays import Floats, Real
from realrl.program.memory import StoredModel
from realrl.program.order import changed_sets, changes, set_names


@dataclass(frozen=True)
class CallCost:
    """Seconds of a call on its mesh, by additive terms.

    `compute`: arithmetic of the busiest stage. `decode`: layers, head and sampling in decode steps. `tensor`,
    `context`, `experts`, `pipeline`, `data`: communication of TP, CP, EP, PP and DP that no computation hides.
    `bubble`: idle time of the busiest stage. `launch`: time that the device waits for the host to launch kernels.
    `optimizer`: update of the parameters. `environment`: time that waiting for environments adds. `function`: a
    function on the host, which devices wait for only when they need its outputs. This term is missing if no run has
    measured the function.
    """

    terms: Mapping[str, float]
    captures: float = 0.0
    """Seconds of `launch` spent on capturing CUDA graphs that a later step can reuse.

    A step reuses the graphs of the previous step if the parameters have not moved in between.
    """

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())


class CostModel:
    """Time model of calls and data movement on a cluster.

    Times are interpolated from `profile` if it has measured them, and computed by a roofline model if not. Costs of
    calls are cached by the site of their mesh, because equal sites anywhere in the cluster give equal costs.
    """

    def __init__(
        self, spec: ClusterSpec, profile: Profile | None = None, efficiency: Efficiency | None = None
    ) -> None:
        """Build a time model.

        `profile` is used only for devices of its kind. `efficiency` defaults to the constants of this project's
        engine.
        """
        self.spec = spec
        self.profile = profile
        self.efficiency = efficiency or Efficiency()
        self._calls: dict[object, CallCost] = {}
        self._transfers: dict[tuple[StoredModel, int, str], LinkTransfers] = {}

    def call(
        self, call: Call, model: StoredModel | None, placement: Placement, workload: Workload
    ) -> CallCost:
        """Predict the seconds of one call of a step, with all its mini-batches and epochs.

        `model` is the model of the call's role, or None for a function. Raises UserError if there are fewer records
        than DP ranks.
        """
        if model is None:
            return self._function(call, placement, workload)
        key = (call, model, placement.strategy, self.spec.site(placement.mesh), workload)
        if key not in self._calls:
            terms = self.terms(call, model, [placement], workload)
            captures = self.captures(call, model, [placement], workload)
            by_term = {name: float(seconds[0]) for name, seconds in terms.items()}
            self._calls[key] = CallCost(by_term, float(captures[0]))
        return self._calls[key]

    def terms(
        self,
        call: Call,
        model: StoredModel,
        placements: Sequence[Placement],
        workload: Workload,
    ) -> Mapping[str, Floats]:
        """Predict the seconds of a call by term (see `CallCost`) under several placements at once.

        All placements are on one kind of device. Raises UserError if there are fewer records than DP ranks.
        """
        cost_by_kind = {
            Kind.TRAIN: cost_training,
            Kind.INFERENCE: cost_inference,
            Kind.GENERATE: cost_generation,
        }[call.kind]
        return self._cost(cost_by_kind, call, model, placements, workload)

    def captures(
        self, call: Call, model: StoredModel, placements: Sequence[Placement], workload: Workload
    ) -> Floats:
        """Compute `CallCost.captures` under several placements, all on one kind of device."""
        if call.kind is not Kind.GENERATE:
            return np.zeros(len(placements))

        def cost(context: CallContext) -> Mapping[str, Floats]:
            return {"captures": cost_kept_captures(context)}

        return self._cost(cost, call, model, placements, workload)["captures"]

    def portions(
        self, call: Call, model: StoredModel, placement: Placement, workload: Workload
    ) -> list[float]:
        """Predict the share of a generate call's seconds in which it samples each of its portions."""
        context = self._context(
            call,
            model,
            [self.spec.site(placement.mesh)],
            Strategies.of([placement.strategy]),
            workload,
        )
        until = share_portions(context, call.portions)
        return [end - begin for begin, end in zip([0.0, *until[:-1]], until, strict=True)]

    def _cost(
        self,
        cost: Callable[[CallContext], Mapping[str, Floats]],
        call: Call,
        model: StoredModel,
        placements: Sequence[Placement],
        workload: Workload,
    ) -> Mapping[str, Floats]:
        """Compute the seconds of a call by term with `cost`, and multiply them by the profile's correction factors.

        `cost` can only handle strategies of one group of `group_strategies`, so it is called once per group.
        """
        strategies = [placement.strategy for placement in placements]
        sites = [self.spec.site(placement.mesh) for placement in placements]
        found: dict[str, Floats] = {}
        for members, alike in group_strategies(strategies):
            there = [sites[i] for i in members.tolist()]
            for name, seconds in cost(self._context(call, model, there, alike, workload)).items():
                found.setdefault(name, np.zeros(len(strategies)))[members] = seconds
        factors = self._corrections(call, model, placements[0].mesh.first, strategies)
        return found if factors is None else {name: factors * s for name, s in found.items()}

    def _function(self, call: Call, placement: Placement, workload: Workload) -> CallCost:
        """Predict the time of a function on the busiest rank: the measured seconds per item, times the rank's
        records."""
        assert call.function is not None, f"{call.name} has a model"
        records = records_per_rank(workload.work(call), placement.strategy)
        profile = self._profile_of(placement.mesh.first)
        measured = profile.function_seconds(call.function) if profile else None
        return CallCost({} if measured is None else {"function": measured * records})

    def reallocation(
        self, model: StoredModel, source: Placement, target: Placement, parameter_set: str = BASE
    ) -> float:
        """Estimate the seconds of reallocating a parameter set, as the search does (`LinkTransfers`).

        For nine in ten random pairs of placements, the estimate is within 2 % or a millisecond of the time of the
        routes that a run executes. Values travel in the narrower of the source's and the target's data type.
        """
        return self._transfers_of(model, source, target, parameter_set).one("", source, target)

    def moved(
        self, model: StoredModel, source: Placement, target: Placement, parameter_set: str = BASE
    ) -> tuple[int, int]:
        """Count the bytes that a reallocation sends between devices, and how many of them enter another node."""
        transfers = self._transfers_of(model, source, target, parameter_set)
        sent, entering = transfers.sent("", Layouts.of([source]), Layouts.of([target]))
        return round(sent[0]), round(entering[0])

    def transfers(self, graph: DataflowGraph, models: Mapping[str, StoredModel]) -> LinkTransfers:
        """Build the time model of reallocations of a graph's roles."""
        parts = {role: model.part for role, model in models.items()}
        moving = {role: (role, set_names(role, parts)) for role in graph.roles}
        for call, average in product(graph.calls, graph.averages):
            if average.role in changes(graph, call):
                names = changed_sets(graph, call, average.role, parts)
                moving[name_mixing(average.role, average.source)] = average.source, names
        for call in graph.calls:
            for role in changes(graph, call):
                names = changed_sets(graph, call, role, parts)
                moving[name_refreshing(graph, call, role, parts)] = role, names

        def weights(widths: Mapping[str, int]) -> dict[str, tuple[ParameterBytes, ...]]:
            return {
                what: tuple(ParameterBytes.of(models[role], widths[role], name) for name in names)
                for what, (role, names) in moving.items()
            }

        own = {role: model.element_bytes for role, model in models.items()}
        halves = dict.fromkeys(models, ELEMENT_BYTES["bfloat16"])
        return LinkTransfers(self.spec.cluster, weights(own), self.node_links, weights(halves))

    def exchange(self, graph: DataflowGraph, workload: Workload) -> ExchangeModel:
        """Build the time model of data exchange between the calls of a graph."""
        host = self.efficiency.host_bytes_per_s
        links = find_slowest(self.node_links)
        slower = Links(
            min(host, links.device_bytes_per_s), min(host, links.node_bytes_per_s), links.latency_s
        )
        return ExchangeModel(
            slower,
            self.spec.cluster,
            count_exchanged_bytes(graph, workload),
            workload.items,
        )

    def offload(self, number_bytes: Real, rank: int = 0) -> Real:
        """Compute the seconds of a copy of `number_bytes` per device between device and host memory."""
        profile = self._profile_of(rank)
        measured = profile.collective("host", 1, 1, number_bytes) if profile else None
        width = self.spec.device(rank).host_bytes_per_s * self.efficiency.host_link
        return number_bytes / width if measured is None else measured

    @cached_property
    def node_links(self) -> tuple[Links, ...]:
        """Achievable bandwidths inside and between nodes, one entry per node."""
        fraction = self.efficiency.link
        return tuple(
            Links(
                min(group.device.link_bytes_per_s * fraction, self._most_posted(group.device)),
                group.node_bytes_per_s * fraction,
            )
            for group in self.spec.groups
            for _ in range(group.nodes)
        )

    def _most_posted(self, device: DeviceKind) -> float:
        """Most bytes per second that a rank can send in a reallocation if its host does nothing but post messages.

        A fast device link can be idle while the host prepares the next message, so the host limits the rate.
        """
        return message_limits(cpu=device.cpu).message_bytes / self.efficiency.collective_host_s

    def _context(
        self,
        call: Call,
        model: StoredModel,
        sites: Sequence[Site],
        strategies: Strategies,
        workload: Workload,
    ) -> CallContext:
        device = sites[0].device
        profile = self._profile_for(device)
        timing = Timing(
            device=device,
            efficiency=self.efficiency,
            sizes=size_shards(model, strategies.tp, strategies.ep),
            dtype=strategies.dtype_of(model),
            sequence_parallel=strategies.sequence_parallel,
            profile=profile,
            exact=model.exact,
        )
        network = Network(tuple(sites), strategies, self.efficiency, profile)
        return CallContext(timing, network, strategies, workload.work(call), call.candidates)

    def _transfers_of(
        self, model: StoredModel, source: Placement, target: Placement, parameter_set: str
    ) -> LinkTransfers:
        # Values travel in the narrower of the two data types.
        key = (model, min(model.width(place.strategy) for place in (source, target)), parameter_set)
        if key not in self._transfers:
            # Both mappings hold the set in the narrower type, so `LinkTransfers` need not choose between them.
            weights = {"": (ParameterBytes.of(*key),)}
            self._transfers[key] = LinkTransfers(self.spec.cluster, weights, self.node_links, weights)
        return self._transfers[key]

    def _corrections(
        self, call: Call, model: StoredModel, first: int, strategies: Sequence[Strategy]
    ) -> Floats | None:
        """Return the factor for the predicted seconds under each strategy, or None if the profile has no
        corrections."""
        profile = self._profile_of(first)
        if profile is None or not profile.corrections:
            return None
        return np.array([find_correction(profile.corrections, call, model, s) for s in strategies])

    def _profile_of(self, rank: int) -> Profile | None:
        return self._profile_for(self.spec.device(rank))

    def _profile_for(self, device: DeviceKind) -> Profile | None:
        return self.profile if self.profile and self.profile.device == device.name else None


def find_slowest(links: Iterable[Links]) -> Links:
    """Combine the smallest bandwidths and the longest latency of several links."""
    candidates = list(links)
    return Links(
        min(one.device_bytes_per_s for one in candidates),
        min(one.node_bytes_per_s for one in candidates),
        max(one.latency_s for one in candidates),
    )
