"""Seconds of the parts of a call on one rank: measured where a profile has them, else from the roofline."""

from dataclasses import dataclass
from functools import cached_property

from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.roofline import Roofline
from realrl.planner.profile.profile import WHOLE, CollectiveKind, LayerKind, Profile
from realrl.planner.workload.sizes import LocalSizes


@dataclass(frozen=True)
class DeviceHostTime:
    """Seconds that the device works, and how much longer the host makes it take."""

    device: float
    host: float = 0.0

    @property
    def wait(self) -> float:
        """How long the device waits for the host."""
        return max(0.0, self.host - self.device)


@dataclass(frozen=True)
class BatchSize:
    """A micro-batch as the model sees it."""

    tokens: float
    squares: float
    """Sum of the squared lengths."""
    buckets: float = 1.0
    """Groups of sequences of like length in which attention computes them."""

    @property
    def context(self) -> float:
        """Length of the sequences, if all had the same."""
        return self.squares / self.tokens


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

    def enter(self, size: BatchSize) -> float:
        """What comes before the first layer; the roofline leaves it out."""
        return (self._measured_of("enter", size) or 0.0) + self._more("bucket_enter", size)

    def enter_backward(self, size: BatchSize) -> float:
        """The gradient of the embedding table; the roofline leaves it out."""
        return self._measured_of("enter_backward", size) or 0.0

    def forward(self, size: BatchSize) -> DeviceHostTime:
        """A layer forward."""
        measured = self._measured_of("forward", size)
        if measured is not None:
            return DeviceHostTime(measured + self._more("bucket", size))
        return self._device_host_time(
            self.roofline.layer(size.tokens, size.squares), self.efficiency.forward_operations
        )

    def backward(self, size: BatchSize) -> DeviceHostTime:
        """A layer backward without recomputation, its gradient added to that of earlier micro-batches."""
        measured = self._measured_of("backward", size)
        if measured is not None:
            return DeviceHostTime(measured + self._more("bucket_backward", size))
        elements = sum(outputs * inputs for outputs, inputs in self.sizes.matmul_shapes)
        adding = self.roofline.traffic(self.efficiency.gradient_bytes * elements)
        device = self.roofline.layer_backward(size.tokens, size.squares) + adding
        return self._device_host_time(device, 2 * self.efficiency.forward_operations)

    def head(self, size: BatchSize) -> float:
        """The head forward."""
        measured = self._measured_of("scalar" if self._scalar else "head", size)
        return self.roofline.head(size.tokens) if measured is None else measured

    def head_backward(self, size: BatchSize) -> float:
        """The head backward."""
        measured = self._measured_of("scalar_backward" if self._scalar else "head_backward", size)
        return self.roofline.head_backward(size.tokens) if measured is None else measured

    def prefill(self, size: BatchSize) -> DeviceHostTime:
        """A layer forward that fills the cache; the roofline leaves the filling out."""
        measured = self._measured_of("prefill", size)
        return (
            self.forward(size) if measured is None else DeviceHostTime(measured + self._more("bucket", size))
        )

    def start(self, size: BatchSize, sequences: float) -> float:
        """All of a generation but its layers, until the first token of each sequence."""
        measured = self._measured_of("start", size)
        return (
            self.sample(sequences).device if measured is None else measured + self._more("bucket_enter", size)
        )

    def decode(self, rows: float, context: float) -> DeviceHostTime:
        """A layer for one more token of `rows` sequences."""
        measured = self._measured("decode", rows, context)
        if measured is not None:
            return DeviceHostTime(measured)
        return self._device_host_time(self.roofline.decode(rows, context), self.efficiency.decode_operations)

    def decode_step_overhead(self, rows: float) -> float:
        """What every stage does besides its layers; the roofline leaves it out."""
        return self._measured("turn", rows) or 0.0

    def sample(self, rows: float) -> DeviceHostTime:
        """Head and sampling of one step."""
        measured = self._measured("sample", rows)
        if measured is not None:
            return DeviceHostTime(measured)
        return self._device_host_time(self.roofline.sample(rows), self.efficiency.sampling_operations)

    def prepare(self, sequences: float, answer: float) -> float:
        """What a train call does before its first mini-batch; the roofline leaves it out."""
        return self._measured("prepare", sequences, answer) or 0.0

    def update(self, elements: float, dp: int) -> float:
        """One optimizer step on a rank that stores `elements` parameters."""
        measured = self._measured("optimizer", elements / dp)
        clear = self._moved("clear", 4 * elements, self.efficiency.clear_bytes * elements)
        if measured is None:
            return clear + self.roofline.traffic(self.efficiency.update_bytes * elements / dp)
        # Where nobody else has gradients, they are copied instead of added up.
        return measured + clear + (self._moved("copy", 4 * elements, 8 * elements) if dp == 1 else 0.0)

    def copy(self, number_bytes: float) -> float:
        """A copy inside device memory."""
        return self._moved("copy", number_bytes, 2 * number_bytes)

    def allocate(self, number_bytes: float) -> float:
        """Memory that is taken from the system, and cleared."""
        return self._moved("allocate", number_bytes, number_bytes)

    @property
    def _scalar(self) -> bool:
        return self.sizes.head == "scalar"

    def _device_host_time(self, device: float, operations: int) -> DeviceHostTime:
        """Seconds of a device, and of the host that hands it so many operations; on a CPU they are the same one."""
        host = operations * self.device.kernel_s
        return DeviceHostTime(device + host) if self.device.cpu else DeviceHostTime(device, host)

    def _moved(self, kind: CollectiveKind, number_bytes: float, traffic: float) -> float:
        measured = self.profile.collective(kind, 1, 1, number_bytes) if self.profile else None
        return self.roofline.traffic(traffic) if measured is None else measured

    def _measured_of(self, kind: LayerKind, size: BatchSize) -> float | None:
        return self._measured(kind, size.tokens, size.context)

    def _more(self, kind: LayerKind, size: BatchSize) -> float:
        """What groups of sequences after the first one add; the roofline leaves it out."""
        return (size.buckets - 1) * (self._measured(kind, size.tokens) or 0.0)

    def _measured(self, kind: LayerKind, size: float, context: float = 0) -> float | None:
        if self.profile is None:
            return None
        shape, tp = self.sizes.shape, 1 if kind in WHOLE else self.sizes.tp
        return self.profile.seconds(kind, shape, self.element_bytes, tp, size, context)
