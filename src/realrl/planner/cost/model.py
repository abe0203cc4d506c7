"""What a plan costs in seconds, by named terms."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import Head, ModelShape
from realrl.layout.layout import layout
from realrl.layout.routing.links import Links
from realrl.layout.routing.routes import reallocate
from realrl.plan.placement import Placement
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.cost.generation import generation
from realrl.planner.cost.network import Network
from realrl.planner.cost.passes import inference, training
from realrl.planner.cost.setting import Setting
from realrl.planner.cost.timing import Timing
from realrl.planner.moves.exchange import Exchange, exchanged_bytes
from realrl.planner.moves.links import LinkTransfers, Weights
from realrl.planner.moves.transfers import Layouts
from realrl.planner.profile.corrections import correction
from realrl.planner.profile.profile import Profile
from realrl.planner.workload.batching import records_per_rank
from realrl.planner.workload.sizes import LocalSizes
from realrl.planner.workload.workload import Workload
from realrl.program.memory import Stored


@dataclass(frozen=True)
class CallCost:
    """Seconds that a call takes on its mesh, by term; the terms add up.

    compute: arithmetic of the busiest stage. decode: memory-bound token-by-token generation. tensor, pipeline,
    data: communication between ranks of the call that nothing hides. bubble: the busiest stage waits for
    others. launch: the device waits for the host. optimizer: update of the parameters. function: a function on the
    host, which no device waits for until its outputs are needed; there is no term for one that no run has measured.
    """

    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Their sum."""
        return sum(self.terms.values())


