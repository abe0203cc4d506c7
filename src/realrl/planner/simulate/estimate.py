"""Predicted timeline and memory of a plan."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from realrl.dataflow.call import Call
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Receive, Run


class PartKind(StrEnum):
    """Kind of a part of memory. The value is its text in reports.

    Only parameters, gradients and optimizer state belong to a role. Calls need the other parts while they run
    (`planner.memory`), and communicators always exist.
    """

    PARAMETERS = "parameters"
    OPTIMIZER = "gradients and optimizer"
    TRAINING = "parameters, gradients and optimizer"
    ACTIVATIONS = "activations"
    GATHERED = "gathered layers"
    CACHE = "cache"
    PACKED_WEIGHTS = "packed weights"
    GRAPHS = "graphs"
    LOGITS = "logits"
    FRAGMENTATION = "fragmentation"
    COMMUNICATORS = "NCCL communicators"


@dataclass(frozen=True)
class MemoryPart:
    """Part of a device's memory: state of a role, communicators, or working memory of a call.

    Its text, for example `actor parameters (copy dp1·tp2·pp1 @0..1)`, is its name in reports and JSON.
    """

    kind: PartKind
    role: str | None = None
    """Role to which the state belongs. None for communicators and working memory."""
    copy: str | None = None
    """Layout of a copy of the parameters outside the role's home. None at home."""
    host: bool = False
    """Whether this is the host copy of offloaded state, on devices whose memory is host memory."""

    def __str__(self) -> str:
        if self.role is None:
            return self.kind.value
        if self.host:
            # Gradients are discarded, not offloaded.
            kind = "optimizer" if self.kind is PartKind.OPTIMIZER else self.kind
            return f"{self.role} {kind} (host copy)"
        return f"{self.role} {self.kind}" + ("" if self.copy is None else f" (copy {self.copy})")


@dataclass(frozen=True, kw_only=True)
class CallEstimate:
    """Predicted time of one call of a step."""

    call: Call
    placement: Placement
    terms: Mapping[str, float]
    """Seconds on the call's mesh by additive term (`CallCost`)."""
    start: float
    """Seconds after the start of the step."""
    end: float
    flops: float
    """Model FLOPs without recomputation: 2 per parameter and token forward, 4 backward, plus attention."""
    peak_flops: float
    """Peak FLOP/s of all devices of the cluster in the call's data type. 0 for a function."""

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class MoveEstimate:
    """Predicted time and traffic of one reallocation of a step."""

    instruction: Reallocate
    before: str | None
    """Call that needs the parameters. None if a kept copy or a moving average is updated."""
    start: float
    seconds: float
    sent_bytes: int
    """Bytes sent between devices, in total."""
    network_bytes: int
    """Bytes sent between nodes, a part of `sent_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Execution of an instruction on one rank. Its seconds include waiting for other ranks."""

    rank: int
    step: int
    start: float
    seconds: float
    waiting: float
    """Part of `seconds` spent waiting for other participants, or for the function whose outputs are needed."""
    instruction: Instruction
    host: bool = False
    """Whether the instruction is a function, which runs on the host while the rank's other instructions
    continue."""


