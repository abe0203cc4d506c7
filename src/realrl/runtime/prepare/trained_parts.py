"""Write notes about roles that are trained in part."""

from collections.abc import Iterator, Mapping, Sequence

from realrl.families.registry import ties_embeddings
from realrl.families.tensors import TensorSpec
from realrl.layout.sets import TUNED
from realrl.program.memory import StoredModel

_OUTSIDE = {
    "norm": "norm",
    "norm_bias": "norm",
    "lm_head": "head",
    "lm_head_bias": "head bias",
    "scalar_head": "head",
}
"""Names that notes use for parameters outside the layers."""
_FACTORS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def list_trained_parts(models: Mapping[str, StoredModel]) -> Iterator[str]:
    """Yield one line for each role that is trained in part, with the number of trained parameters and their names.

    Layers are counted from 0.
    """
    for role, model in models.items():
        if model.trained and TUNED in model.sets:
            tuned = model.sets[TUNED]
            tensors = [tensor for part in model.sets.values() for tensor in part.tensors]
            trained, whole = map(_count, (tuned.tensors, tensors))
            names = [_name_layers(tuned.layers)] if tuned.layers else []
            if model.part.adapters:
                names[0] = f"adapters of {names[0]}"
            names += dict.fromkeys(_OUTSIDE[t.parameter] for t in tuned.tensors if t.layer is None)
            tied = ties_embeddings(model.shape, model.head) and not model.part.adapters
            about = ", ".join(names) + "; the head is tied to the frozen embeddings" * tied
            yield f"models.{role} trains {trained} of {whole} parameters ({about})"


def _name_layers(layers: Sequence[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def _count(tensors: Sequence[TensorSpec]) -> str:
    """Format the number of parameters in tensors, such as `1.2 B` or `152 M`; numbers below a thousand in full."""
    number = sum(tensor.numel for tensor in tensors)
    for factor, letter in _FACTORS:
        if number >= 0.9995 * factor:
            value = number / factor
            return f"{value:.{0 if value >= 99.95 else 1}f} {letter}"
    return str(number)
