"""Candidate: one way to run a call, with its costs."""

from dataclasses import dataclass

from realrl.plan.axes import Degrees
from realrl.plan.placement import Dtype, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Placement and offloading of a call with its costs; bytes are those of the peak device of the mesh."""

    placement: Placement
    seconds: float
    """Seconds of the call itself, once its parameters and inputs are in place, without `capture_seconds`."""
    weights_bytes: float
    """Bytes of a copy of the role's parameters in this layout."""
    resident_bytes: float
    """Bytes that the role keeps in device memory between calls if this is its primary placement."""
    working_bytes: float
    """Further bytes that the call needs while it runs, beyond resident bytes and a copy of the parameters."""
    base_bytes: float = 0.0
    """Part of the resident bytes: frozen weights that other roles share if their home has this layout."""
    communicator_bytes: float = 0.0
    """Bytes of the NCCL communicators of this layout; calls of equal layouts share them."""
    host_bytes: float = 0.0
    """Bytes of host memory for offloaded state, per device; only at the role's primary placement."""
    offload: bool = False
    """Whether the role's parameters are offloaded between uses; only at the role's primary placement."""
    offload_optimizer: bool = False
    """Whether gradients and optimizer state are offloaded between uses; only at the primary placement."""
    keep: bool = False
    """Whether copies of the role's parameters in other layouts are kept between uses, and refreshed whenever the
    parameters change; only at the role's primary placement."""
    load_seconds: float = 0.0
    """Seconds to load offloaded parameters."""
    unload_seconds: float = 0.0
    """Seconds to offload parameters again: 0 if they never change."""
    capture_seconds: float = 0.0
    """Further seconds of the call if its parameters have moved in this step (`CallCost.captures`)."""

    def bytes_alone(self, *, is_home: bool) -> float:
        """Return the bytes a device needs at least while the call runs.

        `is_home`: whether this is the role's primary placement.
        """
        if not is_home:
            return self.working_bytes + self.weights_bytes + self.communicator_bytes
        held = self.resident_bytes + self.communicator_bytes
        return held + self.working_bytes + self.weights_bytes * self.offload

    @property
    def layout(self) -> tuple[int, Degrees, bool, Dtype | None]:
        """Key of the layout of the parameters: equal keys mean equal layouts."""
        s = self.placement.strategy
        return self.placement.mesh.first, s.degrees, s.shards_parameters, s.dtype
