"""What programs hold in device memory: parameters, gradients and optimizer states. Functions hold nothing.

What calls need besides while they run is said in `planner.memory`, the sum in `planner.footprints`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import bucket_count
from realrl.layout.layout import Layout, layout
from realrl.plan.placement import ELEMENT_BYTES, Placement, Strategy
from realrl.program.instructions import Instruction, Load, Offload, Program, Reallocate, Release, What

_FLOAT32 = 4


@dataclass(frozen=True)
class Stored:
    """How a role is stored: the sizes of its model, the bytes of a parameter, and whether it is trained."""

    shape: ModelShape
    head: Head
    element_bytes: int
    trained: bool

    def width(self, strategy: Strategy) -> int:
        """Bytes of a parameter, and of an activation, under a strategy."""
        return self.element_bytes if strategy.dtype is None else ELEMENT_BYTES[strategy.dtype]


@dataclass(frozen=True)
class Item:
    """Something a rank may hold: the parameters of a role in a layout, or all else that its training needs."""

    role: str
    layout: str
    what: What
    host: bool = False
    """Whether it is the copy in host memory of what is offloaded, where that is device memory."""

    def __str__(self) -> str:
        about = "parameters" if self.what == "parameters" else "gradients and optimizer"
        return f"{self.role} {about} ({self.layout}{', host' if self.host else ''})"


Holdings = Mapping[Item, int]
"""What a rank holds, in bytes."""


class Memory:
    """Costs programs in bytes of device memory. Roles that are not in `stored` count nothing."""

    def __init__(
        self,
        stored: Mapping[str, Stored],
        homes: Mapping[str, Placement],
        offloaded: Collection[tuple[str, What]],
        kept: Mapping[str, Sequence[Placement]],
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: whether devices are processes that share the host's memory, so that what is offloaded stays
        there: copies in host memory are never given back."""
        self._shared = shared
        self.stored, self._homes, self._offloaded, self._kept = stored, homes, offloaded, kept
        self._layouts: dict[tuple[str, str], Layout] = {}
        self._numbers: dict[tuple[str, str, int, int], int] = {}

    def in_host_memory(self) -> "Memory":
        """The same on devices that are processes which share the host's memory."""
        return Memory(self.stored, self._homes, self._offloaded, self._kept, shared=True)

    def home(self, role: str) -> str:
        """The layout in which a role lives."""
        return self._homes[role].layout

    @property
    def resting(self) -> tuple[Placement, ...]:
        """Placements in which something lies between steps."""
        return (*self._homes.values(), *(copy for copies in self._kept.values() for copy in copies))

    def at_rest(self, rank: int) -> Holdings:
        """What a rank holds between steps."""
        held: dict[Item, int] = {}
        for role, home in self._homes.items():
            for what in get_args(What):
                if (role, what) not in self._offloaded:
                    held |= self._item(role, home, what, rank)
                elif self._shared:
                    held |= self._item(role, home, what, rank, host=True)
            for copy in self._kept.get(role, ()):
                held |= self._item(role, copy, "parameters", rank)
        return held

    def timeline(self, program: Program) -> Iterator[tuple[Instruction, Holdings]]:
        """Each instruction of a step with what the rank holds once it has started."""
        held = dict(self.at_rest(program.rank))
        for instruction in program.instructions:
            match instruction:
                case Reallocate(role, _, target, None, _):
                    held |= self._item(role, target, "parameters", program.rank)
                case Load(role, placement, what):
                    held |= self._item(role, placement, what, program.rank)
            yield instruction, dict(held)
            match instruction:
                case Release(role, placement):
                    held.pop(Item(role, placement.layout, "parameters"), None)
                case Offload(role, placement, what):
                    held.pop(Item(role, placement.layout, what), None)

    def _item(
        self, role: str, placement: Placement, what: What, rank: int, *, host: bool = False
    ) -> dict[Item, int]:
        stored = self.stored.get(role)
        if stored is None or rank not in placement.ranks or (what == "optimizer" and not stored.trained):
            return {}
        dp, number = placement.strategy.dp, self._parameters(role, placement, rank)
        size = number * stored.width(placement.strategy)
        if what == "optimizer":
            # Of its shard two moments, and the master copy of a lower precision; on the device, gradients whole
            # and of its shard besides.
            parts = 2 + (stored.element_bytes < _FLOAT32)
            size = _FLOAT32 * (parts * number // dp if host else number + (parts + 1) * number // dp)
        return {Item(role, placement.layout, what, host): size}

    def _parameters(self, role: str, placement: Placement, rank: int) -> int:
        """Parameters of a role that a rank stores, padded so that data-parallel ranks can share them out."""
        key = (role, placement.layout, placement.pp_index(rank), placement.tp_index(rank))
        if key not in self._numbers:
            if (role, placement.layout) not in self._layouts:
                stored = self.stored[role]
                self._layouts[role, placement.layout] = layout(stored.shape, stored.head, placement)
            stored_here = [t.stored for t in self._layouts[role, placement.layout].tensors(rank)]
            multiple = placement.strategy.dp * bucket_count(stored_here)
            self._numbers[key] = -(-sum(tensor.numel for tensor in stored_here) // multiple) * multiple
        return self._numbers[key]
