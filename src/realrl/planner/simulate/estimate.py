"""What is to be expected of a plan: when what happens on which device, and what the device holds meanwhile."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from realrl.dataflow.call import Call
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Receive, Run


@dataclass(frozen=True)
class CallEstimate:
    """One call of a step."""

    call: Call
    placement: Placement
    terms: Mapping[str, float]
    """Seconds on its mesh by named term (`cost.CallCost`); they add up."""
    start: float
    """Seconds after the start of the step."""
    end: float
    flops: float
    """Arithmetic of the model in all, without what is computed again: 2 per parameter and token forward, 4
    backward, and attention."""
    peak_flops: float
    """Of all devices of the cluster, per second, in the type that the call computes in; 0 for a function, which
    uses none."""

    @property
    def seconds(self) -> float:
        """What the call itself takes."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class MoveEstimate:
    """One reallocation of a step."""

    instruction: Reallocate
    before: str | None
    """The call that needs what comes; None where it refreshes a kept copy or mixes into another role."""
    start: float
    seconds: float
    sent_bytes: int
    """From device to device, in all."""
    network_bytes: int
    """What of it passes between nodes."""


@dataclass(frozen=True)
class Slice:
    """An instruction of one rank: when it has begun and how long it takes, waiting for other ranks included."""

    rank: int
    step: int
    start: float
    seconds: float
    waiting: float
    """Of `seconds`, what passes before all who take part are there, or before the function has ended whose outputs
    are needed."""
    instruction: Instruction
    host: bool = False
    """Whether it is a function, which runs beside the rank's other instructions."""


@dataclass(frozen=True)
class Footprint:
    """What a device holds at most during one call, or while parameters are moved before it."""

    during: str
    """Name of the call."""
    parts: Mapping[str, int]
    """Bytes by what they are: `actor parameters`, `actor gradients and optimizer`, `activations`, `cache`, ..."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class DeviceMemory:
    """One device through a step."""

    rank: int
    capacity: int
    """Bytes that a plan may use."""
    resident: Mapping[str, int]
    """What it holds between steps, by the same names."""
    footprints: tuple[Footprint, ...]
    """In the order of the rank's program."""

    @cached_property
    def peak(self) -> Footprint:
        """The largest; what it holds between steps where it takes part in nothing."""
        return max(self.footprints, key=lambda f: f.bytes, default=Footprint("rest", self.resident))


@dataclass(frozen=True)
class Estimate:
    """A plan's step. Times are in seconds."""

    plan: Plan
    step_seconds: float
    """One step alone, from its start until the last rank has ended it."""
    repeated_seconds: float
    """A step among many, where devices that have ended one begin with the next."""
    tokens: float
    """Tokens of a step, prompts and answers."""
    calls: Mapping[str, CallEstimate]
    """In the order they start."""
    moves: tuple[MoveEstimate, ...]
    slices: tuple[tuple[Slice, ...], ...]
    """Of one step, by rank."""
    memory: tuple[DeviceMemory, ...]
    """By rank."""

    @cached_property
    def peak_device(self) -> DeviceMemory:
        """The device that is fullest in relation to its memory."""
        return max(self.memory, key=lambda device: device.peak.bytes / device.capacity)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest device."""
        return self.peak_device.peak.bytes

    @property
    def fits(self) -> bool:
        """Whether no device has to hold more than it can."""
        return self.peak_bytes <= self.peak_device.capacity

    @property
    def tokens_per_second(self) -> float:
        """Of a step among many."""
        return self.tokens / self.repeated_seconds

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By rank, the share of the step in which it computes a call or moves parameters."""
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
        """Mean of `busy`."""
        return sum(self.busy) / len(self.busy)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the models' arithmetic in relation to what the cluster could do."""
        models = (call for call in self.calls.values() if not call.call.is_function)
        return sum(call.flops / call.peak_flops for call in models) / self.repeated_seconds

    @cached_property
    def terms(self) -> Mapping[str, float]:
        """Where time goes: device-seconds by term, own terms of calls of models, `reallocation`, `offload`,
        `exchange` and `idle`; they add up to `step_seconds` times the number of devices."""
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
