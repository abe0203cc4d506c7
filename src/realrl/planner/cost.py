"""What a plan costs in seconds, by named terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from realrl.config.shape import Head, ModelShape
from realrl.dataflow.call import Call, Kind
from realrl.layout.layout import layout
from realrl.layout.links import Links
from realrl.layout.routes import reallocate
from realrl.plan.placement import Placement
from realrl.planner.cluster import ClusterSpec
from realrl.planner.efficiency import Efficiency
from realrl.planner.generation import generation
from realrl.planner.moves import Moves
from realrl.planner.network import Network
from realrl.planner.passes import Setting, inference, training
from realrl.planner.profile import Profile
from realrl.planner.sizes import LocalSizes
from realrl.planner.timing import Timing
from realrl.planner.workload import Workload
from realrl.program.memory import Stored


@dataclass(frozen=True)
class CallCost:
    """Seconds that a call takes on its mesh, by term; the terms add up.

    compute: arithmetic of the busiest stage. decode: memory-bound token-by-token generation. tensor, pipeline,
    data: communication between ranks of the call that nothing hides. bubble: the busiest stage waits for
    others. launch: the device waits for the host. optimizer: update of the parameters.
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
        self._moves: dict[tuple[ModelShape, Head], Moves] = {}

    def call(self, call: Call, model: Stored, placement: Placement, workload: Workload) -> CallCost:
        """Time of one execution of a call in a step, all mini-batches and epochs included.

        UserError where there are fewer sequences than data-parallel ranks.
        """
        group = self.spec.group_index(placement.mesh.first)
        key = (call, model, placement.strategy, group, workload)
        if key not in self._calls:
            setting = self._setting(call, model, placement, workload)
            method = {Kind.TRAIN: training, Kind.INFERENCE: inference, Kind.GENERATE: generation}[call.kind]
            self._calls[key] = CallCost(method(setting))
        return self._calls[key]

    def reallocation(self, model: Stored, source: Placement, target: Placement) -> float:
        """Seconds of turning one layout into another: what the busiest port must at least carry.

        A tenth of a millisecond; over random pairs within 1 % of `exact_reallocation`, and within 3 % where the
        whole takes only some tens of milliseconds. Values travel in the narrower of the two types.
        """
        key = (model.shape, model.head)
        if key not in self._moves:
            self._moves[key] = Moves(self.spec, self.links, *key)
        return self._moves[key].seconds(source, target, _narrower(model, source, target))

    def exact_reallocation(self, model: Stored, source: Placement, target: Placement) -> float:
        """The same from the very routes that workers use; takes 1 to 100 milliseconds."""
        before, after = (layout(model.shape, model.head, place) for place in (source, target))
        routes = reallocate(before, after, self.spec.cluster, self.links)
        return routes.seconds(self.links, _narrower(model, source, target))

    def exchange(self, sequences: int, numbers: float, source: Placement, target: Placement) -> float:
        """Seconds of bringing `numbers` values of 8 bytes per sequence between the ranks of two calls.

        Every rank of the target gets its share, over the hosts' network, from one sender after the other.
        """
        link = self.links
        share = sequences * numbers * 8 / target.strategy.dp
        sent = sequences * numbers * 8 * target.strategy.tp * target.strategy.pp / source.strategy.dp
        width = link.node_bytes_per_s if self._apart(source, target) else link.device_bytes_per_s
        messages = source.strategy.dp + target.strategy.size
        return max(share, sent) / width + messages * link.latency_s

    def offload(self, number_bytes: float, rank: int = 0) -> float:
        """Seconds of one copy of so many bytes per device between device and host memory."""
        measured = self.profile.collective("host", 1, 1, number_bytes) if self.profile else None
        width = self.spec.device(rank).host_bytes_per_s * self.efficiency.host_link
        return number_bytes / width if measured is None else measured

    @cached_property
    def links(self) -> Links:
        """Bandwidths between devices and between nodes that messages achieve, those of the slowest group."""
        fraction = self.efficiency.link
        return Links(
            min(group.device.link_bytes_per_s for group in self.spec.groups) * fraction,
            min(group.node_bytes_per_s for group in self.spec.groups) * fraction,
        )

    def _setting(self, call: Call, model: Stored, placement: Placement, workload: Workload) -> Setting:
        group, strategy = self.spec.group(placement.mesh), placement.strategy
        key = (model.shape, model.head, strategy.tp)
        sizes = self._sizes.setdefault(key, LocalSizes(*key))
        profile = self.profile if self.profile and self.profile.device == group.device.name else None
        width = model.width(strategy)
        timing = Timing(group.device, self.efficiency, sizes, width, strategy.sequence_parallel, profile)
        network = Network.of(group, placement, self.efficiency, profile)
        return Setting(timing, network, strategy, workload.work(call))

    def _apart(self, source: Placement, target: Placement) -> bool:
        """Whether what two calls exchange passes between nodes."""
        return len({self.spec.node(rank) for rank in (*source.ranks, *target.ranks)}) > 1


def _narrower(model: Stored, source: Placement, target: Placement) -> int:
    return min(model.width(source.strategy), model.width(target.strategy))
