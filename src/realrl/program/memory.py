"""What programs hold in device memory: parameters, gradients and optimizer states.

Activations, the key/value cache and the buffers of messages are not counted.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from realrl.config.errors import UserError
from realrl.config.shape import Head, ModelShape
from realrl.config.units import format_bytes
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.layout import Layout, layout
from realrl.layout.tensors import bucket_count
from realrl.plan.placement import ELEMENT_BYTES, Placement, Strategy
from realrl.program.instructions import Instruction, Load, Offload, Program, Reallocate, Release, Run, What

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

    def __str__(self) -> str:
        about = "parameters" if self.what == "parameters" else "gradients and optimizer"
        return f"{self.role} {about} ({self.layout})"


Holdings = Mapping[Item, int]
"""What a rank holds, in bytes."""


@dataclass(frozen=True)
class Peak:
    """When a rank holds most."""

    rank: int
    run: Run | None
    """What runs then, if anything does."""
    holdings: Holdings

    @property
    def bytes(self) -> int:
        """The sum."""
        return sum(self.holdings.values())


class Memory:
    """Costs programs in bytes of device memory. Roles that are not in `stored` count nothing."""

    def __init__(
        self,
        stored: Mapping[str, Stored],
        homes: Mapping[str, Placement],
        offloaded: Collection[tuple[str, What]],
        kept: Mapping[str, Sequence[Placement]],
    ) -> None:
        self.stored, self._homes, self._offloaded, self._kept = stored, homes, offloaded, kept
        self._layouts: dict[tuple[str, str], Layout] = {}
        self._numbers: dict[tuple[str, str, int, int], int] = {}

    def at_rest(self, rank: int) -> Holdings:
        """What a rank holds between steps."""
        held: dict[Item, int] = {}
        for role, home in self._homes.items():
            for what in get_args(What):
                if (role, what) not in self._offloaded:
                    held |= self._item(role, home, what, rank)
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

    def peak(self, program: Program) -> Peak:
        """When the rank of a program holds most; of equal moments, the first at which something runs."""
        best = Peak(program.rank, None, self.at_rest(program.rank))
        for instruction, held in self.timeline(program):
            now = Peak(program.rank, instruction if isinstance(instruction, Run) else None, held)
            if (now.bytes, now.run is not None) > (best.bytes, best.run is not None):
                best = now
        return best

    def check(self, programs: Sequence[Program], graph: DataflowGraph, device_memory: int) -> None:
        """UserError, naming the fullest device and what to change, if one has to hold more than it can."""
        fullest = max(programs, key=lambda program: self.peak(program).bytes)
        peak = self.peak(fullest)
        if peak.bytes <= device_memory:
            return
        biggest = sorted(peak.holdings, key=lambda item: -peak.holdings[item])
        items = ", ".join(f"{item} {format_bytes(peak.holdings[item])}" for item in biggest[:3])
        rest = f" and {len(biggest) - 3} more" if len(biggest) > 3 else ""
        raise UserError(
            f"plan: device {peak.rank} has to hold {format_bytes(peak.bytes)}"
            f"{f' during {peak.run.call}' if peak.run else ''}, more than its {format_bytes(device_memory)}, even"
            f" without activations: {items}{rest}; {self._remedy(fullest, device_memory, graph)}"
        )

    def _remedy(self, program: Program, device_memory: int, graph: DataflowGraph) -> str:
        """How to be rid of the biggest item that need not be there when most is held, if that can help."""
        for instruction, held in self.timeline(program):
            if isinstance(instruction, Run):
                needed = sum(size for item, size in held.items() if _needed(item, instruction, graph))
                if needed > device_memory:
                    return f"spread {instruction.call} over more devices, with a larger tp or pp"
        peak = self.peak(program)
        items = sorted(peak.holdings, key=lambda item: -peak.holdings[item])
        idle = next(item for item in items if peak.run is None or not _needed(item, peak.run, graph))
        if idle.layout != self._homes[idle.role].layout:
            change = f"remove {idle.role} from keep"
        else:
            key = "offload_optimizer" if idle.what == "optimizer" else "offload"
            change = f"add {idle.role} to {key}"
        return f"{change} in the plan, or spread {items[0].role} over more devices"

    def _item(self, role: str, placement: Placement, what: What, rank: int) -> dict[Item, int]:
        stored = self.stored.get(role)
        if stored is None or rank not in placement.ranks or (what == "optimizer" and not stored.trained):
            return {}
        dp, number = placement.strategy.dp, self._parameters(role, placement, rank)
        size = number * stored.width(placement.strategy)
        if what == "optimizer":
            # Gradients whole; of its shard gradient, two moments, and the master copy of a lower precision.
            parts = 3 + (stored.element_bytes < _FLOAT32)
            size = _FLOAT32 * (number + parts * number // dp)
        return {Item(role, placement.layout, what): size}

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


def _needed(item: Item, run: Run, graph: DataflowGraph) -> bool:
    """Whether a call needs the item while it runs."""
    trains = graph.call(run.call).kind is Kind.TRAIN
    return (run.role, run.placement.layout) == (item.role, item.layout) and (
        item.what == "parameters" or trains
    )
