"""Completion of gradients that several ranks hold in part, and elements that count once in norms."""

import torch
from torch import Tensor

from realrl.engine.flat import FlatBuffer
from realrl.engine.local_set import LocalSet
from realrl.engine.model import Model
from realrl.families.tensors import Axis, Partial, Place, TensorSpec
from realrl.layout.ranges import kv_heads


def needs_completion(model: Model, trained: LocalSet) -> bool:
    """Check whether `complete_gradients` has anything to do for gradients of a parameter set of the model."""
    specs = trained.buffer.tensors
    tied = model.parallel.pipeline.size > 1 and any(
        spec.place is Place.BOTH_ENDS for spec in trained.layout.specs
    )
    shared = model.shard.shares_keys and any(map(_holds_kv_heads, specs))
    return tied or shared or any(_is_partial(model, spec) for spec in specs)


def complete_gradients(model: Model, gradients: FlatBuffer) -> None:
    """All-reduce, in place, gradients of parameters that several ranks hold and each computed in part:

    what every tensor-parallel rank applied to tokens or heads of its own (`TensorSpec.partial_gradient`), key/value
    heads that neighbouring ranks share (each served its own query heads), and an embedding table tied to the head
    of another stage.
    """
    tensor = model.parallel.tensor
    parts = [gradients[spec.name] for spec in gradients.tensors if _is_partial(model, spec)]
    if parts:
        # Together, because each of them is small.
        total = tensor.sum(torch.cat([part.flatten() for part in parts]))
        for part, added in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(added.view_as(part))
    if model.shard.shares_keys:
        for spec in gradients.tensors:
            if _holds_kv_heads(spec):
                _sum_shared_heads(model, gradients[spec.name])
    if model.parallel.ends is not None:
        for spec in gradients.tensors:
            if spec.place is Place.BOTH_ENDS:
                model.parallel.ends.sum(gradients[spec.name])


def _is_partial(model: Model, spec: TensorSpec) -> bool:
    """Check whether this rank's gradient of a tensor is a part of a sum over the tensor-parallel ranks."""
    if model.parallel.tensor.size == 1:
        return False
    match spec.partial_gradient:
        case Partial.NEVER:
            return False
        case Partial.SEQUENCE_PARALLEL:
            return model.sequence
        case Partial.TENSOR_PARALLEL:
            return True


def _holds_kv_heads(spec: TensorSpec) -> bool:
    if spec.partition is None or spec.partition.axis is not Axis.KV_HEADS:
        return False
    assert spec.partition.dim == 0, f"{spec.name}: key/value heads are rows"
    return True


def _sum_shared_heads(model: Model, gradient: Tensor) -> None:
    """Add up the gradients of shared key/value heads. gradient: [local heads * D, ...]"""
    keys = model.shard.keys
    mine = gradient.view(len(keys), -1)
    everyone = mine.new_zeros(model.shape.kv_heads, mine.shape[1])
    everyone[keys.start : keys.stop] = mine
    mine.copy_(model.parallel.tensor.sum(everyone)[keys.start : keys.stop])


def owned(model: Model, spec: TensorSpec) -> tuple[int, int]:
    """Find the elements (first, end) of a local tensor that this rank counts in sums over the placement.

    So what several TP ranks or both ends of a pipeline hold is counted once.
    """
    shard, end = model.shard, spec.numel
    if spec.place is Place.BOTH_ENDS and not shard.first:
        return 0, 0
    if shard.tp_index == 0:
        return 0, end
    if spec.partition is None:
        return 0, 0
    if _holds_kv_heads(spec):
        below = kv_heads(shard.shape, shard.tp, shard.tp_index - 1).stop
        shared = max(0, below - shard.keys.start)
        return shared * (end // len(shard.keys)), end
    return 0, end