class CostModel:
    """Seconds of calls and moves on a cluster: interpolated where `profile` has measurements, else a roofline.

    Answers are cached and do not depend on where in its group a mesh lies, only on its size.
    """

    def __init__(
        self, spec: ClusterSpec, profile: Profile | None = None, efficiency: Efficiency | None = None
    ) -> None:
        """`profile` counts for devices of its own kind; `efficiency` defaults to that of this project's
        engine."""
        self.spec, self.profile = spec, profile
        self.efficiency = efficiency or Efficiency()
        self._calls: dict[object, CallCost] = {}
        self._sizes: dict[tuple[ModelShape, Head, int], LocalSizes] = {}
        self._networks: dict[tuple[int, int, int, int], Network] = {}
        self._transfers: dict[tuple[Stored, int], LinkTransfers] = {}

    def call(self, call: Call, model: Stored | None, placement: Placement, workload: Workload) -> CallCost:
        """Time of one execution of a call in a step, all mini-batches and epochs included. `model` is that of the
        call's role, None for a function.

        UserError where there are fewer records than data-parallel ranks.
        """
        if model is None:
            return self._function(call, placement, workload)
        group = self.spec.group_index(placement.mesh.first)
        key = (call, model, placement.strategy, group, workload)
        if key not in self._calls:
            setting = self._setting(call, model, placement, workload)
            method = {Kind.TRAIN: training, Kind.INFERENCE: inference, Kind.GENERATE: generation}[call.kind]
            factor = self._correction(call, model, placement)
            self._calls[key] = CallCost({name: factor * s for name, s in method(setting).items()})
        return self._calls[key]

    def _function(self, call: Call, placement: Placement, workload: Workload) -> CallCost:
        """Time of a function on the busiest rank, from what runs have measured for an item."""
        assert call.function is not None, f"{call.name} has a model"
        records = records_per_rank(workload.work(call), placement.strategy)
        profile = self._profile_of(placement.mesh.first)
        measured = profile.function_seconds(call.function) if profile else None
        return CallCost({} if measured is None else {"function": measured * records})

    def reallocation(self, model: Stored, source: Placement, target: Placement) -> float:
        """Seconds of turning one layout into another, as a search counts them (`LinkTransfers`).

        Over random pairs nine in ten are within 2 % of `exact_reallocation`, or a millisecond. Values travel in
        the narrower of the two types.
        """
        return self._transfers_of(model, source, target).one("", source, target)

    def moved(self, model: Stored, source: Placement, target: Placement) -> tuple[int, int]:
        """Bytes that a reallocation sends from device to device, and those of them that enter another node."""
        transfers = self._transfers_of(model, source, target)
        sent, entering = transfers.sent("", Layouts.of([source]), Layouts.of([target]))
        return round(sent[0]), round(entering[0])

    def transfers(self, models: Mapping[str, Stored]) -> LinkTransfers:
        """Reallocations of roles, whose parameters travel in their own type."""
        weights = {role: Weights.of(model, model.element_bytes) for role, model in models.items()}
        return LinkTransfers(self.spec.cluster, weights, self._node_links)

    def exact_reallocation(self, model: Stored, source: Placement, target: Placement) -> float:
        """The same from the very routes that workers use; takes 1 to 100 milliseconds."""
        before, after = (layout(model.shape, model.head, place) for place in (source, target))
        links = _slowest(self._node_links[self.spec.node(place.mesh.first)] for place in (source, target))
        routes = reallocate(before, after, self.spec.cluster, links)
        return routes.seconds(links, _narrower(model, source, target))

    def exchange(self, graph: DataflowGraph, workload: Workload) -> Exchange:
        """What the calls of a graph hand to each other."""
        host, links = self.efficiency.host_bytes_per_s, _slowest(self._node_links)
        slower = Links(
            min(host, links.device_bytes_per_s), min(host, links.node_bytes_per_s), links.latency_s
        )
        return Exchange(slower, self.spec.cluster.devices_per_node, exchanged_bytes(graph, workload))

    def offload(self, number_bytes: float, rank: int = 0) -> float:
        """Seconds of one copy of so many bytes per device between device and host memory."""
        profile = self._profile_of(rank)
        measured = profile.collective("host", 1, 1, number_bytes) if profile else None
        width = self.spec.device(rank).host_bytes_per_s * self.efficiency.host_link
        return number_bytes / width if measured is None else measured

    @cached_property
    def _node_links(self) -> tuple[Links, ...]:
        """Of each node, bandwidths between devices and to other nodes that messages achieve."""
        fraction = self.efficiency.link
        return tuple(
            Links(group.device.link_bytes_per_s * fraction, group.node_bytes_per_s * fraction)
            for group in self.spec.groups
            for _ in range(group.nodes)
        )

    def _setting(self, call: Call, model: Stored, placement: Placement, workload: Workload) -> Setting:
        group, strategy = self.spec.group(placement.mesh), placement.strategy
        key = (model.shape, model.head, strategy.tp)
        sizes = self._sizes.setdefault(key, LocalSizes(*key))
        profile = self._profile_of(placement.mesh.first)
        width = model.width(strategy)
        timing = Timing(group.device, self.efficiency, sizes, width, strategy.sequence_parallel, profile)
        where = (self.spec.group_index(placement.mesh.first), strategy.dp, strategy.tp, strategy.pp)
        if (network := self._networks.get(where)) is None:
            network = self._networks[where] = Network.of(group, placement, self.efficiency, profile)
        return Setting(timing, network, strategy, workload.work(call))

    def _transfers_of(self, model: Stored, source: Placement, target: Placement) -> LinkTransfers:
        key = (model, _narrower(model, source, target))
        if key not in self._transfers:
            self._transfers[key] = LinkTransfers(self.spec.cluster, {"": Weights.of(*key)}, self._node_links)
        return self._transfers[key]

    def _correction(self, call: Call, model: Stored, placement: Placement) -> float:
        profile = self._profile_of(placement.mesh.first)
        return correction(profile.corrections, call, model, placement.strategy) if profile else 1.0

    def _profile_of(self, rank: int) -> Profile | None:
        """The profile, if it is of such devices as a rank's."""
        device = self.spec.device(rank).name
        return self.profile if self.profile and self.profile.device == device else None


def _slowest(links: Iterable[Links]) -> Links:
    given = list(links)
    return Links(
        min(one.device_bytes_per_s for one in given),
        min(one.node_bytes_per_s for one in given),
        max(one.latency_s for one in given),
    )


def _narrower(model: Stored, source: Placement, target: Placement) -> int:
    return min(model.width(source.strategy), model.width(target.strategy))
