"""Log-probabilities of tokens, without ever holding the whole [T, V] matrix of logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.layout.limits import count_kept_logit_rows, count_logit_rows
from realrl.model.arithmetic.ops import PLAIN, Products, find_gradient
from realrl.model.cpu.elementwise import bound_rows
from realrl.model.cpu.products import Panels
from realrl.model.gpu.path import on_gpu
from realrl.model.group import Group


@dataclass(frozen=True, eq=False)
class LogprobOptions:
    """How one rank computes log-probabilities from hidden states."""

    temperature: float
    entropy: bool
    group: Group
    rows: int
    """Number of rows of the table that hold this rank's part of the vocabulary."""
    products: Products
    size: int
    """Number of rows of logits that are computed at a time."""
    cap: float | None


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        table: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LogprobOptions,
        keeps: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows, size, group, products = options.rows, options.size, options.group, options.products
        temperature, cap = options.temperature, options.cap
        weight, local_bias = _cut_padding(table, bias, rows)
        chosen = hidden.new_empty(targets.shape, dtype=torch.float32)
        entropy = chosen.new_empty(len(hidden)) if options.entropy else None
        ctx.options = options
        logp: Tensor | None = None
        several = len(hidden) > size
        prepared = products.prepare(weight)
        kept = hidden.new_empty(len(hidden), rows, dtype=torch.float32) if keeps and several else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logp = None  # frees the previous chunk, so that only one is in memory
            out = None if kept is None else kept[part]
            logits = _compute_logits(hidden[part], prepared, local_bias, products)
            if cap is not None:
                cap_logits(logits, cap)
            logp = _log_softmax(logits, temperature, group, out)
            del logits
            chosen[part] = _select_targets(logp, targets[part])
            if entropy is not None:
                entropy[part] = -logp.exp().mul_(logp).sum(1)
        group.sum(chosen)
        if entropy is not None:
            group.sum(entropy)
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, table, bias, targets, kept if several or not keeps else logp)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, table, bias, targets, kept = ctx.saved_tensors
        options: LogprobOptions = ctx.options
        rows, size, products, cap = options.rows, options.size, options.products, options.cap
        weight, local_bias = _cut_padding(table, bias, rows)
        scaled = grad / options.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = find_gradient(table)[:rows] if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        prepared = products.prepare(weight) if kept is None else weight
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            factor = scaled[part]
            slope = None
            if kept is None:
                logits = _compute_logits(hidden[part], prepared, local_bias, products)
                if cap is not None:
                    slope = cap_logits(logits, cap).div(cap).square_().neg_().add_(1)
                grad_logits = _log_softmax(logits, options.temperature, options.group).exp_()
                del logits
            else:
                grad_logits = kept[part].exp()
            grad_logits.mul_(-factor.sum(1, keepdim=True))
            is_local, index = _localise_targets(targets[part], rows)
            if rows:
                grad_logits.scatter_add_(1, index, factor * is_local)
            if slope is not None:
                grad_logits.mul_(slope)
            del slope
            if grad_bias is not None:
                grad_bias[:rows] += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = products.matmul_nt(grad_logits, weight.T)
            if grad_weight is not None:
                products.add_weight_gradient(grad_logits, hidden[part], grad_weight)
            del grad_logits  # freed before the gradient of the next chunk is allocated
        return grad_hidden, None, grad_bias, *([None] * 3)


def _chunk_size(hidden: Tensor, table: Tensor) -> int:
    """Count the rows of logits that are computed at a time.

    The count is the same on every rank, because chunks are summed over ranks one by one.
    """
    return count_logit_rows(len(table), cpu=not on_gpu(hidden))


def _cut_padding(table: Tensor, bias: Tensor | None, rows: int) -> tuple[Tensor, Tensor | None]:
    """Select a rank's rows of the vocabulary, without padding. -> [rows, H], and [rows] or None"""
    return table[:rows], None if bias is None else bias[:rows]


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Bound logits softly, in place: cap * tanh(x / cap). [n, V] float32

    Our own kernels compute it. In some builds of torch, the last bits of tanh depend on an element's place in the
    tensor; results of exact runs must not depend on it.
    """
    if on_gpu(logits):
        from realrl.model.gpu.logits import bound_logits  # needs Triton

        bound_logits(logits, cap)
    else:
        bound_rows(len(logits), logits, cap, logits)
    return logits


def _compute_logits(
    hidden: Tensor, weight: Tensor | Panels, bias: Tensor | None, products: Products
) -> Tensor:
    """Compute this rank's columns of the logits. -> [n, rows of weight] float32"""
    logits = products.matmul_nt_float32(hidden, weight)
    return logits if bias is None else logits.add_(bias)


def _log_softmax(logits: Tensor, temperature: float, group: Group, out: Tensor | None = None) -> Tensor:
    """Compute this rank's columns of the log-softmax in float32. The softmax runs over the columns of all ranks.

    Writes to `out` if given, otherwise over `logits`.
    """
    if temperature != 1.0:
        logits.div_(temperature)
    if group.size == 1:
        return torch.log_softmax(logits, 1, out=logits if out is None else out)
    nothing = logits.new_full((len(logits), 1), -torch.inf)
    highest = logits.amax(1, keepdim=True) if logits.shape[1] else nothing
    logits.sub_(group.max(highest))
    return torch.sub(
        logits, group.sum(logits.exp().sum(1, keepdim=True)).log_(), out=logits if out is None else out
    )


