"""Finalization of gradients that several ranks hold in part, and elements that count once in norms."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from realrl.engine.buffers import FlatBuffer, LocalSet
from realrl.engine.model import Model
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.families.tensors import Partial, Place, TensorSpec, Units
from realrl.layout.local_tensors import LocalTensor
from realrl.layout.ranges import kv_heads


class Accumulation(Protocol):
    """Gradients of a parameter set, and the optimizer of what this rank updates of it."""

    gradients: FlatBuffer
    """What this rank has accumulated."""
    optimizer: ShardedAdamW
    updated: LocalSet
    """Tensors, or rows of them, that the optimizer works on; a rank may update only a part of these."""

    @property
    def persistent(self) -> list[Tensor]:
        """Tensors that must survive between steps, besides the model's parameters."""
        ...

    def agree_on_passes(self, count: int) -> int:
        """Agree on the number of micro-batches that ranks take part in, at least `count`."""
        ...

    def idle_forward(self) -> None:
        """Take part in a forward pass of other ranks."""
        ...

    def idle_backward(self) -> None:
        """Take part in a backward pass of other ranks."""
        ...

    def start_backward(self, *, last: bool) -> None:
        """Begin a backward pass, the last one of a mini-batch or another."""
        ...

    def finish_backward(self) -> None:
        """End a backward pass."""
        ...

    def finalize(self) -> Mapping[str, Tensor]:
        """Complete the gradients of a mini-batch; those of some tensors, summed over ranks already, by name."""
        ...

    def spread(self) -> None:
        """Bring what has been updated to where the model computes with it, as far as the optimizer has not."""
        ...

    def adopt(self) -> None:
        """Take over parameters that have been given other values, as far as the optimizer does not."""
        ...


def list_late_tensors(model: Model, trained: LocalSet) -> set[str]:
    """List the tensors of a parameter set whose gradients `finalize_model_grads` changes in place."""
    tied = model.groups.pipeline.size > 1
    return {
        spec.name
        for spec in trained.buffer.tensors
        if (tied and spec.place is Place.BOTH_ENDS) or (model.shard.shares_keys and _holds_kv_heads(spec))
    }


def finalize_model_grads(model: Model, gradients: FlatBuffer) -> dict[str, Tensor]:
    """All-reduce gradients of parameters that several ranks hold and each computed in part.

    In place: key/value heads that neighbouring TP ranks share (each served its own query heads), and an embedding
    table tied to the head of another stage. Returned, by name, and summed over data-parallel ranks, too: what every
    TP rank applied to tokens or heads of its own (`TensorSpec.partial_gradient`). These are small, and lie between
    large ones whose reduction has started long before.
    """
    _sum_all_shared_heads(model, gradients)
    sum_tied_embeddings(model, gradients)
    parts = _sum_partial(model, gradients)
    for total in parts.values():
        model.groups.data.sum(total)
    return parts


def sum_tensor_parallel(model: Model, gradients: FlatBuffer) -> None:
    """All-reduce, in place, gradients of parameters that several TP ranks hold and each computed in part."""
    _sum_all_shared_heads(model, gradients)
    for name, total in _sum_partial(model, gradients).items():
        gradients[name].view(-1).copy_(total)


def sum_tied_embeddings(model: Model, gradients: FlatBuffer) -> None:
    """All-reduce, in place, the gradient of an embedding table tied to the head of another stage."""
    if model.groups.embedding is not None:
        for spec in gradients.tensors:
            if spec.place is Place.BOTH_ENDS:
                model.groups.embedding.sum(gradients[spec.name])


def require_gradients(model: Model, trained: LocalSet, view: Callable[..., Tensor]) -> None:
    """Have backward passes add to float32 gradients of a parameter set, and to no others.

    `view(*names)` finds the gradients of neighbouring tensors as one.
    """
    for name, parameter in model.transformer.named_parameters():
        sources = model.transformer.sources[name]
        parameter.requires_grad_(sources[0] in trained.buffer)
        if parameter.requires_grad:
            if parameter.dtype != torch.float32:
                parameter.grad_dtype = torch.float32
            parameter.grad = view(*sources)


def _sum_all_shared_heads(model: Model, gradients: FlatBuffer) -> None:
    if model.shard.shares_keys:
        for spec in gradients.tensors:
            if _holds_kv_heads(spec):
                _sum_shared_heads(model, gradients[spec.name])


def _sum_partial(model: Model, gradients: FlatBuffer) -> dict[str, Tensor]:
    """Sum over TP ranks what each of them computed in part. -> flat tensors by name"""
    parts = {spec.name: gradients[spec.name] for spec in gradients.tensors if _is_partial(model, spec)}
    if not parts:
        return {}
    total = model.groups.tensor.sum(torch.cat([part.flatten() for part in parts.values()]))
    return dict(zip(parts, total.split([part.numel() for part in parts.values()]), strict=True))


def _is_partial(model: Model, spec: TensorSpec) -> bool:
    """Check whether this rank's gradient of a tensor is a part of a sum over the tensor-parallel ranks."""
    if model.groups.tensor.size == 1:
        return False
    match spec.partial_gradient:
        case Partial.NEVER:
            return False
        case Partial.SEQUENCE_PARALLEL:
            return model.sequence_parallel
        case Partial.TENSOR_PARALLEL:
            return True


def _holds_kv_heads(spec: TensorSpec) -> bool:
    if spec.partition is None or spec.partition.units is not Units.KV_HEADS:
        return False
    assert spec.partition.dim == 0, f"{spec.name}: key/value heads are rows"
    return True


def _sum_shared_heads(model: Model, gradient: Tensor) -> None:
    """Add up the gradients of shared key/value heads. gradient: [local heads * D, ...]"""
    local_heads = model.shard.keys
    local = gradient.view(len(local_heads), -1)
    # Neighbours share different heads, so all heads are reduced, those of other ranks as zeros.
    all_heads = local.new_zeros(model.shape.kv_heads, local.shape[1])
    all_heads[local_heads.start : local_heads.stop] = local
    local.copy_(model.groups.tensor.sum(all_heads)[local_heads.start : local_heads.stop])


def find_counted_elements(model: Model, local: LocalTensor) -> tuple[int, int]:
    """Find the elements (first, end) of a local tensor that this rank counts in sums over the placement.

    What several TP ranks or both ends of a pipeline hold is counted once, as by Megatron's
    `param_is_not_tensor_parallel_duplicate`.
    """
    shard, spec = model.shard, local.spec
    end = local.numel
    if spec.place is Place.BOTH_ENDS and not shard.first:
        return 0, 0
    if shard.tp_index == 0:
        return 0, end
    if spec.partition is None:
        return 0, 0
    if _holds_kv_heads(spec):
        # The heads that the rank before holds too are counted there.
        previous_stop = kv_heads(shard.shape, shard.tp, shard.tp_index - 1).stop
        first_row = previous_stop * (spec.shape[0] // shard.shape.kv_heads)
        shared = min(max(0, first_row - local.region.offset[0]), local.region.size[0])
        return shared * prod(local.shape[1:]), end
    return 0, end
