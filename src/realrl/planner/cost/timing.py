"""Time of the parts of a call on one rank. If a profile has measured a part, its time is interpolated. Otherwise
the roofline predicts it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from realrl.layout.kv_blocks import count_steps_per_look
from realrl.layout.sets import WHOLE as EVERYTHING
from realrl.plan.placement import ELEMENT_BYTES, Dtype
from realrl.planner.cluster.devices import DeviceKind, compute_thread_speedup
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.roofline import Roofline
from realrl.planner.profile.profile import WHOLE, CollectiveKind, LayerKind, Profile
from realrl.planner.workload.batching import Chunks
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import Sampling
from realrl.program.arrays import Floats, Real


@dataclass(frozen=True)
class DeviceHostTime:
    """Seconds of work on the device, and seconds that the host takes to launch this work."""

    device: Real
    host: Real = 0.0

    @property
    def wait(self) -> Real:
        """Seconds that the device waits for the host."""
        return np.maximum(0.0, self.host - self.device)


@dataclass(frozen=True)
class BatchSize:
    """Size of a rank's part of a micro-batch."""

    tokens: Real
    squares: Real
    """Sum of squared sequence lengths, divided by the CP degree."""

    @classmethod
    def of(cls, chunks: Chunks, strategies: Strategies) -> Self:
        """Find the size for each strategy; context-parallel ranks divide tokens and attention equally."""
        return cls(chunks.tokens / strategies.cp, chunks.squares / strategies.cp)

    @property
    def context(self) -> Real:
        """Mean sequence length, weighted by tokens."""
        return self.squares / self.tokens


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time model of the parts of a call on one TP rank, in seconds, without communication."""

    device: DeviceKind
    efficiency: Efficiency
    sizes: LocalSizes
    dtype: Dtype
    sequence_parallel: bool = False
    profile: Profile | None = None
    exact: bool = False
    """Whether forward passes are exact (`exact` of a recipe). Profiles measure ordinary passes, so a constant
    factor is applied."""

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @cached_property
    def roofline(self) -> Roofline:
        """Time model of parts that the profile has not measured."""
        return Roofline(
            device=self.device,
            efficiency=self.efficiency,
            sizes=self.sizes,
            dtype=self.dtype,
            sequence_parallel=self.sequence_parallel,
        )

    def embed(self, size: BatchSize) -> Real:
        """Predict the seconds of packing and embedding before the first layer. The roofline counts 0."""
        return _or_nothing(self._measured_of("embed", size))

    def embed_backward(self, size: BatchSize) -> Real:
        """Predict the seconds to compute the gradient of the embedding table. The roofline counts 0."""
        return _or_nothing(self._measured_of("embed_backward", size))

    def forward(self, size: BatchSize) -> DeviceHostTime:
        measured = self._measured_of("forward", size)
        if measured is not None:
            whole = measured * self._divided_share(size, backward=False)
            return DeviceHostTime(self._exact * (whole + self._unmeasured(size.tokens)))
        layer = self._exact * self.roofline.layer(size.tokens, size.squares)
        if self.sizes.ep > 1 and self.sizes.experts and not self.device.cpu:
            layer = layer + self.efficiency.expert_sync_operations * self.device.kernel_s
        return self._device_host_time(layer, self.efficiency.forward_operations + self._optional_operations)

    def backward(self, size: BatchSize) -> DeviceHostTime:
        """Predict the time of a layer's backward pass without recomputation, gradient accumulation included."""
        measured = self._measured_of("backward", size)
        if measured is not None:
            return DeviceHostTime(
                measured * self._trained_share(size) * self._divided_share(size, backward=True)
                + 2 * self.roofline.adapters(size.tokens)
            )
        adding = self.roofline.accumulate_gradients(size.tokens)
        device = self.roofline.layer_backward(size.tokens, size.squares) + adding
        return self._device_host_time(device, self._backward_operations)

    def weight_gradients(self, size: BatchSize) -> Real:
        """Predict the seconds of a layer's backward pass in which it computes the gradients of its matrices. If the
        pass is measured, the roofline predicts their share."""
        adding = self.roofline.accumulate_gradients(size.tokens)
        whole = self.roofline.layer_backward(size.tokens, size.squares) + adding
        return self.backward(size).device * self.roofline.weight_gradients(size.tokens) / whole

    def _divided_share(self, size: BatchSize, *, backward: bool) -> Real:
        """Time of a layer whose experts are divided among ranks, relative to the measured layer, whose experts are
        cut. The roofline predicts the ratio."""
        if self.sizes.ep == 1:
            return 1.0
        cut = replace(self.roofline, sizes=replace(self.sizes, ep=1))
        own, measured = (
            of.layer_backward(size.tokens, size.squares) + of.accumulate_gradients(size.tokens)
            if backward
            else of.layer(size.tokens, size.squares)
            for of in (self.roofline, cut)
        )
        return own / measured

    def _trained_share(self, size: BatchSize) -> Real:
        """Fraction of a measured backward pass that remains if the layer's matrices are frozen.

        The profile measured all gradients. The roofline predicts the ratio of the times with and without the
        gradients of matrices.
        """
        if not self.sizes.frozen_matrices:
            return 1.0
        bare = self.sizes.without_adapters()
        whole, frozen = (
            replace(self.roofline, sizes=replace(bare, part=part)).layer_backward(size.tokens, size.squares)
            for part in (EVERYTHING, bare.part)
        )
        return frozen / whole

    def head(self, size: BatchSize) -> Real:
        measured = self._measured_of("scalar" if self._scalar else "head", size)
        return self._exact * (self.roofline.head(size.tokens) if measured is None else measured)

    def likeliest(self, size: BatchSize) -> Real:
        """Predict the seconds to select the likeliest tokens after the head. Profiles do not measure this."""
        return self.roofline.likeliest(size.tokens)

    def head_backward(self, size: BatchSize) -> Real:
        measured = self._measured_of("scalar_backward" if self._scalar else "head_backward", size)
        return self.roofline.head_backward(size.tokens) if measured is None else measured

    def prefill(self, size: BatchSize) -> DeviceHostTime:
        """Predict the time of a layer's forward pass that fills the KV cache. The roofline ignores the writes to
        the cache."""
        measured = self._measured_of("prefill", size)
        if measured is None:
            return self.forward(size)
        measured = measured * self._divided_share(size, backward=False)
        return DeviceHostTime(self._exact * (measured + self._unmeasured(size.tokens)))

    def start(self, size: BatchSize) -> Real:
        """Predict the seconds of a prefill pass outside its full layers: the embedding, and the last layer's keys
        and values.

        The roofline counts only the last layer's projection to queries, keys and values.
        """
        measured = self._measured_of("start", size)
        if measured is not None:
            return measured + self.roofline.widen(self.sizes.matmul_shapes[:1])
        return self._exact * self.roofline.qkv(size.tokens)

    def decode(self, rows: Real, context: Real, cp: Real = 1) -> DeviceHostTime:
        """Predict the time of a layer in a decode step of `rows` sequences with `context` tokens each in the KV
        cache, which `cp` ranks divide."""
        measured = self._measured("decode", rows, context / cp)
        if measured is not None:
            if self.sizes.ep > 1:
                cut = replace(self.roofline, sizes=replace(self.sizes, ep=1))
                measured = measured * self.roofline.decode(rows, context, cp) / cut.decode(rows, context, cp)
            further = self._unmeasured(rows) + self.roofline.merge(rows, cp)
            return DeviceHostTime(self._exact * (measured + further))
        device = self._exact * self.roofline.decode(rows, context, cp)
        return self._launched(device, self.decode_operations + self.count_merge_operations(cp))

    def count_merge_operations(self, cp: Real) -> Real:
        """Count the kernels that prepare a layer's attention output for `cp` ranks, and merge their outputs."""
        return np.where(np.asarray(cp) > 1, self.efficiency.merge_operations, 0)

    @property
    def decode_operations(self) -> int:
        return self.efficiency.decode_operations + self._optional_operations

    def look(self, rows: Real) -> Real:
        """Predict the mean seconds per decode step that a GPU waits while the host looks at the new tokens of
        `rows` sequences.

        The host looks once in several steps. The result is 0 if decode steps were measured, because the measurement
        includes this wait.
        """
        if self.device.cpu or self._measured("decode_overhead", rows) is not None:
            return 0.0
        e = self.efficiency
        seconds = e.look_operations * self.device.kernel_s + e.look_row_s * rows
        return seconds / count_steps_per_look(cpu=False)

    @property
    def decodes_by_graphs(self) -> bool:
        """Whether decode steps are CUDA graphs, so that the host does not launch their kernels one by one."""
        runs_ahead = self.sizes.runs_ahead(self.dtype, exact=self.exact, device=self.device)
        return self.efficiency.decode_graphs and runs_ahead

    def decode_step_overhead(self, rows: Real) -> Real:
        """Predict the seconds of a decode step on every stage outside its layers. The roofline counts 0."""
        return _or_nothing(self._measured("decode_overhead", rows))

    def sample(self, rows: Real, sampling: Sampling) -> DeviceHostTime:
        """Predict the time of the head and of sampling in one decode step.

        A measured time holds for the sampling settings of the profile. Only the roofline depends on `sampling`.
        """
        measured = self._measured("sample", rows)
        if measured is not None:
            return DeviceHostTime(self._exact * measured)
        operations = self.roofline.count_sampling_operations(sampling)
        return self._launched(self._exact * self.roofline.sample(rows, sampling), operations)

    def prepare_experience(self, sequences: Real, answer: Real) -> Real:
        """Predict the seconds to compute the experience of a train call (such as advantages) before its first
        mini-batch. The roofline counts 0."""
        return _or_nothing(self._measured("prepare", sequences, answer))

    def update(self, elements: Real, own: Real) -> Real:
        """Predict the seconds of one optimizer step on a rank that stores `elements` trained parameters and updates
        `own` of them.

        A profile measures the update alone, without zeroing the float32 gradients of all `elements`.
        """
        measured = self._measured("optimizer", own)
        clear = self._moved("clear", 4 * elements, self.efficiency.clear_bytes * elements)
        if measured is None:
            return clear + self.roofline.traffic(self.efficiency.update_bytes * own)
        # Without data parallelism, gradients are copied instead of reduced: 4 bytes are read and 4 written.
        return (
            measured + clear + np.where(own == elements, self._moved("copy", 4 * elements, 8 * elements), 0.0)
        )

    def allocate(self, number_bytes: Real) -> Real:
        """Predict the seconds to allocate memory from the system, zeroing included."""
        return self._moved("allocate", number_bytes, number_bytes)

    @property
    def _exact(self) -> float:
        """Seconds of this call's forward pass relative to an ordinary one."""
        return self.efficiency.exact_forward if self.exact else 1.0

    def _unmeasured(self, rows: Real) -> Real:
        """Seconds of the parts of a layer's forward pass that profiles do not measure: adapters and widening."""
        return self.roofline.adapters(rows) + self.roofline.widen(self.sizes.widened_shapes)

    @property
    def _optional_operations(self) -> int:
        """Number of kernels of a forward pass that only some models have: adapters, widening, head norms and
        experts."""
        # An adapter needs a product with A and a scaling, and for each block a product with B and a sum. Widening a
        # matrix takes a cast and a product with scales.
        own_experts = self.sizes.experts // self.sizes.ep
        operations = sum(2 + 2 * len(adapter.blocks) + 8 * adapter.dora for adapter in self.sizes.adapters)
        operations += 2 * len(self.sizes.widened_shapes)
        operations += self.efficiency.head_norm_operations * self.sizes.qk_norm
        if self.sizes.experts:
            # A shared block has two products, an activation and a sum.
            operations += self.efficiency.expert_operations + 4 * self.sizes.shared_blocks
            operations += self.efficiency.expert_bias_operations * self.sizes.expert_biases
            operations += self.efficiency.expert_exchange_operations * (self.sizes.ep > 1)
            # Adapters of experts copy rows, multiply by A and B, scale and add.
            adapters = len(self.sizes.expert_adapters)
            operations += 5 * adapters
            # Without a grouped kernel, each expert has two products of its own, and two for each adapter.
            operations += 0 if self._groups_products else (2 + 2 * adapters) * own_experts
        return operations

    @property
    def _backward_operations(self) -> int:
        """Number of kernels of a layer's backward pass."""
        e, sizes = self.efficiency, self.sizes
        operations = e.backward_operations + e.head_norm_backward_operations * sizes.qk_norm
        operations += sum(4 + 4 * len(adapter.blocks) + 16 * adapter.dora for adapter in sizes.adapters)
        operations += 2 * len(sizes.widened_shapes)
        if sizes.experts:
            operations += e.expert_backward_operations + 8 * sizes.shared_blocks
            operations += e.expert_bias_backward_operations * sizes.expert_biases
            adapters = len(sizes.expert_adapters)
            operations += 8 * adapters
            operations += 0 if self._groups_products else (4 + 4 * adapters) * (sizes.experts // sizes.ep)
        return operations

    @property
    def _groups_products(self) -> bool:
        return self.sizes.groups_products(self.dtype, exact=self.exact, device=self.device)

    @property
    def _scalar(self) -> bool:
        return self.sizes.head == "scalar"

    def _launched(self, device: Real, operations: Real) -> DeviceHostTime:
        """Device and host seconds of `operations` kernels of a decode step, which a GPU may launch as one graph."""
        if not self.decodes_by_graphs:
            return self._device_host_time(device, operations)
        # The operator tables were measured in CUDA graphs, so their times include the gaps between kernels.
        gaps = 0.0 if self.roofline.operators else operations * self.efficiency.graph_kernel_s
        return DeviceHostTime(device + gaps)

    def _device_host_time(self, device: Real, operations: Real) -> DeviceHostTime:
        """Device seconds, and host seconds to launch `operations` kernels.

        On a CPU the same cores do both, so the host seconds are added to the device seconds.
        """
        host = operations * self.device.kernel_s
        return DeviceHostTime(device + host) if self.device.cpu else DeviceHostTime(device, host)

    def _moved(self, kind: CollectiveKind, number_bytes: Real, traffic: Real) -> Real:
        """Predict the seconds of a copy of `number_bytes`. If the profile has not measured this `kind`, predict the
        seconds of `traffic` bytes of memory traffic."""
        measured = self.profile.collective(kind, 1, 1, number_bytes) if self.profile else None
        return self.roofline.traffic(traffic) if measured is None else measured * self._slower

    @cached_property
    def _slower(self) -> float:
        """Expected time with this device's number of threads, relative to the time with the profile's number of
        threads."""
        then = None if self.profile is None else self.profile.threads
        if then is None or not self.device.cpu:
            return 1.0
        return compute_thread_speedup(then) / compute_thread_speedup(self.device.threads)

    def _measured_of(self, kind: LayerKind, size: BatchSize) -> Floats | None:
        return self._measured(kind, size.tokens, size.context)

    def _measured(self, kind: LayerKind, size: Real, context: Real = 0.0) -> Floats | None:
        if self.profile is None:
            return None
        shape = self.sizes.shape
        tp = 1 if kind in WHOLE else self.sizes.tp
        seconds = self.profile.seconds(kind, shape, self.dtype, tp, size, context)
        return None if seconds is None else seconds * self._slower


def _or_nothing(measured: Floats | None) -> Real:
    """Return the measured seconds, or 0 if there are none."""
    return 0.0 if measured is None else measured
