"""Parameter sets of a role: which of its tensors are stored, moved and trained together."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from realrl.families.adapters import ADAPTERS
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import TensorSpec

BASE, TUNED, QUANTISED = "base", "tuned", "quantised"
"""Set that every role has, the set of a role that is trained in part: what training updates, and the set of a role
whose matrices are quantised: these and their scales, as bytes."""


def element_width(parameter_set: str, width: int) -> int:
    """Find the bytes of an element of a set, in a model whose other sets have elements of `width` bytes."""
    return 1 if parameter_set == QUANTISED else width


@dataclass(frozen=True)
class TrainablePart:
    """Part of a model that training updates; by default all of it.

    The final norm and a head of its own always belong to it, but for adapters.
    """

    last_layers: int | None = None
    """Decoder layers that are trained, counted from the last one, without the embeddings; None for all layers."""
    freeze_embeddings: bool = False
    """Whether the embedding table is frozen, and with it a head that is tied to it."""
    adapters: bool = False
    """Whether only low-rank adapters are trained, and a scalar head."""
    quantised: bool = False
    """Whether matrices are quantised, so that nothing is trained."""

    @property
    def sets(self) -> Mapping[str, bool]:
        """Names of the role's sets in storage order -> whether training updates the set."""
        if self.quantised:
            return {BASE: True, QUANTISED: False}
        return {BASE: True} if self == WHOLE else {BASE: False, TUNED: True}

    def updates(self, tensor: TensorSpec, layers: int) -> bool:
        """Check whether training updates a tensor of a model with so many decoder layers."""
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
    """Global tensors of a role, in storage order, that lie in one buffer per layout and move together.

    A decoder layer's tensors are all in it or none of them is; adapters are in a set of their own, and so are
    quantised matrices.
    """

    tensors: tuple[TensorSpec, ...]
    trainable: bool
    """Whether training updates them: only then have they gradients and optimizer state."""

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of which it has tensors, ascending."""
        return tuple(sorted({tensor.layer for tensor in self.tensors if tensor.layer is not None}))


@cache
def build_parameter_sets(
    shape: ModelShape, head: Head, part: TrainablePart = WHOLE, *, trained: bool
) -> Mapping[str, ParameterSet]:
    """Divide a role's tensors into its sets, by name, in storage order.

    A role that is not `trained` itself is divided as `part` says, too: it may follow one that is.
    """
    assert part.quantised == (shape.quantised is not None), (
        "a quantised model has a set for what is quantised"
    )
    tensors = model_tensors(shape, head)
    found = {}
    for name, updated in part.sets.items():
        chosen = tuple(tensor for tensor in tensors if part.updates(tensor, shape.layers) == updated)
        found[name] = ParameterSet(chosen, trainable=trained and updated)
    return found