def _localise_targets(targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Find whether this rank has each target's row, and the index of this row; 0 if another rank has it. [n, m] ->
    two of [n, m]"""
    is_local = (targets >= 0) & (targets < rows)
    return is_local, targets.masked_fill(~is_local, 0)


def _select_targets(logp: Tensor, targets: Tensor) -> Tensor:
    """Select the log-probabilities of the targets, or 0 for targets of other ranks. [n, rows] -> [n, m]"""
    if not logp.shape[1]:
        return logp.new_zeros(targets.shape)
    is_local, index = _localise_targets(targets, logp.shape[1])
    return logp.gather(1, index).masked_fill(~is_local, 0.0)


def compute_token_logprobs(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    cap: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    group: Group,
    rows: int,
    products: Products = PLAIN,
) -> tuple[Tensor, Tensor | None]:
    """Compute log softmax((hidden @ table.T + bias) / temperature) at the targets, and the entropy in nats.

    With `cap`, logits are bounded softly before they are divided (see `cap_logits`).

    hidden: [N, H]. table: [P, H], a parameter: its first `rows` rows are this rank's part of the vocabulary, the
    other rows are padding; P is the same on every rank of `group`. bias: [P] or None. targets: [N, m] int64,
    counted from this rank's first row. -> [N, m] float32, and [N] float32 without gradient; the same on every rank.
    Each rank computes a part of the gradient of `hidden`, which must be summed over the group. The table's gradient
    is added to `table.grad` (`ops.find_gradient`).
    """
    options = LogprobOptions(
        temperature, entropy, group, rows, products, size=_chunk_size(hidden, table), cap=cap
    )
    if on_gpu(hidden):
        from realrl.model.gpu_logprobs import TokenLogprobs  # needs Triton

        return TokenLogprobs.apply(hidden, table, bias, targets, options)
    # Log-probabilities are kept for the backward pass up to a limit. For large vocabularies, recomputing them costs
    # less than their memory. With a cap, they are recomputed, because the derivative of the cap needs the logits.
    keeps = torch.is_grad_enabled() and len(hidden) <= count_kept_logit_rows(len(table), cpu=True)
    return _TokenLogprobs.apply(hidden, table, bias, targets, options, keeps and cap is None)


def compute_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Compute log softmax(logits / temperature) with the arithmetic of `compute_token_logprobs` on one rank.

    logits: [n, V] float32, not changed -> [n, V]
    """
    if on_gpu(logits):
        from realrl.model.gpu_logprobs import compute_logprobs_on_gpu  # needs Triton

        return compute_logprobs_on_gpu(logits, temperature)
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, 1)


@torch.no_grad()
def find_likeliest_tokens(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    *,
    count: int,
    bias: Tensor | None = None,
    cap: float | None = None,
    temperature: float = 1.0,
    group: Group,
    rows: int,
    first: int,
    products: Products = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of the targets, and of the `count` likeliest tokens, best first.

    Arguments as for `compute_token_logprobs`; `first` is the token id of this rank's first row. -> [N, m] float32
    at the targets, [N, count] int64 tokens, and [N, count] float32, without gradient and the same on every rank.
    """
    size = _chunk_size(hidden, table)
    weight, bias = _cut_padding(table, bias, rows)
    prepared = products.prepare(weight)
    chosen = hidden.new_empty(targets.shape, dtype=torch.float32)
    tokens = targets.new_empty(len(hidden), count)
    best = chosen.new_empty(len(hidden), count)
    logp: Tensor | None = None
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        logp = None  # frees the previous chunk, so that only one is in memory
        logits = _compute_logits(hidden[part], prepared, bias, products)
        if cap is not None:
            cap_logits(logits, cap)
        logp = _log_softmax(logits, temperature, group)
        del logits
        chosen[part] = _select_targets(logp, targets[part])
        tokens[part], best[part] = _select_likeliest(logp, count, group, len(table), first)
    return group.sum(chosen), tokens, best


def _select_likeliest(
    logp: Tensor, count: int, group: Group, most_rows: int, first: int
) -> tuple[Tensor, Tensor]:
    """Select the likeliest tokens among all ranks' columns. logp: [n, this rank's rows] -> two of [n, count]

    Each rank contributes its own `count` likeliest tokens; the likeliest tokens of the whole vocabulary are among
    them.
    """
    if group.size == 1:
        best = logp.topk(count, dim=1)
        return best.indices, best.values
    most = min(count, most_rows)
    local = logp.topk(min(most, logp.shape[1]), dim=1)
    missing = (0, most - local.values.shape[1])  # on a rank with fewer rows than others
    values = group.gather_columns(F.pad(local.values, missing, value=-torch.inf), most * group.size)
    tokens = group.gather_columns(F.pad(local.indices + first, missing), most * group.size)
    best = values.topk(count, dim=1)
    return tokens.gather(1, best.indices), best.values
