"""Parameter sets of a role: which of its tensors are stored, moved and trained together."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from realrl.families.adapters import ADAPTERS
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import TensorSpec, group_specs

BASE, TUNED, QUANTISED = "base", "tuned", "quantised"
"""Every role has a `base` set. A `tuned` set has the tensors that training updates if a role is trained only in
part. A `quantised` set has quantised matrices and their scales, as bytes."""


def element_width(parameter_set: str, width: int) -> int:
    """Return the bytes of one element of a parameter set. `width` is the number of bytes of elements that are not
    quantised."""
    return 1 if parameter_set == QUANTISED else width


@dataclass(frozen=True)
class TrainablePart:
    """Part of a model that training updates; by default all of it. Unless `adapters` is set, the final norm and an
    untied head always belong to it."""

    last_layers: int | None = None
    """Number of decoder layers that are trained, counted from the last; the embeddings are then frozen. None trains
    all layers."""
    freeze_embeddings: bool = False
    """Whether the embedding table is frozen, and with it a tied head."""
    adapters: bool = False
    """Whether only low-rank adapters and a scalar head are trained."""
    quantised: bool = False
    """Whether matrices are quantised, so that nothing is trained."""

    @property
    def sets(self) -> Mapping[str, bool]:
        """Names of the role's sets, in storage order -> whether training updates the set."""
        if self.quantised:
            return {BASE: True, QUANTISED: False}
        return {BASE: True} if self == WHOLE else {BASE: False, TUNED: True}

    def updates(self, tensor: TensorSpec, layers: int) -> bool:
        """Check whether training updates a tensor of a model with `layers` decoder layers."""
        if self.quantised:
            return tensor.quantised is None
        if self.adapters:
            return tensor.parameter in ADAPTERS or tensor.parameter == "scalar_head"
        if tensor.layer is not None:
            return self.last_layers is None or tensor.layer >= layers - self.last_layers
        return tensor.parameter != "embedding" or self == WHOLE


WHOLE = TrainablePart()


@dataclass(frozen=True)
class ParameterSet:
    """Global tensors of a role, in storage order, that share one buffer per layout and move together.

    A set has all tensors of a decoder layer or none. Adapters and quantised matrices are exceptions: they have
    sets of their own.
    """

    tensors: tuple[TensorSpec, ...]
    trainable: bool
    """Whether training updates the tensors, so that they have gradients and optimizer state."""

    @cached_property
    def stacks(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Tensors in storage order, grouped by parameter of the transformer."""
        return group_specs(self.tensors)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers with tensors in this set, ascending."""
        return tuple(sorted({tensor.layer for tensor in self.tensors if tensor.layer is not None}))


@cache
def build_parameter_sets(
    shape: ModelShape, head: Head, part: TrainablePart = WHOLE, *, trained: bool
) -> Mapping[str, ParameterSet]:
    """Divide a role's tensors into parameter sets. Returns the sets by name, in storage order. `part` applies even
    to a role that is not `trained`, because it may follow a role that is trained in part."""
    assert part.quantised == (shape.quantised is not None), (
        "a quantised model has a set for what is quantised"
    )
    tensors = model_tensors(shape, head)
    found = {}
    for name, updated in part.sets.items():
        chosen = tuple(tensor for tensor in tensors if part.updates(tensor, shape.layers) == updated)
        found[name] = ParameterSet(chosen, trainable=trained and updated)
    return found
