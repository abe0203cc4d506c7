"""Seconds of the parts of a call on one rank: measured where a profile has them, else from the roofline."""

from dataclasses import dataclass
from functools import cached_property

from realrl.planner.devices import DeviceKind
from realrl.planner.efficiency import Efficiency
from realrl.planner.profile import LayerKind, Profile
from realrl.planner.roofline import Roofline
from realrl.planner.sizes import LocalSizes


@dataclass(frozen=True)
class Part:
    """Seconds that the device works, and how much longer the host makes it take."""

    device: float
    host: float = 0.0

    @property
    def wait(self) -> float:
        """How long the device waits for the host."""
        return max(0.0, self.host - self.device)


@dataclass(frozen=True)
class Timing:
    """Times of one tensor rank of a model."""

    device: DeviceKind
    efficiency: Efficiency
    sizes: LocalSizes
    element_bytes: int
    sequence_parallel: bool = False
    profile: Profile | None = None

    @cached_property
    def roofline(self) -> Roofline:
        """What is used where nothing was measured."""
        return Roofline(self.device, self.efficiency, self.sizes, self.element_bytes, self.sequence_parallel)

    def forward(self, tokens: float, squares: float) -> Part:
        """A layer forward. squares: sum of the squared lengths."""
        measured = self._measured("forward", tokens, squares / tokens)
        if measured is not None:
            return Part(measured)
        return Part(self.roofline.layer(tokens, squares), self._host(self.efficiency.forward_operations))

    def backward(self, tokens: float, squares: float) -> Part:
        """A layer backward without recomputation, its gradient added to that of earlier micro-batches."""
        measured = self._measured("backward", tokens, squares / tokens)
        if measured is not None:
            return Part(measured)
        host = self._host(2 * self.efficiency.forward_operations)
        elements = sum(outputs * inputs for outputs, inputs in self.sizes.products)
        adding = self.roofline.traffic(self.efficiency.gradient_bytes * elements)
        return Part(self.roofline.layer_backward(tokens, squares) + adding, host)

    def head(self, tokens: float) -> float:
        """The head forward."""
        measured = self._measured("scalar" if self._scalar else "head", tokens)
        return self.roofline.head(tokens) if measured is None else measured

    def head_backward(self, tokens: float) -> float:
        """The head backward."""
        measured = self._measured("scalar_backward" if self._scalar else "head_backward", tokens)
        return self.roofline.head_backward(tokens) if measured is None else measured

    def decode(self, rows: float, context: float) -> Part:
        """A layer for one more token of `rows` sequences."""
        measured = self._measured("decode", rows, context)
        if measured is not None:
            return Part(measured)
        return Part(self.roofline.decode(rows, context), self._host(self.efficiency.decode_operations))

    def sample(self, rows: float) -> Part:
        """Head and sampling of one step."""
        measured = self._measured("sample", rows)
        if measured is not None:
            return Part(measured)
        return Part(self.roofline.sample(rows), self._host(self.efficiency.sampling_operations))

    def update(self, elements: float, dp: int) -> float:
        """One optimizer step on a rank that stores `elements` parameters."""
        measured = self._measured("optimizer", elements / dp)
        clear = self.roofline.traffic(self.efficiency.clear_bytes * elements)
        if measured is not None:
            return measured + clear
        return clear + self.roofline.traffic(self.efficiency.update_bytes * elements / dp)

    @property
    def _scalar(self) -> bool:
        return self.sizes.head == "scalar"

    def _host(self, operations: int) -> float:
        return operations * self.device.kernel_s

    def _measured(self, kind: LayerKind, size: float, context: float = 0) -> float | None:
        if self.profile is None:
            return None
        sizes = self.sizes
        return self.profile.seconds(kind, sizes.shape, self.element_bytes, sizes.tp, size, context)
