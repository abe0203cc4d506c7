"""Device memory that programs hold: parameters, gradients and optimizer states. Functions hold none.
`planner.memory` models the memory that calls need while they run. `planner.simulate.plan_memory` adds up both."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from realrl.config.errors import UserError
from realrl.families.shape import Head, ModelShape
from realrl.layout.layout import Layout, build_layout
from realrl.layout.sets import (
    BASE,
    WHOLE,
    ParameterSet,
    TrainablePart,
    build_parameter_sets,
    element_width,
)
from realrl.plan.axes import Divided, axes_dividing
from realrl.plan.placement import ELEMENT_BYTES, Dtype, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.program.instructions import (
    Instruction,
    Load,
    Offload,
    Program,
    Reallocate,
    Release,
    Run,
    StateKind,
)
from realrl.program.text import name_parameters


@dataclass(frozen=True)
class StoredModel:
    """How a role is stored: the shape of its model, the dtype of its parameters, and the part that training
    updates."""

    shape: ModelShape
    head: Head
    dtype: Dtype
    trained: bool
    part: TrainablePart = WHOLE
    exact: bool = False
    """Whether a token's result in a forward pass is the same at every place in a batch (`exact` of a recipe)."""
    base: str | None = None
    """Name of the frozen weights in the set `base`, if roles with the same weights can share their memory."""

    @property
    def sets(self) -> Mapping[str, ParameterSet]:
        """Parameter sets by name, in storage order."""
        return build_parameter_sets(self.shape, self.head, self.part, trained=self.trained)

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter that is not quantised."""
        return ELEMENT_BYTES[self.dtype]

    def dtype_under(self, strategy: Strategy) -> Dtype:
        """Find the dtype of parameters and activations under a strategy."""
        return self.dtype if strategy.dtype is None else strategy.dtype

    def width(self, strategy: Strategy) -> int:
        """Find the bytes of an activation, and of a parameter that is not quantised, under a strategy."""
        return ELEMENT_BYTES[self.dtype_under(strategy)]


@dataclass(frozen=True)
class HeldState:
    """State that a rank may hold of a parameter set in a layout: its parameters, or its gradients and optimizer
    state."""

    role: str
    layout: str
    state: StateKind
    host: bool = False
    """Whether this is the host copy of offloaded state, on devices that use the host's memory."""
    parameter_set: str = BASE

    def __str__(self) -> str:
        about = "parameters" if self.state == "parameters" else "gradients and optimizer"
        name = name_parameters(self.role, self.parameter_set)
        return f"{name} {about} ({self.layout}{', host' if self.host else ''})"


def list_sharers(stored: Mapping[str, StoredModel]) -> list[tuple[str, ...]]:
    """Group the roles that have the same frozen weights; see `order_sharers`."""
    return order_sharers(
        {role: of.base for role, of in stored.items()}, {role: of.head for role, of in stored.items()}
    )


Holdings = Mapping[HeldState, int]
"""State that a rank holds -> its bytes."""


