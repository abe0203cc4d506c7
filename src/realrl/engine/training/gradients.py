"""Completion of gradients that several ranks hold in part, and elements that count once in norms."""

from torch import Tensor

from realrl.engine.flat import FlatBuffer
from realrl.engine.model import Model
from realrl.families.tensors import EMBEDDING, SCALAR_HEAD
from realrl.layout.ranges import kv_heads


def needs_completion(model: Model) -> bool:
    """Check whether `complete_gradients` has anything to do."""
    tied = model.shape.tied_embeddings and model.head == "lm" and model.parallel.pipeline.size > 1
    return tied or model.shard.shares_keys or (model.parallel.tensor.size > 1 and model.sequence)


def complete_gradients(model: Model, gradients: FlatBuffer) -> None:
    """All-reduce, in place, gradients of parameters that several ranks hold and each computed in part:

    norms under sequence parallelism (each rank saw its own tokens), key/value heads that neighbouring tensor
    ranks share (each served its own query heads), and an embedding table tied to the head of another stage.
    """
    tensor = model.parallel.tensor
    if tensor.size > 1 and model.sequence:
        for spec in gradients.tensors:
            if len(spec.shape) == 1:
                tensor.sum(gradients[spec.name])
    if model.shard.shares_keys:
        for spec in gradients.tensors:
            if spec.name.endswith(("k_proj.weight", "v_proj.weight")):
                _sum_shared_heads(model, gradients[spec.name])
    tied = model.shape.tied_embeddings and model.head == "lm"
    if tied and model.parallel.ends is not None:
        model.parallel.ends.sum(gradients[EMBEDDING])


def _sum_shared_heads(model: Model, gradient: Tensor) -> None:
    """Add up the gradients of shared key/value heads. gradient: [local heads * D, H]"""
    shape, keys = model.shape, model.shard.keys
    everyone = gradient.new_zeros(shape.kv_heads, shape.head_dim, gradient.shape[1])
    mine = gradient.view(len(keys), shape.head_dim, -1)
    everyone[keys.start : keys.stop] = mine
    mine.copy_(model.parallel.tensor.sum(everyone)[keys.start : keys.stop])


def owned(model: Model, name: str) -> tuple[int, int]:
    """Find the elements (first, end) of a local tensor that this rank counts in sums over the placement.

    So what several TP ranks or both ends of a pipeline hold is counted once.
    """
    spec = next(t for t in model.parameters.tensors if t.name == name)
    shard, end = model.shard, spec.numel
    if name == EMBEDDING and not shard.first:
        return 0, 0
    if shard.tp_index == 0:
        return 0, end
    if len(spec.shape) == 1 or name == SCALAR_HEAD:
        return 0, 0
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        below = kv_heads(shard.shape, shard.tp, shard.tp_index - 1).stop
        shared = max(0, below - shard.keys.start)
        return shared * shard.shape.head_dim * spec.shape[1], end
    return 0, end
