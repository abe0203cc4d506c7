"""Accumulation of gradients, their sums over ranks that have only parts of them, and the elements that a rank
counts in norms."""

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from realrl.engine.buffers import FlatBuffer, LocalSet
from realrl.engine.model import Model
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.families.tensors import Partial, Place, TensorSpec, Units
from realrl.layout.local_tensors import LocalTensor
from realrl.layout.ranges import kv_heads


class Accumulation:
    """Gradients of a parameter set over the micro-batches of a mini-batch, and the optimizer of this rank's part.

    The default methods suit ZeRO-1, under which a backward pass exchanges no gradients.
    """

    gradients: FlatBuffer
    """Gradients that this rank has accumulated."""
    optimizer: ShardedAdamW
    updated: LocalSet
    """Tensors, or rows of tensors, that the optimizer works on; a rank may update only a part of them."""

    @property
    def persistent(self) -> list[Tensor]:
        """Tensors that must survive between steps, in addition to the model's parameters."""
        return self.optimizer.persistent

    def start_backward(self, *, last: bool) -> None:
        """Begin a backward pass; `last` means that it is the last one of a virtual stage in the mini-batch."""

    def finish_backward(self) -> None:
        pass

    def discard(self) -> None:
        """Drop all accumulated gradients."""
        self.optimizer.discard()

    def finalize(self) -> Mapping[str, Tensor]:
        """Complete the gradients of a mini-batch; returns gradients that are already summed over ranks, by name."""
        raise NotImplementedError

    def spread(self) -> None:
        """Copy updated parameters to the memory that the model computes with, if the optimizer does not do so."""

    def adopt(self) -> None:
        """Take over parameters that were set from outside, if the optimizer does not do so."""


def list_late_tensors(model: Model, trained: LocalSet) -> set[str]:
    """List the tensors of a parameter set whose gradients `finalize_model_grads` changes in place."""
    tied = model.groups.pipeline.size > 1
    return {
        spec.name
        for spec in trained.buffer.tensors
        if (tied and spec.place is Place.BOTH_ENDS) or (model.shard.shares_keys and _holds_kv_heads(spec))
    }


def finalize_model_grads(model: Model, gradients: FlatBuffer) -> dict[str, Tensor]:
    """All-reduce the gradients of parameters that several ranks hold, if each rank computes only a part of the
    gradient.

    There are three kinds. Gradients of key/value heads that neighbouring TP ranks share (each rank serves its own
    query heads) are summed in place. So is the gradient of an embedding table that is tied to the head of another
    stage. Gradients of parameters that every TP rank applies to its own tokens or heads
    (`TensorSpec.partial_gradient`) are also summed over data-parallel ranks, and returned by name. They are small,
    but lie between large gradients, whose reduction may have started already.
    """
    _sum_all_shared_heads(model, gradients)
    sum_tied_embeddings(model, gradients)
    parts = _sum_partial(model, gradients)
    for total in parts.values():
        model.groups.copies.sum(total)
    return parts


def sum_tensor_parallel(model: Model, gradients: FlatBuffer) -> None:
    """All-reduce, in place, the gradients of parameters that several TP ranks hold, if each rank computes only a
    part."""
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
    """Make backward passes add to the float32 gradients of one parameter set, and of no other set.

    `view(*names)` returns the gradients of neighbouring tensors as one tensor.
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
    """Sum, over TP ranks, the gradients that are only partial on each rank. -> flat tensors by name"""
    parts = {spec.name: gradients[spec.name] for spec in gradients.tensors if _is_partial(model, spec)}
    if not parts:
        return {}
    total = model.groups.tensor.sum(torch.cat([part.flatten() for part in parts.values()]))
    return dict(zip(parts, total.split([part.numel() for part in parts.values()]), strict=True))


def _is_partial(model: Model, spec: TensorSpec) -> bool:
    """Check whether this rank has only a part of a tensor's gradient, which must be summed over TP ranks."""
    if model.groups.tensor.size == 1 or model.shard.holds_whole_expert(spec):
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
    # Different neighbours share different heads, so all heads are reduced, with zeros for heads of other ranks.
    all_heads = local.new_zeros(model.shape.kv_heads, local.shape[1])
    all_heads[local_heads.start : local_heads.stop] = local
    local.copy_(model.groups.tensor.sum(all_heads)[local_heads.start : local_heads.stop])


def find_counted_elements(model: Model, local: LocalTensor) -> tuple[int, int]:
    """Find the elements (first, end) of a local tensor that this rank counts in sums over the placement.

    Elements that several TP ranks or both ends of a pipeline hold are counted once, as in Megatron's
    `param_is_not_tensor_parallel_duplicate`.
    """
    shard, spec = model.shard, local.spec
    end = local.numel
    if spec.place is Place.BOTH_ENDS and not shard.first:
        return 0, 0
    if shard.tp_index == 0 or shard.holds_whole_expert(spec):
        return 0, end
    if spec.partition is None:
        return 0, 0
    if _holds_kv_heads(spec):
        # The previous rank counts the heads that both ranks hold.
        previous_stop = kv_heads(shard.shape, shard.tp, shard.tp_index - 1).stop
        first_row = previous_stop * (spec.shape[0] // shard.shape.kv_heads)
        shared = min(max(0, first_row - local.region.offset[0]), local.region.size[0])
        return shared * prod(local.shape[1:]), end
    return 0, end