class Memory:
    """Memory model of programs, in bytes. Roles that are not in `stored` count as 0."""

    def __init__(
        self,
        stored: Mapping[str, StoredModel],
        homes: Mapping[str, Placement],
        offloaded: Collection[tuple[str, StateKind]],
        kept: Mapping[str, Sequence[Placement]],
        *,
        shared: bool = False,
    ) -> None:
        """`shared` says whether devices are CPU processes, which use the host's memory. Offloading then frees
        nothing, because host copies are never freed."""
        self._shared = shared
        self.stored, self._homes, self._offloaded, self._kept = stored, homes, offloaded, kept
        self.holders = find_holders(list_sharers(stored), homes)
        """Role whose set `base` shares memory with other roles between steps -> the role that holds this memory."""
        self._layouts: dict[tuple[str, str, str], Layout] = {}
        self._numbers: dict[tuple[str, str, str, tuple[int, ...]], tuple[int, int]] = {}

    def in_host_memory(self) -> "Memory":
        """Copy the memory model for devices that are CPU processes, which use the host's memory."""
        return Memory(self.stored, self._homes, self._offloaded, self._kept, shared=True)

    def home(self, role: str) -> str:
        """Find the layout that a role has between steps."""
        return self._homes[role].layout

    @property
    def resting(self) -> tuple[Placement, ...]:
        """Placements that hold state between steps: home placements, and placements of kept copies."""
        return (*self._homes.values(), *(copy for copies in self._kept.values() for copy in copies))

    def at_rest(self, rank: int) -> Holdings:
        """Compute the state that a rank's device holds between steps."""
        held: dict[HeldState, int] = {}
        for role, home in self._homes.items():
            for state in get_args(StateKind):
                if (role, state) not in self._offloaded:
                    held |= self._items(role, home, state, rank)
                elif self._shared:
                    held |= self._items(role, home, state, rank, host=True)
            for copy in self._kept.get(role, ()):
                held |= self._items(role, copy, "parameters", rank)
        return held

    def in_host(self, rank: int) -> Holdings:
        """Compute the offloaded state of a rank, which occupies host memory for the whole run."""
        held: dict[HeldState, int] = {}
        for role, state in self._offloaded:
            held |= self._items(role, self._homes[role], state, rank, host=True)
        return held

    def timeline(self, program: Program) -> Iterator[tuple[Instruction, Holdings]]:
        """Yield each instruction of a step with the state that the rank holds while it executes it."""
        held = dict(self.at_rest(program.rank))
        for instruction in program.instructions:
            match instruction:
                case Reallocate(role, _, target, None, _, name):
                    held |= self._item(role, target, "parameters", program.rank, name)
                case Load(role, placement, state, name):
                    held |= self._item(role, placement, state, program.rank, name)
            yield instruction, dict(held)
            match instruction:
                case Release(role, placement, name):
                    held.pop(HeldState(role, placement.layout, "parameters", parameter_set=name), None)
                case Offload(role, placement, state, name):
                    held.pop(HeldState(role, placement.layout, state, parameter_set=name), None)

    def _items(
        self, role: str, placement: Placement, state: StateKind, rank: int, *, host: bool = False
    ) -> dict[HeldState, int]:
        """Count the bytes of one kind of state for every parameter set of a role."""
        found: dict[HeldState, int] = {}
        for name in self.stored[role].sets if role in self.stored else ():
            elsewhere = name == BASE and self.holders.get(role, role) != role
            if not (elsewhere and placement.layout == self.home(role)):
                found |= self._item(role, placement, state, rank, name, host=host)
        return found

    def _item(
        self, role: str, placement: Placement, state: StateKind, rank: int, name: str, *, host: bool = False
    ) -> dict[HeldState, int]:
        stored = self.stored.get(role)
        if stored is None or rank not in placement.ranks:
            return {}
        if state == "optimizer" and not stored.sets[name].trainable:
            return {}
        strategy = placement.strategy
        if state == "optimizer":
            updated = (
                placement if strategy.zero == 1 else replace(placement, strategy=replace(strategy, zero=3))
            )
            # Under ZeRO-2 and ZeRO-3 a rank accumulates and updates only the rows that it would store under
            # ZeRO-3.
            number, own = self._parameters(role, name, updated, rank)
            counted = count_training_state(strategy.zero, number, own, stored.element_bytes)
            size = counted.kept if host else counted.bytes
        else:
            number, _ = self._parameters(role, name, placement, rank)
            size = number * element_width(name, stored.width(strategy))
        return {HeldState(role, placement.layout, state, host, name): size}

    def _parameters(self, role: str, name: str, placement: Placement, rank: int) -> tuple[int, int]:
        """Count the parameters of a set that a rank stores, padded so that ranks with the same parameters get equal
        shares of each bucket. Also count the parameters in its shares."""
        where = (role, name, placement.layout)
        axes, of_experts = axes_dividing(Divided.LAYERS, Divided.MATRICES), axes_dividing(Divided.EXPERTS)
        place = placement.coordinates(rank, axes) + placement.for_experts().coordinates(rank, of_experts)
        key = (*where, place)
        if key not in self._numbers:
            if where not in self._layouts:
                stored = self.stored[role]
                tensors = stored.sets[name].tensors
                self._layouts[where] = build_layout(stored.shape, stored.head, placement, tensors)
            self._numbers[key] = self._layouts[where].count_stored(rank)
        return self._numbers[key]


_FLOAT32 = 4


