"""Device memory of calls, by named parts."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from realrl.config.errors import UserError
from realrl.config.values import format_bytes
from realrl.dataflow.call import Call, Kind
from realrl.families.sizes import estimate_attention_cost
from realrl.layout.limits import message_limits, pad_elements
from realrl.layout.sets import BASE, element_width
from realrl.plan.cluster import Cluster
from realrl.plan.placement import ELEMENT_BYTES, Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.memory.activations import Activations, Parts, choose, total
from realrl.planner.memory.communicators import count_layout_bytes, world_bytes
from realrl.planner.memory.packed_weights import packed_matrix_bytes
from realrl.planner.workload.batching import split_all_work
from realrl.planner.workload.generation import split_generations
from realrl.planner.workload.shard_sizes import SetSizes, size_shards
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import CallWork, Workload
from realrl.program.arrays import Bools, Ints, Real, truncate
from realrl.program.memory import StoredModel, TrainingState, count_training_state

_GIB = 1 << 30
DRIVER_BYTES = int(0.6 * _GIB)
"""GPU memory reserved for driver and libraries: the CUDA context and loaded kernels."""
PROCESS_BYTES = 4 * _GIB
"""Host memory reserved for the process of each device: torch, CUDA, and a file of weights while a model is
saved."""
FRAGMENTATION = 0.1
"""Fraction of dynamic memory that the caching allocator holds in addition, but cannot use.

