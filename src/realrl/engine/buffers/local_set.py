"""A parameter set of a model as one rank holds it, and the view over all sets of a model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from realrl.engine.buffers.flat import FlatBuffer
from realrl.engine.buffers.offload import Offloadable, allocate, free
from realrl.families.tensors import TensorSpec
from realrl.layout.layout import Layout
from realrl.layout.limits import bucket_count


class LocalSet:
    """A rank's part of a parameter set in one flat buffer, whose memory can be released and allocated again."""

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """`rank` is global. The buffer is padded so that ranks with the same tensors can share out each bucket."""
        self.layout, self._rank = layout, rank
        stored = [tensor.stored for tensor in layout.tensors(rank)]
        multiple = layout.placement.strategy.replicas * bucket_count(sum(tensor.numel for tensor in stored))
        self.buffer = FlatBuffer(stored, dtype, device, multiple_of=multiple)
        self.memory = Offloadable([self.buffer.data])

    @property
    def resident(self) -> bool:
        """Whether the parameters are in device memory: neither freed nor offloaded."""
        return self.buffer.data.untyped_storage().nbytes() >= self.buffer.data.nbytes

    def free(self) -> None:
        """Release the memory of the parameters."""
        free(self.buffer.data)

    def allocate(self) -> None:
        """Allocate memory for the parameters again; until they are filled in, only padding has a value, zero."""
        allocate(self.buffer.data)
        self.buffer.padding.zero_()
        for tensor in self.layout.tensors(self._rank):
            if tensor.region.size != tensor.shape:
                self.buffer[tensor.region.tensor][tensor.region.size[0] :].zero_()


class Parameters:
    """Tensors by name, whichever of several buffers they lie in."""

    def __init__(self, buffers: Mapping[str, FlatBuffer]) -> None:
        """`buffers`: by parameter set; no two of them hold the same tensor."""
        self._of = {tensor.name: buffer for buffer in buffers.values() for tensor in buffer.tensors}
        self.tensors: tuple[TensorSpec, ...] = tuple(t for b in buffers.values() for t in b.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __getitem__(self, name: str) -> Tensor:
        """Find a tensor as a view, in its own shape."""
        return self._of[name][name]

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors of the same set as one; see `FlatBuffer.fused`."""
        buffer = self._of[names[0]]
        assert all(name in buffer for name in names), f"{names} are not all in one parameter set"
        return buffer.fused(*names)
