"""Parts of a device's memory."""

from dataclasses import dataclass
from enum import StrEnum


class PartKind(StrEnum):
    """Kind of a part; the value is its text in reports. Communicators, and what a call needs while it runs
    (`planner.memory`), belong to no role."""

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
    """Part of a device's memory: state of a role, or what a call needs while it runs.

    Its text, for example `actor parameters (copy dp1·tp2·pp1 @0..1)`, is its name in reports and JSON.
    """

    kind: PartKind
    role: str | None = None
    """Role whose state it is; None for what a call needs."""
    copy: str | None = None
    """Layout of a copy of the parameters outside the role's home; None at home."""
    host: bool = False
    """Whether it is the host copy of offloaded state, on devices whose memory is the host's."""

    def __str__(self) -> str:
        if self.role is None:
            return self.kind.value
        if self.host:
            # Gradients are discarded, not offloaded.
            kind = "optimizer" if self.kind is PartKind.OPTIMIZER else self.kind
            return f"{self.role} {kind} (host copy)"
        return f"{self.role} {self.kind}" + ("" if self.copy is None else f" (copy {self.copy})")