Static memory consists of a few flat buffers and does not fragment. The KV cache, packed weights and the memory of
graphs do not fragment either, because a call allocates them once and holds them until it ends."""

_CANDIDATE_BYTES = 8
"""Bytes per candidate: its id in int32, and a log-probability in float32."""
_EXPERT_BYTES = 2
"""Bytes of an expert's number, an int16, which generation records and later calls replay."""
_LASTING = ("cache", "packed weights", "graphs")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device: `static` while it holds a role, `dynamic` while a call runs.

    The parts of `static` are parameters, gradients and optimizer. The parts of `dynamic` are activations, logits,
    cache, packed weights, graphs and fragmentation.
    """

    static: Mapping[str, int]
    dynamic: Mapping[str, int]

    @property
    def static_bytes(self) -> int:
        return sum(self.static.values())

    @property
    def bytes(self) -> int:
        return self.static_bytes + sum(self.dynamic.values())


class MemoryModel:
    """Memory model of calls on the devices of a cluster."""

    def __init__(self, spec: ClusterSpec, efficiency: Efficiency | None = None) -> None:
        """Build the memory model of a cluster. Raises UserError if a device kind has no memory left for a plan."""
        self.spec = spec
        self._capacities = [_usable(group, spec.cluster) for group in spec.groups]
        for group, capacity in zip(spec.groups, self._capacities, strict=True):
            if capacity <= 0:
                raise UserError(
                    f"{group.device.name}: {format_bytes(group.device.memory_bytes)} is less than drivers and"
                    " message buffers need"
                )
        self.efficiency = efficiency or Efficiency()
        self._needs: dict[object, tuple[MemoryNeed, ...]] = {}

    def capacity(self, rank: int) -> int:
        """Return the bytes that a plan may use on a rank's device.

        The driver, the communicator of all ranks and the buffers of reallocation use the rest of the device's
        memory.
        """
        return self._capacities[self.spec.group_index(rank)]

    def host_capacity(self, node: int) -> float:
        """Return the bytes of host memory that offloaded state may use on a node.

        CPUs have no limit, because their device memory is host memory.
        """
        group = next(g for first, g in self._groups_by_node if node < first)
        if group.device.cpu:
            return math.inf
        return float(group.host_memory - group.devices_per_node * PROCESS_BYTES)

    def communicators(self, placements: Iterable[Placement]) -> int:
        """Compute the bytes of NCCL communicators on a device that all these placements use. A CPU needs none."""
        on_gpus = [p for p in placements if not self.spec.device(p.mesh.first).cpu]
        return count_layout_bytes(on_gpus, self.spec.cluster)

    def parameters(self, model: StoredModel, placement: Placement) -> int:
        """Compute the bytes of the parameters on the device of a placement that stores most of them."""
        return int(self._stage_bytes(model, Strategies.of([placement.strategy])).max())

    def largest_sets(self, model: StoredModel, strategies: Strategies) -> dict[str, Ints]:
        """Compute, for each parameter set, the most bytes of it that any device stores, [strategies]."""
        return {name: size.max(axis=0) for name, size in self._set_bytes(model, strategies).items()}

    def least_base_bytes(self, model: StoredModel, strategies: Strategies) -> Ints:
        """Compute the bytes of the base set on the device that stores the least of it, [strategies]."""
        size = self._set_bytes(model, strategies)[BASE]
        there = np.arange(len(size))[:, None] < strategies.pp
        return np.where(there, size, size.max()).min(axis=0)

    def states(self, model: StoredModel, strategies: Strategies) -> tuple[Ints, Ints]:
        """Compute the most bytes that optimizer offloading frees on any device, and the most bytes that it copies.

        Offloading frees gradients and optimizer state. It copies the two moments and, if there are any, the master
        weights. It copies no gradients, because the next step computes new ones.
        """
        state = self._training_state(model, strategies, model.element_bytes)
        return state.bytes.max(axis=0), state.kept.max(axis=0)

    def stages(
        self, call: Call, model: StoredModel, placement: Placement, workload: Workload
    ) -> tuple[MemoryNeed, ...]:
        """Compute, for each pipeline stage, the memory need of a device that holds the call's role and runs the
        call.

        The call must have a model. Static memory includes gradients and optimizer only for a train call. Raises
        UserError if there are fewer records than data-parallel ranks.
        """
        # Only these facts about a device matter, not its amount of memory.
        device = self.spec.device(placement.mesh.first)
        key = (call, model, placement.strategy, device.cpu, device.groups_products, workload)
        if key not in self._needs:
            strategies = Strategies.of([placement.strategy])
            static, dynamic = self.needs(call, model, placement.mesh.first, strategies, workload)
            self._needs[key] = tuple(
                MemoryNeed(_pick(static, stage), _pick(dynamic, stage))
                for stage in range(placement.strategy.pp)
            )
        return self._needs[key]

    def needs(
        self, call: Call, model: StoredModel, first: int, strategies: Strategies, workload: Workload
    ) -> tuple[Parts, Parts]:
        """Compute static and dynamic parts as `stages` does, but under many strategies, [stages, strategies].

        `first` is any rank on the kind of device to plan for. Dynamic parts past a strategy's last stage have no
        meaning.
        """
        static = {"parameters": self._stage_bytes(model, strategies)}
        if call.kind is Kind.TRAIN:
            state = self._training_state(model, strategies, ELEMENT_BYTES[strategies.dtype_of(model)])
            static |= {"gradients": state.gradients, "optimizer": state.optimizer}
        return static, self._dynamic(call, model, strategies, workload, self.spec.device(first))

    def call(self, call: Call, model: StoredModel, placement: Placement, workload: Workload) -> MemoryNeed:
        """Compute the largest memory need among the pipeline stages."""
        return max(self.stages(call, model, placement, workload), key=lambda need: need.bytes)

    def _dynamic(
        self, call: Call, model: StoredModel, strategies: Strategies, workload: Workload, device: DeviceKind
    ) -> Parts:
        """Peak dynamic memory of each stage, [stages, strategies]. Entries past a strategy's last stage have no
        meaning."""
        cpu = device.cpu
        work = workload.work(call)
        generation = None
        if call.kind is Kind.GENERATE:
            generation = split_generations(work, strategies, cpu=cpu)
            chunks = generation.passes
        else:
            chunks = split_all_work(work, strategies, estimate_attention_cost(model.shape))
        whole_tokens = chunks.peak.tokens
        tokens = whole_tokens / strategies.cp
        sizes = size_shards(model, strategies.tp, strategies.ep)
        activations = Activations(
            sizes=sizes,
            # Generation does not use sequence parallelism, which pays off for long sequences only.
            strategies=strategies if generation is None else replace(strategies, sequence_parallel=False),
            dtype=strategies.dtype_of(model),
            cpu=cpu,
            lengths=chunks.peak.lengths,
            candidates=call.candidates,
            expert_spread=self.efficiency.expert_spread,
            decode_graphs=self.efficiency.decode_graphs
            and sizes.runs_ahead(strategies.dtype_of(model), exact=model.exact, device=device),
        )
        layers = strategies.stages.count_layers(model.shape.layers)
        stage = np.arange(len(layers))[:, None]
        last = stage == strategies.pp - 1
        parts: Parts
        if call.kind is Kind.TRAIN:
            updated = sizes.count_differentiated(strategies.stages)
            parts = activations.training(
                tokens, layers=updated, stage=stage, chunks=chunks.count, frozen_layers=layers - updated
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
                resumes=work.samples > 1 or work.environment is not None,
            )
        if cpu and model.exact:
            # Exact forward passes pack each matrix for its product, and free it afterwards.
            packed = packed_matrix_bytes(sizes, activations.dtype, head=last & (model.head == "lm"))
            parts = _add(parts, "packed weights", packed)
        records = -(-(work.items // work.minibatches) // strategies.dp)
        rank_tokens = records * work.mean
        parts = _add_candidates(parts, call, work, rank_tokens, whole_tokens, cpu=cpu, last=last)
        mixture = model.shape.mixture
        if mixture is not None and (call.records_experts or any(call.replays)):
            each = _EXPERT_BYTES * mixture.per_token
            if generation is not None:
                # The KV cache also holds the experts that generation records. Each CP rank has those of all tokens.
                parts = _add(parts, "cache", each * layers * generation.cache.tokens * strategies.cp)
            else:
                # Host memory, which is device memory on a CPU, holds the experts of all items twice: for the step
                # and for the call.
                held = 2 * each * model.shape.layers * work.minibatches * rank_tokens if cpu else 0
                parts = _add(parts, "activations", each * layers * tokens + held)
        passing = sum(size for name, size in parts.items() if name not in _LASTING)
        return {**parts, "fragmentation": truncate(FRAGMENTATION * np.asarray(passing))}

    @cached_property
    def _groups_by_node(self) -> list[tuple[int, NodeGroup]]:
        """Groups of nodes, each as a pair of the first node after the group and the group."""
        ends = accumulate(group.nodes for group in self.spec.groups)
        return list(zip(ends, self.spec.groups, strict=True))

    def _set_bytes(self, model: StoredModel, strategies: Strategies) -> dict[str, Ints]:
        """Bytes that each stage stores of each parameter set, [stages, strategies]."""
        width = ELEMENT_BYTES[strategies.dtype_of(model)]
        cut = strategies.zero == 3
        return {
            name: element_width(name, width) * self._pad_all(model, strategies, name, cut=cut)[0]
            for name in model.part.sets
        }

    def _stage_bytes(self, model: StoredModel, strategies: Strategies) -> Ints:
        return np.sum(list(self._set_bytes(model, strategies).values()), axis=0)

    def _training_state(
        self, model: StoredModel, strategies: Strategies, element_bytes: int
    ) -> TrainingState:
        """Training state on each stage, with parameters of `element_bytes` bytes."""
        name = next(name for name, updated in model.part.sets.items() if updated)
        elements, own = self._pad_all(model, strategies, name, cut=strategies.zero > 1)
        return count_training_state(strategies.zero, elements, own, element_bytes)

    def _pad_all(
        self, model: StoredModel, strategies: Strategies, name: str, *, cut: bool
    ) -> tuple[Ints, Ints]:
        """Number of elements of a set that each stage stores, padded so that every bucket divides evenly among the
        ranks that store the same. Also the number of elements in a rank's shares of the buckets. [stages,
        strategies]

        If `cut`, each of the ranks with the same parameters stores only its own rows.
        """
        local, stages = size_shards(model, strategies.tp, strategies.ep), int(strategies.pp.max())
        copies, experts = strategies.copies.tolist(), strategies.expert_copies.tolist()
        found = []
        pipelines = zip(strategies.pp.tolist(), strategies.vpp.tolist(), strict=True)
        for all_copies, expert_copies, (pp, vpp) in zip(copies, experts, pipelines, strict=True):
            sizes = local.cut_sets(all_copies, expert_copies)[name] if cut else local.sets[name]
            replicas = (1, 1) if cut else (all_copies, expert_copies)
            found.append(_pad_stages(sizes, *replicas, pp, vpp) + ((0, 0),) * (stages - pp))
        stored, own = np.array(found).transpose(2, 1, 0)
        return stored, own


def _pick(parts: Parts, stage: int) -> dict[str, int]:
    """Return the parts of a stage under the first strategy."""
    return {name: int(size[stage, 0]) for name, size in parts.items()}


@lru_cache(maxsize=4096)
def _pad_stages(
    sizes: SetSizes, replicas: int, expert_replicas: int, pp: int, vpp: int
) -> tuple[tuple[int, int], ...]:
    """Elements that each stage stores, padded for `replicas` ranks, with whole experts for `expert_replicas` ranks.
    Returns the elements of each stage, and those in a rank's shares."""
    stages = []
    for others, experts in zip(sizes.stage_elements(pp, vpp), sizes.stage_experts(pp, vpp), strict=True):
        padded = pad_elements(others, replicas), pad_elements(experts, expert_replicas)
        stages.append((sum(padded), padded[0] // replicas + padded[1] // expert_replicas))
    return tuple(stages)


def _usable(group: NodeGroup, cluster: Cluster) -> int:
    kind = group.device
    usable = kind.memory_bytes - message_limits(cpu=kind.cpu).staging_bytes
    return usable if kind.cpu else usable - DRIVER_BYTES - world_bytes(cluster)


def _add_candidates(
    parts: Parts, call: Call, work: CallWork, rank_tokens: Real, tokens: Real, *, cpu: bool, last: Bools
) -> Parts:
    """Add the memory of a call's candidates to the peak of each stage.

    `tokens` counts the tokens of a micro-batch, and `rank_tokens` the tokens of a mini-batch on a rank. If their
    ids are given, candidates are copied for a micro-batch. Training also copies them for the mini-batch and, on a
    GPU, for the whole step. Candidates that inference selects are moved to host memory, so they count only on a
    CPU.
    """
    if call.candidates is None:
        return parts
    each = _CANDIDATE_BYTES * call.candidates.count
    if call.candidates.ids is None:
        # At the end, the outputs of all micro-batches are concatenated, so they exist twice.
        outputs = {"activations": truncate(2 * each * rank_tokens)}
        return choose(last & (total(outputs) > total(parts)), outputs, parts) if cpu else parts
    if call.kind is Kind.TRAIN:
        tokens = tokens + rank_tokens * (1 if cpu else 1 + work.minibatches)
    return _add(parts, "activations", each * tokens)


def _add(parts: Parts, name: str, size: Real) -> Parts:
    return {**parts, name: parts.get(name, truncate(0)) + truncate(size)}
