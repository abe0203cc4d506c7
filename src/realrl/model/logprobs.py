"""Log-probabilities of tokens without the whole [T, V] matrix of logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.layout.limits import max_logits
from realrl.model.group import Group
from realrl.model.ops import product


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        group: Group,
        rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        chunk = max_logits(cpu=hidden.device.type == "cpu")
        # The same on every rank, because chunks are summed over ranks one by one.
        size = max(1, chunk // rows)
        chosen = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(chosen) if with_entropy else None
        ctx.size, ctx.temperature, ctx.group = size, temperature, group
        logp: Tensor | None = None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logp = None  # so that there is one chunk at a time
            logp = _log_softmax(hidden[part], weight, bias, temperature, group)
            chosen[part] = _at_targets(logp, targets[part])
            if entropy is not None:
                entropy[part] = -logp.exp().mul_(logp).sum(1)
        group.sum(chosen)
        if entropy is not None:
            group.sum(entropy)
            ctx.mark_non_differentiable(entropy)
        # A single chunk is kept; more are computed again, which costs less than the memory.
        ctx.save_for_backward(hidden, weight, bias, targets, logp if len(hidden) <= size else None)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, kept = ctx.saved_tensors
        scaled = grad / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        # Transposed, as `product` is fastest when its narrower operand comes first.
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape[::-1], dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.size):
            part = slice(start, start + ctx.size)
            factor = scaled[part, None]
            if kept is None:
                grad_logits = _log_softmax(hidden[part], weight, bias, ctx.temperature, ctx.group).exp_()
            else:
                grad_logits = kept.exp()
            grad_logits.mul_(-factor)
            here, index = _local(targets[part], len(weight))
            if len(weight):
                grad_logits.scatter_add_(1, index, factor * here)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = product(grad_logits, weight.T)
            if grad_weight is not None:
                grad_weight += product(hidden[part].T, grad_logits.T)
            del grad_logits  # before there is that of the next chunk
        grad_table = None if grad_weight is None else grad_weight.T
        return grad_hidden, grad_table, grad_bias, None, None, None, None, None


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, group: Group
) -> Tensor:
    """Compute this rank's columns of the log-softmax over all ranks' columns. -> [n, rows of weight] float32"""
    logits = product(hidden, weight).float()
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits.div_(temperature)
    if group.size == 1:
        return torch.log_softmax(logits, 1, out=logits)
    nothing = logits.new_full((len(logits), 1), -torch.inf)
    highest = logits.amax(1, keepdim=True) if len(weight) else nothing
    logits.sub_(group.max(highest))
    return logits.sub_(group.sum(logits.exp().sum(1, keepdim=True)).log_())


def _local(targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Find whether each target is one of this rank's rows, as 0 or 1, and a valid index. [n] -> two of [n, 1]"""
    here = (targets >= 0) & (targets < rows)
    return here[:, None], targets.masked_fill(~here, 0)[:, None]


def _at_targets(logp: Tensor, targets: Tensor) -> Tensor:
    """Select log-probabilities at the targets, 0 where another rank has the target. [n, rows] -> [n]"""
    if not logp.shape[1]:
        return logp.new_zeros(len(logp))
    here, index = _local(targets, logp.shape[1])
    return logp.gather(1, index).masked_fill(~here, 0.0).squeeze(1)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    group: Group,
    rows: int,
) -> tuple[Tensor, Tensor | None]:
    """Compute log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy in nats.

    hidden: [N, H], weight: [this rank's rows, H], bias: [this rank's rows] or None, targets: [N] int64, counted
    from this rank's first row -> [N] float32, and [N] float32 without gradient; the same on every rank of `group`.
    `rows` is the most rows that a rank of the group has. The gradient of `hidden` is this rank's part of a sum over
    the group.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, entropy, group, rows)
