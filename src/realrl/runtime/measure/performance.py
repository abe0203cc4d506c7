"""Compute performance metrics of training steps: throughput, MFU, bandwidth, packing, and idle time of ranks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Dtype, Placement
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import DeviceKind, compute_thread_speedup
from realrl.planner.profile.profile import Profile
from realrl.planner.workload.flops import count_head_weights, count_pass_flops
from realrl.planner.workload.windows import average_context
from realrl.planner.workload.workload import count_read_weights
from realrl.program.memory import StoredModel
from realrl.runtime.measure.metric_names import IDLE_RANK, PERFORMANCE
from realrl.runtime.measure.step_timer import StepTimes
from realrl.runtime.measure.timing_log import AlignedSpan, StepSpans
from realrl.runtime.measure.work_done import WorkDone


def find_peak_flops(device: DeviceKind, dtype: Dtype, profile: Profile | None = None) -> float | None:
    """Return the peak FLOP/s of a device for matrix products in a data type.

    The peak comes from the data sheet or the cluster file. If neither has one, as for a CPU, it is the highest rate
    that a profile of such devices has measured. Returns None without such a profile.
    """
    if ("fp32_flops" if dtype == "float32" else "bf16_flops") not in device.guessed:
        return device.flops(dtype)
    return _scale(device, profile, None if profile is None else profile.peak_flops(dtype))


def find_peak_bandwidth(device: DeviceKind, profile: Profile | None = None) -> float | None:
    """Return the bandwidth of device memory in bytes per second, from the same sources as `find_peak_flops`."""
    if "memory_bytes_per_s" not in device.guessed:
        return device.memory_bytes_per_s
    return _scale(device, profile, None if profile is None else profile.memory_bytes_per_s())


def _scale(device: DeviceKind, profile: Profile | None, measured: float | None) -> float | None:
    """Scale a measured rate of a profile to the number of threads of a device; None for a profile of other
    devices."""
    if profile is None or measured is None or profile.device != device.name:
        return None
    if profile.threads is None or not device.cpu:
        return measured
    return measured * compute_thread_speedup(device.threads) / compute_thread_speedup(profile.threads)


MOST_RANKS = 64
"""Maximum number of ranks for which each rank has its own metric of idle time."""


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Computes the performance metrics of steps from the times of all ranks.

    `perf/NAME` is about the whole step, `perf/CALL/NAME` about one call. docs/runs.md defines the metrics.
    """

    graph: DataflowGraph
    plan: Plan
    models: Mapping[str, StoredModel]
    """Models by role."""
    spec: ClusterSpec | None
    """Devices of the run; None if their kind is unknown, and therefore their peak FLOP/s too."""
    profile: Profile | None

    @property
    def missing(self) -> str | None:
        """A sentence that names missing metrics and the reason; None if all are present."""
        if self.spec is None:
            return "MFU and decode bandwidth are left out: the kind of these devices, and so their peak, is unknown"
        calls = [call for call in self.graph.calls if not call.is_function]
        if all(self._peak_flops(call, self.plan[call.name].ranks) is not None for call in calls):
            return None
        return (
            "MFU and decode bandwidth are left out: the peak of a CPU is not known; realrl profile measures it for"
            " `profile`, and a cluster file may give it"
        )

    def compute(self, ranks: Sequence[StepTimes], step: StepSpans) -> dict[str, float]:
        """Compute the metrics of a step from the times of all ranks and their alignment on one clock."""
        spans: defaultdict[str, list[AlignedSpan]] = defaultdict(list)
        for span in step.spans:
            spans[span.name].append(span)
        found: dict[str, float] = {}
        shares: list[float | None] = []
        for call in self.graph.order:
            if call.is_function or call.name not in spans:
                continue
            done = _CallDone.of(call, self.plan[call.name], spans[call.name])
            found |= {f"{call.name}/{name}": value for name, value in self._of_call(done)}
            peak = self._peak_flops(call, range(self.plan.cluster.size))
            shares.append(None if peak is None else self._flops(done) / peak)
        tokens = [times.tokens for times in ranks if times.tokens is not None]
        whole = dict(self._of_step(step, sum(tokens), shares, self._idle(ranks, step)))
        return {f"{PERFORMANCE}{name}": float(f"{value:.5g}") for name, value in (whole | found).items()}

    def _of_step(
        self, step: StepSpans, tokens: int, shares: Sequence[float | None], idle: Sequence[float]
    ) -> Iterator[tuple[str, float]]:
        yield "tokens_per_s", tokens / step.seconds
        known = [share for share in shares if share is not None]
        if len(known) == len(shares) > 0:
            yield "mfu", sum(known) / step.seconds
        yield "idle", sum(idle) / len(idle)
        if len(idle) > 1:
            yield "idle_max", max(idle)
        if 1 < len(idle) <= MOST_RANKS:
            yield from ((f"{IDLE_RANK}{rank}", share) for rank, share in enumerate(idle))

    def _of_call(self, done: "_CallDone") -> Iterator[tuple[str, float]]:
        call, seconds, strategy = done.call, done.seconds, done.place.strategy
        yield "seconds", seconds
        if not done.work:
            return
        generates = call.kind is Kind.GENERATE
        tokens, scored = done.sum("tokens"), done.sum("scored")
        yield "tokens_per_s", (scored if generates else tokens) / seconds
        if generates:
            yield "prompt_tokens_per_s", (tokens - scored) / seconds
        peak = self._peak_flops(call, done.place.ranks)
        if peak is not None:
            yield "mfu", self._flops(done) / (seconds * peak)
        if generates:
            yield from self._of_decoding(done)
            return
        packed = tokens + done.sum("spared")
        yield "packing", packed / max(packed, done.sum("micro_batches") * strategy.micro_batch_tokens)
        if done.sum("padded_tokens"):
            yield "padding", packed / done.sum("padded_tokens")

    def _of_decoding(self, done: "_CallDone") -> Iterator[tuple[str, float]]:
        rows, steps = done.sum("decode_rows"), done.sum("decode_steps")
        if not rows:
            return
        yield "decode_rows", done.sum("decoded") / rows
        # A replica has generated several times if samples are taken in rounds, or handed on in portions.
        prefill = sum(work.prefill_seconds for work in done.work) / done.place.strategy.dp
        bandwidth = self._bandwidth(done.place.ranks)
        if bandwidth is None or prefill >= done.seconds:
            return
        model = self.models[done.call.model_role]
        shape, width = model.shape, model.width(done.place.strategy)
        # Count only reads, not the writes that widening quantised matrices needs.
        stored = width if shape.quantised is None else 1
        weights = float(stored * count_read_weights(shape, rows / steps))
        weights += width * count_head_weights(shape, model.head)
        cache = 2 * shape.layers * shape.kv_heads * shape.head_dim
        decoded = max(1, done.sum("decoded"))
        cached = float(decoded * average_context(shape, done.sum("cached") / decoded))
        # Context-parallel ranks divide the cache, but each of them reads the weights.
        read = steps * weights * done.place.strategy.cp + width * cached * cache
        yield "decode_bandwidth", read / (bandwidth * (done.seconds - prefill))

    def _flops(self, done: "_CallDone") -> float:
        sums = {name: done.sum(name) for name in ("tokens", "scored", "squares")}
        return count_pass_flops(self.models[done.call.model_role], done.call.kind, **sums)

    def _peak_flops(self, call: Call, ranks: Sequence[int]) -> float | None:
        """Add up the peak FLOP/s of the devices of these ranks, in the dtype in which a call computes."""
        dtype = self.models[call.model_role].dtype_under(self.plan[call.name].strategy)
        return self._sum_devices(ranks, lambda device: find_peak_flops(device, dtype, self.profile))

    def _bandwidth(self, ranks: Sequence[int]) -> float | None:
        """Add up the memory bandwidth of the devices of these ranks."""
        return self._sum_devices(ranks, lambda device: find_peak_bandwidth(device, self.profile))

    def _sum_devices(self, ranks: Sequence[int], find: Callable[[DeviceKind], float | None]) -> float | None:
        """Add up a figure over the devices of these ranks; None if it is unknown for one of them."""
        if self.spec is None:
            return None
        total = 0.0
        for index, count in Counter(map(self.spec.group_index, ranks)).items():
            figure = find(self.spec.groups[index].device)
            if figure is None:
                return None
            total += count * figure
        return total

    def _idle(self, ranks: Sequence[StepTimes], step: StepSpans) -> list[float]:
        """Compute, for each rank, the share of the step in which it executes no call, reallocation or copy."""
        busy = [times.copying for times in ranks]
        generates = {call.name for call in self.graph.calls if call.kind is Kind.GENERATE}
        for span in step.spans:
            if span.alone:
                continue  # a function that runs at the same time as other work, or a wait for a function
            # Replicas generate independently of each other. In other calls, all ranks wait for each other.
            group_of = self.plan[span.name].item_index if span.name in generates else lambda _: 0
            for rank, seconds in span.measure_busy(group_of).items():
                busy[rank] += seconds
        return [min(1.0, max(0.0, 1 - seconds / step.seconds)) for seconds in busy]


@dataclass(frozen=True)
class _CallDone:
    """All executions of a call in a step: placement, seconds, and the work of each replica."""

    call: Call
    place: Placement
    seconds: float
    work: Sequence[WorkDone]

    @classmethod
    def of(cls, call: Call, place: Placement, spans: Sequence[AlignedSpan]) -> "_CallDone":
        found = [span.parts[rank].work for span in spans for rank in place.output_ranks if rank in span.parts]
        work = [of for of in found if of is not None]
        return cls(call, place, max(1e-9, sum(span.seconds for span in spans)), work)

    def sum(self, name: str) -> int:
        """Add up a count over all replicas."""
        return sum(getattr(work, name) for work in self.work)