@dataclass(frozen=True)
class Footprint:
    """Peak memory of a device during one call, or during reallocations before it."""

    during: str
    """Name of the call."""
    parts: Mapping[MemoryPart, int]
    """Bytes by part."""

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device through a step."""

    rank: int
    capacity: int
    """Usable bytes."""
    resident: Mapping[MemoryPart, int]
    """Bytes held between steps, by part."""
    footprints: tuple[Footprint, ...]
    """Peak memory by call, in the order of the rank's program."""

    @cached_property
    def peak(self) -> Footprint:
        """Largest footprint, or the resident memory if the device takes part in no call."""
        return max(self.footprints, key=lambda f: f.bytes, default=Footprint("rest", self.resident))


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """Memory that offloaded state takes on the host of a node."""

    node: int
    capacity: int
    """Bytes that offloaded state may take."""
    bytes: int

    @property
    def fill(self) -> float:
        """Used fraction of the capacity. It is infinite if no host memory is left for offloaded state."""
        return self.bytes / self.capacity if self.capacity > 0 else math.inf if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted step of a plan. Times are in seconds."""

    plan: Plan
    step_seconds: float
    """Seconds of one isolated step, from its start until the last rank has finished it."""
    repeated_seconds: float
    """Steady-state seconds per step, in which ranks start the next step as soon as they finish one. If steps update
    different moving averages, this is the weighted mean over the kinds of steps."""
    tokens: float
    """Number of tokens of a step, prompts and answers together."""
    calls: Mapping[str, CallEstimate]
    """Calls by name, in order of their start."""
    moves: tuple[MoveEstimate, ...]
    slices: tuple[tuple[Slice, ...], ...]
    """Timeline of one step, by rank."""
    memory: tuple[DeviceMemory, ...]
    """Device memory, by rank."""
    hosts: tuple[NodeMemory, ...]
    """Host memory of the nodes that have a limit."""

    @cached_property
    def peak_device(self) -> DeviceMemory:
        """The device with the largest used fraction of its memory."""
        return max(self.memory, key=lambda device: device.peak.bytes / device.capacity)

    @property
    def peak_bytes(self) -> int:
        return self.peak_device.peak.bytes

    @property
    def fits(self) -> bool:
        """Whether every device and every host has enough memory."""
        return self.peak_bytes <= self.peak_device.capacity and self.full_host is None

    @property
    def full_host(self) -> NodeMemory | None:
        """Host whose memory is exceeded most. None if all hosts have enough memory."""
        return find_full_host(self.hosts)

    @property
    def tokens_per_second(self) -> float:
        """Steady-state throughput in tokens per second."""
        return self.tokens / self.repeated_seconds

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Fraction of the step that each rank spends on computing or moving parameters."""
        return tuple(
            sum(
                s.seconds - s.waiting
                for s in rank
                if isinstance(s.instruction, Run | Reallocate) and not s.host
            )
            / self.step_seconds
            for rank in self.slices
        )

    @property
    def utilisation(self) -> float:
        """Mean busy fraction of all ranks."""
        return sum(self.busy) / len(self.busy)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (MFU) in steady state."""
        models = (call for call in self.calls.values() if not call.call.is_function)
        return sum(call.flops / call.peak_flops for call in models) / self.repeated_seconds

    @cached_property
    def terms(self) -> Mapping[str, float]:
        """Device-seconds by term: the terms of model calls, `reallocation`, `offload`, `exchange` and `idle`.

        The terms add up to `step_seconds` times the number of devices.
        """
        total: defaultdict[str, float] = defaultdict(float)
        for call in (call for call in self.calls.values() if not call.call.is_function):
            for name, seconds in call.terms.items():
                total[name] += seconds * call.placement.mesh.size
        moving = {Reallocate: "reallocation", Load: "offload", Offload: "offload", Receive: "exchange"}
        total |= dict.fromkeys(moving.values(), 0.0)
        for slice_ in (s for rank in self.slices for s in rank):
            if type(slice_.instruction) in moving:
                total[moving[type(slice_.instruction)]] += slice_.seconds - slice_.waiting
        total["idle"] = self.step_seconds * len(self.slices) - sum(total.values())
        return dict(total)


LEVEL = 0.9
"""Probability with which a measured time lies in its interval."""

CONVINCING = 0.8
"""Least probability with which one plan must be faster than another to count as faster."""


@dataclass(frozen=True)
class Interval:
    """Seconds between which a time lies with probability `LEVEL`. It is as often below the interval as above it."""

    low: float
    high: float

    def __contains__(self, seconds: float) -> bool:
        return self.low <= seconds <= self.high


@dataclass(frozen=True)
class Outlook:
    """Expected step of a plan in comparison with other plans."""

    interval: Interval
    """Seconds of one isolated step."""
    repeated: Interval
    """Seconds per step in steady state."""
    fastest: float
    """Probability that no other plan of the comparison has a shorter step."""


def find_full_host(hosts: Sequence[NodeMemory]) -> NodeMemory | None:
    """Find the host whose memory is exceeded most. Returns None if all hosts have enough memory."""
    return max((host for host in hosts if host.fill > 1), key=lambda host: host.fill, default=None)
