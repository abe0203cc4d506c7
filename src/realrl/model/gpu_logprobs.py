"""Log-probabilities of tokens on a GPU: logits are computed in chunks, and each chunk is reduced to sums before the
next one."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.model.arithmetic.ops import PLAIN, find_gradient
from realrl.model.gpu.logits import bound_logits, compute_logit_sums, compute_softmax_gradient
from realrl.model.group import Group
from realrl.model.logprobs import LogprobOptions


class TokenLogprobs(Function):
    """Log-probabilities of the targets, and entropies; arguments as for `logprobs.compute_token_logprobs`.

    If there are several chunks, the backward pass recomputes the logits. This is a fourth product, in addition to
    three that cannot be avoided: the logits, the gradient of the hidden states, and the gradient of the table. The
    gradient of a token's logits depends on the loss, which is known only after the forward pass. Keeping the logits
    until then would take memory for [N, V] numbers.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, bias: Tensor | None, targets: Tensor, options: LogprobOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probabilities and entropies, `options.size` rows of logits at a time."""
        rows, size, group = options.rows, options.size, options.group
        scale = 1 / options.temperature
        chosen = hidden.new_empty(targets.shape, dtype=torch.float32)
        log_sums = chosen.new_empty(len(hidden))
        means = chosen.new_empty(len(hidden)) if options.entropy else None
        logits: Tensor | None = None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = None  # frees the previous chunk, so that only one is in memory
            logits = _compute_logits(hidden[part], table, bias, options)
            compute_logit_sums(logits, scale, log_sums[part], None if means is None else means[part])
            torch.mul(_select(logits, targets[part], rows), scale, out=chosen[part])
        log_sums, means = _merge_ranks(log_sums, means, group)
        group.sum(chosen)
        chosen -= log_sums[:, None]
        entropy = None if means is None else log_sums - means
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        ctx.options = options
        # A single chunk is saved. Several chunks are recomputed, which costs less than their memory.
        ctx.save_for_backward(hidden, table, bias, targets, log_sums, logits if len(hidden) <= size else None)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Compute the gradients of hidden states and bias, and add the gradient of the table to `table.grad`."""
        hidden, table, bias, targets, log_sums, saved = ctx.saved_tensors
        options: LogprobOptions = ctx.options
        rows, size, scale = options.rows, options.size, 1 / options.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_table = find_gradient(table)[:rows] if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        scaled = grad * scale
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = saved
            if logits is None:
                logits = _compute_logits(hidden[part], table, bias, options)
            gradient = _differentiate(
                logits, log_sums[part], targets[part], scaled[part], options, hidden.dtype
            )
            del logits
            if grad_bias is not None:
                grad_bias[:rows] += gradient.sum(0, dtype=torch.float32)
            grad_hidden[part] = PLAIN.matmul_nt(gradient, table[:rows].T)
            if grad_table is not None:
                PLAIN.add_weight_gradient(gradient, hidden[part], grad_table)
            del gradient  # freed before the gradient of the next chunk is allocated
        return grad_hidden, None, grad_bias, *([None] * 2)


def _compute_logits(hidden: Tensor, table: Tensor, bias: Tensor | None, options: LogprobOptions) -> Tensor:
    logits = options.products.matmul_nt_float32(hidden, table[: options.rows])
    if bias is not None:
        logits.add_(bias[: options.rows])
    if options.cap is not None:
        bound_logits(logits, options.cap)
    return logits


def compute_logprobs_on_gpu(logits: Tensor, temperature: float) -> Tensor:
    """Compute log softmax(logits / temperature) as `TokenLogprobs` does, bit for bit. [n, V] float32"""
    log_sums = logits.new_empty(len(logits))
    scale = 1 / temperature
    compute_logit_sums(logits, scale, log_sums, None)
    return (logits * scale).sub_(log_sums[:, None])


def _select(values: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Select the values of the targets, or 0 for targets of other ranks. [n, rows], [n, m] -> [n, m]"""
    if not rows:
        return values.new_zeros(targets.shape)
    is_local = (targets >= 0) & (targets < rows)
    return values.gather(1, targets.clamp(0, rows - 1)).masked_fill_(~is_local, 0.0)


def _merge_ranks(log_sums: Tensor, means: Tensor | None, group: Group) -> tuple[Tensor, Tensor | None]:
    """Combine the log-sums and means that each rank has computed over its own columns of the logits. [N] each"""
    if group.size == 1:
        return log_sums, means
    highest = group.max(log_sums.clone())
    total = group.sum((log_sums - highest).exp_()).log_().add_(highest)
    if means is not None:
        means = group.sum(means * (log_sums - total).exp_())
    return total, means


def _differentiate(
    logits: Tensor,
    log_sums: Tensor,
    targets: Tensor,
    factors: Tensor,
    options: LogprobOptions,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient of a chunk of logits, before they were bounded by `cap`. The result has type `dtype`.

    factors: gradients of the log-probabilities [n, m] -> [n, rows]
    """
    rows, scale, cap = options.rows, 1 / options.temperature, options.cap
    total = factors.sum(1)
    is_local = (targets >= 0) & (targets < rows)
    index = targets.clamp(0, max(0, rows - 1))
    bound = cap or 0.0
    at_targets = factors * is_local
    if cap is not None and rows:
        slope = 1 - (logits.gather(1, index) / cap).square()
        at_targets = at_targets * slope
    if targets.shape[1] > 1 or not rows:
        # A target may occur twice in a row of `targets`. Contributions are added in float32, before the cast to
        # `dtype`, because the remaining gradient is small if the target is likely.
        compute_softmax_gradient(logits, log_sums, total, scale, bound, logits)
        if rows:
            logits.scatter_add_(1, index, at_targets)
        return logits.to(dtype)
    probability = (logits.gather(1, index) * scale - log_sums[:, None]).exp_()
    rest = total[:, None] * probability
    at_target = at_targets - (rest if cap is None else rest * slope)
    gradient = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
    compute_softmax_gradient(logits, log_sums, total, scale, bound, gradient)
    return gradient.scatter_(1, index, at_target.to(dtype))
