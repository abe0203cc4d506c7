"""What a plan needs in device memory, by named parts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.config.units import format_bytes
from realrl.dataflow.call import Call, Kind
from realrl.families.shape import Head, ModelShape
from realrl.layout.ranges import stage_layers
from realrl.layout.routing.chunks import CHUNK_BYTES
from realrl.plan.placement import Placement
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.memory.activations import Activations, Parts
from realrl.planner.workload.batching import split_work
from realrl.planner.workload.sizes import LocalSizes, buckets
from realrl.planner.workload.workload import Workload
from realrl.program.memory import Stored

_FLOAT32 = 4
_GIB = 1 << 30
DRIVER_BYTES = int(1.6 * _GIB)
"""Not to be had on a GPU: about 0.6 GiB for the CUDA context and the libraries' kernels, and 1 GiB for the channels
of a few NCCL communicators."""
MESSAGE_BUFFERS = 12
"""Chunks that a reallocation packs and receives messages in, and keeps (`runtime.reallocation.Staging`)."""
FRAGMENTATION = 0.1
"""Of what comes and goes: blocks that the caching allocator holds but cannot use. What stays is in few flat buffers
and leaves no holes."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device: `static` as long as a role is there, `dynamic` only while a call runs.

    static: parameters, gradients, optimizer. dynamic: activations, logits, cache, fragmentation.
    """

    static: Mapping[str, int]
    dynamic: Mapping[str, int]

    @property
    def static_bytes(self) -> int:
        """What stays."""
        return sum(self.static.values())

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.static_bytes + sum(self.dynamic.values())


class MemoryModel:
    """Bytes of calls on the devices of a cluster."""

    def __init__(self, spec: ClusterSpec, efficiency: Efficiency | None = None) -> None:
        """UserError for devices that have no memory left for a plan."""
        for kind in (group.device for group in spec.groups):
            if _usable(kind) <= 0:
                raise UserError(
                    f"{kind.name}: {format_bytes(kind.memory_bytes)} are less than what drivers and the buffers of"
                    " messages take"
                )
        self.spec = spec
        self.efficiency = efficiency or Efficiency()
        self._sizes: dict[tuple[ModelShape, Head, int], LocalSizes] = {}
        self._needs: dict[object, tuple[MemoryNeed, ...]] = {}

    def capacity(self, rank: int) -> int:
        """Bytes of a rank's device that a plan may use: its memory without what the driver, the communication
        libraries and the buffers of reallocations take."""
        return _usable(self.spec.device(rank))

    def parameters(self, model: Stored, placement: Placement) -> int:
        """Bytes of a copy of the parameters on the fullest device of a placement."""
        return model.width(placement.strategy) * max(self._elements(model, placement))

    def state(self, model: Stored, placement: Placement) -> int:
        """Bytes of gradients and optimizer on the fullest device of a placement; what offloading the optimizer
        frees."""
        return max(
            sum(_state(elements, placement.strategy.dp, model.element_bytes).values())
            for elements in self._elements(model, placement)
        )

    def kept_state(self, model: Stored, placement: Placement) -> int:
        """What of that is copied when the optimizer is offloaded: two moments, and the master copy of a lower
        precision; gradients are of no use between steps."""
        parts = 2 + (model.element_bytes < _FLOAT32)
        return _FLOAT32 * parts * max(self._elements(model, placement)) // placement.strategy.dp

    def stages(
        self, call: Call, model: Stored, placement: Placement, workload: Workload
    ) -> tuple[MemoryNeed, ...]:
        """Need of a device of each pipeline stage while it holds the call's role and runs the call, which is no
        function; static includes gradients and optimizer for a train call only.

        UserError where there are fewer records than data-parallel ranks.
        """
        cpu = self.spec.device(placement.mesh.first).cpu
        key = (call, model, placement.strategy, cpu, workload)
        if key not in self._needs:
            strategy, width = placement.strategy, model.width(placement.strategy)
            stages = zip(
                self._elements(model, placement), self._dynamic(call, model, placement, workload), strict=True
            )
            needs = []
            for elements, dynamic in stages:
                static = {"parameters": elements * width}
                if call.kind is Kind.TRAIN:
                    static |= _state(elements, strategy.dp, width)
                holes = int(FRAGMENTATION * (sum(dynamic.values()) - dynamic.get("cache", 0)))
                needs.append(MemoryNeed(static, {**dynamic, "fragmentation": holes}))
            self._needs[key] = tuple(needs)
        return self._needs[key]

    def call(self, call: Call, model: Stored, placement: Placement, workload: Workload) -> MemoryNeed:
        """The largest of `stages`."""
        return max(self.stages(call, model, placement, workload), key=lambda need: need.bytes)

    def _dynamic(
        self, call: Call, model: Stored, placement: Placement, workload: Workload
    ) -> Iterator[Parts]:
        """What each stage needs when it needs most."""
        strategy, work = placement.strategy, workload.work(call)
        width, cpu = model.width(strategy), self.spec.device(placement.mesh.first).cpu
        if call.kind is Kind.GENERATE:
            chunks = split_work(work, strategy, self.efficiency.generation_chunks_per_stage)
            strategy = replace(strategy, sequence_parallel=False)  # it is for long sequences
        else:
            chunks = split_work(work, strategy, self.efficiency.pass_chunks_per_stage)
        tokens, lengths = chunks.fullest.tokens, chunks.fullest.lengths
        activations = Activations(self._local(model, placement), strategy, width, cpu, lengths)
        for stage, layers in enumerate(map(len, stage_layers(model.shape.layers, strategy.pp))):
            if call.kind is Kind.TRAIN:
                yield activations.training(tokens, layers=layers, stage=stage, chunks=chunks.count)
            elif call.kind is Kind.INFERENCE:
                yield activations.inferring(tokens, stage=stage, chunks=chunks.count)
            else:
                assert call.kind is Kind.GENERATE, f"{call.name} is a function, which uses no device memory"
                yield activations.generating(
                    tokens,
                    rows=chunks.fullest.sequences,
                    room=max(lengths) + work.room,
                    layers=layers,
                    stage=stage,
                    chunks=chunks.count,
                )

    def _elements(self, model: Stored, placement: Placement) -> list[int]:
        """Elements that each stage stores, padded so that data-parallel ranks can share out each bucket."""
        stages = self._local(model, placement).stage_elements(placement.strategy.pp)
        multiples = [placement.strategy.dp * buckets(elements) for elements in stages]
        return [-(-n // multiple) * multiple for n, multiple in zip(stages, multiples, strict=True)]

    def _local(self, model: Stored, placement: Placement) -> LocalSizes:
        key = (model.shape, model.head, placement.strategy.tp)
        return self._sizes.setdefault(key, LocalSizes(*key))


def _usable(kind: DeviceKind) -> int:
    return kind.memory_bytes - MESSAGE_BUFFERS * CHUNK_BYTES - (0 if kind.cpu else DRIVER_BYTES)


def _state(elements: int, dp: int, element_bytes: int) -> dict[str, int]:
    """Gradients, whole; of its shard the gradient, two moments, and the master copy of a lower precision."""
    parts = 3 + (element_bytes < _FLOAT32)
    return {"gradients": _FLOAT32 * elements, "optimizer": _FLOAT32 * parts * elements // dp}