@dataclass(frozen=True)
class TrainingState:
    """Bytes of training state on one rank; numbers or arrays, depending on what `count_training_state` was
    given."""

    gradients: Any
    """Accumulated gradients."""
    optimizer: Any
    """Moments, master weights, and the reduced part of the gradients if data-parallel ranks accumulate all
    gradients."""
    kept: Any
    """Bytes that must survive between steps."""

    @property
    def bytes(self) -> Any:
        """All bytes in device memory."""
        return self.gradients + self.optimizer


def count_training_state(zero: int, elements: Any, own: Any, element_bytes: int) -> TrainingState:
    """Count the bytes of gradients and optimizer state on a rank that accumulates the gradients of `elements`
    parameters and updates `own` of them.

    Under ZeRO-1, `elements` counts all parameters that the rank computes with; otherwise, only the parameters that
    it updates. `element_bytes` is the width of a parameter. Float32 master weights exist for narrower parameters,
    and under ZeRO-2, which updates a copy of a rank's part.
    """
    masters = element_bytes < _FLOAT32 or zero == 2
    parts, reduced = 2 + masters, own < elements
    return TrainingState(
        gradients=_FLOAT32 * elements,
        optimizer=_FLOAT32 * (parts + reduced) * own,
        kept=_FLOAT32 * parts * own,
    )


def order_sharers(bases: Mapping[str, str | None], heads: Mapping[str, Head]) -> list[tuple[str, ...]]:
    """Group the roles that have the same frozen weights.

    `bases` maps each role to the name of the weights in its set `base`, or to None if no other role can have them.
    Language models come first in each group, because their weights include the head, which other roles do not need.
    """
    groups: dict[str, list[str]] = {}
    for role, base in bases.items():
        if base is not None:
            groups.setdefault(base, []).append(role)
    return [tuple(sorted(found, key=lambda role: heads[role] != "lm")) for found in groups.values()]


def find_holders(sharers: Iterable[tuple[str, ...]], homes: Mapping[str, Placement]) -> dict[str, str]:
    """For each role that shares its set `base` between steps, find the role that holds the set, which may be the
    role itself. Roles share the set if their home placements have the same layout. Other roles are left out."""
    holders: dict[str, str] = {}
    for group in sharers:
        at_home: dict[str, list[str]] = {}
        for role in group:
            if role in homes:
                at_home.setdefault(homes[role].layout, []).append(role)
        for alike in at_home.values():
            if len(alike) > 1:
                holders |= dict.fromkeys(alike, alike[0])
    return holders


def check_offloading(plan: Plan, holders: Mapping[str, str]) -> None:
    """Raise UserError if a plan offloads a role whose set `base` must stay in device memory for another role."""
    for role in plan.offload:
        if role in holders:
            others = [other for other in holders if holders[other] == holders[role] and other != role]
            raise UserError(
                f"plan: offload: {role} cannot be offloaded: it shares its frozen weights with {others[0]} in one"
                " layout, so they stay in device memory"
            )


EarlyLoads = Mapping[int, tuple[Load, ...]]
"""Position of a call in a program -> later loads that may start together with the call."""


def find_early_loads(program: Program, memory: Memory, needed: Mapping[str, int], limit: int) -> EarlyLoads:
    """Find loads that may start together with an earlier call. Returns the position of the call -> the loads
    between it and the next call.

    `needed` maps the name of each call of a model to the bytes of device memory that the call needs, including
    moves before it. The device may use `limit` bytes, such as the peak of the step, so that loading early does not
    raise the peak.
    """
    moments = list(memory.timeline(program))
    held = [sum(holdings.values()) for _, holdings in moments]
    found: dict[int, tuple[Load, ...]] = {}
    run, early = None, 0
    for position, (instruction, holdings) in enumerate(moments):
        if isinstance(instruction, Run) and instruction.role is not None:
            run, early = position, 0
        elif isinstance(instruction, Load) and run is not None:
            state = _state_of(instruction)
            size = holdings.get(state, 0)
            call, during = moments[run]
            assert isinstance(call, Run)
            most = max([needed[call.call], *held[run:position]])
            if size and state not in during and most + early + size <= limit:
                found[run] = (*found.get(run, ()), instruction)
                early += size
    return found


def _state_of(load: Load) -> HeldState:
    return HeldState(load.role, load.placement.layout, load.state, parameter_set=load.parameter_set)
