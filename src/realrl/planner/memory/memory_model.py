"""Device memory of calls, by named parts."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from realrl.config.errors import UserError
from realrl.config.units import format_bytes
from realrl.dataflow.call import Call, Kind
from realrl.families.shape import Head, ModelShape
from realrl.layout.limits import bucket_count, message_limits
from realrl.layout.ranges import stage_layers
from realrl.layout.sets import BASE, TrainablePart, element_width
from realrl.plan.placement import Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.memory.activations import Activations, Parts
from realrl.planner.memory.candidates import add_candidates
from realrl.planner.memory.communicators import count_layout_bytes, world_bytes
from realrl.planner.memory.packed_weights import packed_matrix_bytes
from realrl.planner.memory.routed_experts import add_routed_experts
from realrl.planner.workload.batching import split_work
from realrl.planner.workload.generation import split_generation
from realrl.planner.workload.shard_sizes import LocalSizes, SetSizes
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from realrl.program.training_state import TrainingState, count_training_state

_GIB = 1 << 30
DRIVER_BYTES = int(0.6 * _GIB)
"""Memory reserved by driver and libraries on a GPU: the CUDA context and the kernels that are used."""
PROCESS_BYTES = 4 * _GIB
"""Host memory reserved for a device's process: torch, CUDA, and a file of weights while a model is saved."""
FRAGMENTATION = 0.1
"""Fraction of dynamic memory that the caching allocator holds but cannot use.

Static memory consists of a few flat buffers and does not fragment; nor do the cache, packed weights and the memory
of graphs, which a call holds from its beginning to its end."""
_LASTING = ("cache", "packed weights", "graphs")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device: `static` while it holds a role, `dynamic` while a call runs.

    static: parameters, gradients, optimizer. dynamic: activations, logits, cache, packed weights, graphs,
    fragmentation.
    """

    static: Mapping[str, int]
    dynamic: Mapping[str, int]

    @property
    def static_bytes(self) -> int:
        """Static bytes in total."""
        return sum(self.static.values())

    @property
    def bytes(self) -> int:
        """Static and dynamic bytes in total."""
        return self.static_bytes + sum(self.dynamic.values())


class MemoryModel:
    """Memory model of calls on the devices of a cluster."""

    def __init__(self, spec: ClusterSpec, efficiency: Efficiency | None = None) -> None:
        """Raise UserError if a device kind has no memory left for a plan."""
        self.spec = spec
        self._capacities = [_usable(group, spec.size) for group in spec.groups]
        for group, capacity in zip(spec.groups, self._capacities, strict=True):
            if capacity <= 0:
                raise UserError(
                    f"{group.device.name}: {format_bytes(group.device.memory_bytes)} are less than what drivers and"
                    " the buffers of messages take"
                )
        self.efficiency = efficiency or Efficiency()
        self._sizes: dict[tuple[ModelShape, Head, int, TrainablePart], LocalSizes] = {}
        self._needs: dict[object, tuple[MemoryNeed, ...]] = {}

    def capacity(self, rank: int) -> int:
        """Return the bytes that a plan may use on a rank's device.

        Driver, the communicator of all ranks and reallocation buffers are subtracted from its memory.
        """
        return self._capacities[self.spec.group_index(rank)]

    def host_capacity(self, node: int) -> float:
        """Return the bytes of host memory that offloaded state may use on a node; no limit where hosts compute."""
        group = next(g for first, g in self._groups_by_node if node < first)
        if group.device.cpu:
            return math.inf
        return float(group.host_memory - group.devices_per_node * PROCESS_BYTES)

    def communicators(self, placements: Iterable[Placement]) -> int:
        """Compute the bytes of NCCL communicators of a device that is part of these placements of models."""
        on_gpus = [p for p in placements if not self.spec.device(p.mesh.first).cpu]
        return count_layout_bytes(on_gpus, self._per_node(on_gpus[0].mesh.first)) if on_gpus else 0

    def parameters(self, model: StoredModel, placement: Placement) -> int:
        """Compute the bytes of a copy of the parameters on the peak device of a placement."""
        return max(self._stage_bytes(model, placement))

    def set_bytes(self, model: StoredModel, placement: Placement) -> dict[str, int]:
        """Compute the bytes of a copy of each parameter set, on the device that has most of it."""
        return {name: max(stages) for name, stages in self._set_bytes(model, placement).items()}

    def base_bytes(self, model: StoredModel, placement: Placement) -> int:
        """Compute the bytes of a copy of the base set, on the device that has least of it."""
        return min(self._set_bytes(model, placement)[BASE])

    def state(self, model: StoredModel, placement: Placement) -> int:
        """Compute the bytes that optimizer offloading frees on the peak device: gradients and optimizer state."""
        return max(state.bytes for state in self._states(model, placement, model.element_bytes))

    def kept_state(self, model: StoredModel, placement: Placement) -> int:
        """Compute the bytes copied to offload the optimizer: two moments, and master weights below float32.

        Gradients are discarded between steps.
        """
        return max(state.kept for state in self._states(model, placement, model.element_bytes))

    def stages(
        self, call: Call, model: StoredModel, placement: Placement, workload: Workload
    ) -> tuple[MemoryNeed, ...]:
        """Compute the memory need of a device per pipeline stage while it holds the call's role and runs the call.

        Static memory includes gradients and optimizer for a train call only. The call is no function.

        UserError where there are fewer records than data-parallel ranks.
        """
        cpu = self.spec.device(placement.mesh.first).cpu
        key = (call, model, placement.strategy, cpu, workload)
        if key not in self._needs:
            trained = self._states(model, placement, model.width(placement.strategy))
            stored = self._stage_bytes(model, placement)
            stages = zip(stored, trained, self._dynamic(call, model, placement, workload), strict=True)
            needs = []
            for size, state, dynamic in stages:
                static = {"parameters": size}
                if call.kind is Kind.TRAIN:
                    static |= {"gradients": state.gradients, "optimizer": state.optimizer}
                needs.append(MemoryNeed(static, dynamic))
            self._needs[key] = tuple(needs)
        return self._needs[key]

    def call(self, call: Call, model: StoredModel, placement: Placement, workload: Workload) -> MemoryNeed:
        """Compute the largest memory need among the pipeline stages."""
        return max(self.stages(call, model, placement, workload), key=lambda need: need.bytes)

    def _dynamic(
        self, call: Call, model: StoredModel, placement: Placement, workload: Workload
    ) -> Iterator[Parts]:
        """Peak dynamic memory of each stage."""
        strategy = placement.strategy
        work = workload.work(call)
        cpu = self.spec.device(placement.mesh.first).cpu
        generation = None
        if call.kind is Kind.GENERATE:
            generation = split_generation(work, strategy, cpu=cpu)
            chunks = generation.passes
            strategy = replace(strategy, sequence_parallel=False)  # it pays for long sequences
        else:
            chunks = split_work(work, strategy, self.efficiency.pass_chunks_per_stage)
        tokens = chunks.peak.tokens
        lengths = chunks.peak.lengths
        sizes = self._local(model, placement)
        activations = Activations(
            sizes=sizes,
            strategy=strategy,
            dtype=model.dtype_under(strategy),
            cpu=cpu,
            lengths=lengths,
            candidates=call.candidates,
            decode_graphs=self.efficiency.decode_graphs
            and sizes.runs_ahead(model.dtype_under(strategy), exact=model.exact, cpu=cpu),
        )
        updated = sizes.trained.stage_layers(strategy.pp)
        counts = [len(stage) for stage in stage_layers(model.shape.layers, strategy.pp)]
        last = strategy.pp - 1
        found: dict[tuple[int, ...], Parts] = {}
        for stage, layers in enumerate(counts):
            # Without gradients, stages between the first and the last one are alike.
            alike = (stage,) if call.kind is Kind.TRAIN else (min(stage, 1), stage == last, layers)
            if alike not in found:
                if call.kind is Kind.TRAIN:
                    parts: Parts = activations.training(
                        tokens,
                        layers=updated[stage],
                        stage=stage,
                        chunks=chunks.count,
                        frozen_layers=layers - updated[stage],
                    )
                elif call.kind is Kind.INFERENCE:
                    parts = activations.inferring(tokens, layers=layers, stage=stage, chunks=chunks.count)
                else:
                    assert generation is not None, f"{call.name} is a function, which uses no device memory"
                    parts = activations.generating(
                        tokens,
                        rows=generation.rows_per_batch,
                        cached=generation.cache.tokens,
                        batches=generation.batches,
                        layers=layers,
                        stage=stage,
                    )
                if cpu and model.exact:  # forward passes pack each matrix for its product
                    head = stage == last and model.head == "lm"
                    packed = packed_matrix_bytes(sizes, activations.dtype, head=head)
                    parts = {**parts, "packed weights": parts.get("packed weights", 0) + packed}
                parts = add_candidates(parts, call, work, strategy, tokens, cpu=cpu, last=stage == last)
                routed = tokens if generation is None else generation.cache.tokens
                parts = add_routed_experts(
                    parts, call, model.shape, work, strategy, routed, layers=layers, cpu=cpu
                )
                passing = sum(size for name, size in parts.items() if name not in _LASTING)
                found[alike] = {**parts, "fragmentation": int(FRAGMENTATION * passing)}
            yield found[alike]

    def _per_node(self, rank: int) -> int:
        return self.spec.groups[self.spec.group_index(rank)].devices_per_node

    @cached_property
    def _groups_by_node(self) -> list[tuple[int, NodeGroup]]:
        """Groups, each with the first node after it."""
        ends = accumulate(group.nodes for group in self.spec.groups)
        return list(zip(ends, self.spec.groups, strict=True))

    def _set_bytes(self, model: StoredModel, placement: Placement) -> dict[str, tuple[int, ...]]:
        """Bytes that each stage stores of each parameter set."""
        strategy, width = placement.strategy, model.width(placement.strategy)
        local = self._local(model, placement)
        sizes = local.cut_sets(strategy.dp) if strategy.shards_parameters else local.sets
        return {
            name: tuple(element_width(name, width) * n for n in _padded(of, strategy.replicas, strategy.pp))
            for name, of in sizes.items()
        }

    def _stage_bytes(self, model: StoredModel, placement: Placement) -> tuple[int, ...]:
        """Bytes of parameters that each stage stores."""
        return tuple(map(sum, zip(*self._set_bytes(model, placement).values(), strict=True)))

    def _states(
        self, model: StoredModel, placement: Placement, element_bytes: int
    ) -> tuple[TrainingState, ...]:
        """State of training on each stage, with parameters of a width."""
        strategy, local = placement.strategy, self._local(model, placement)
        sizes, replicas = local.trained, strategy.dp
        if strategy.zero > 1:
            name = next(name for name, updated in model.part.sets.items() if updated)
            sizes, replicas = local.cut_sets(strategy.dp)[name], 1
        elements = _padded(sizes, replicas, strategy.pp)
        return tuple(count_training_state(strategy, n, element_bytes) for n in elements)

    def _local(self, model: StoredModel, placement: Placement) -> LocalSizes:
        key = (model.shape, model.head, placement.strategy.tp, model.part)
        return self._sizes.setdefault(key, LocalSizes(*key))


@lru_cache(maxsize=4096)
def _padded(sizes: SetSizes, replicas: int, pp: int) -> tuple[int, ...]:
    """Elements that each stage stores, padded so that ranks with the same can share out each bucket."""
    stages = sizes.stage_elements(pp)
    multiples = [replicas * bucket_count(elements) for elements in stages]
    return tuple(-(-n // multiple) * multiple for n, multiple in zip(stages, multiples, strict=True))


def _usable(group: NodeGroup, world: int) -> int:
    kind = group.device
    usable = kind.memory_bytes - message_limits(cpu=kind.cpu).staging_bytes
    return usable if kind.cpu else usable - DRIVER_BYTES - world_bytes(world, group.devices_per_node)
