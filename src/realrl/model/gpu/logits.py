"""Softmax over logits on a GPU: one kernel for the sums of a chunk, and one for its gradient."""

import triton
import triton.language as tl
from torch import Tensor

from realrl.model.gpu.library import register_kernel

_BLOCK = 4096


@triton.jit
def _sums_kernel(logits, log_sum, mean, columns, scale, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # Each lane keeps its highest logit, and sums of exponentials relative to it, until the end.
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    exponentials = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(logits + row * columns + column, inside, other=-float("inf")) * scale
        above = tl.maximum(highest, value)
        # A lane without a finite logit would subtract infinity from infinity.
        before = tl.where(highest == -float("inf"), 0.0, tl.exp(highest - above))
        added = tl.where(value == -float("inf"), 0.0, tl.exp(value - above))
        exponentials = exponentials * before + added
        if MEAN:
            weighted = weighted * before + tl.where(added > 0, added * value, 0.0)
        highest = above
    most = tl.max(highest, 0)
    share = tl.where(highest == -float("inf"), 0.0, tl.exp(highest - most))
    total = tl.sum(exponentials * share, 0)
    tl.store(log_sum + row, most + tl.log(total))
    if MEAN:
        tl.store(mean + row, tl.sum(weighted * share, 0) / total)


@triton.jit
def _gradient_kernel(
    logits, log_sum, factor, gradient, columns, scale, bound, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logit = tl.load(logits + row * columns + column, inside, other=0.0)
    result = -tl.load(factor + row) * tl.exp(logit * scale - tl.load(log_sum + row))
    if CAP:
        result *= 1.0 - (logit / bound) * (logit / bound)
    tl.store(gradient + row * columns + column, result.to(gradient.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def _bound_kernel(logits, count, bound, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(logits + place, inside, other=0.0)
    # tanh(x) = 2 / (1 + e^-2x) - 1
    tl.store(logits + place, bound * (2.0 * tl.sigmoid(2.0 * value / bound) - 1.0), inside)


@register_kernel("bound_logits(Tensor(a!) logits, float cap)")
def bound_logits(logits: Tensor, cap: float) -> None:
    """Compute cap * tanh(logits / cap) in place. logits: [n, V] float32, contiguous"""
    assert logits.is_contiguous(), "one number after the other"
    if logits.numel():
        _bound_kernel[(triton.cdiv(logits.numel(), _BLOCK),)](
            logits, logits.numel(), cap, BLOCK=_BLOCK, num_warps=8
        )


@register_kernel("logit_sums(Tensor logits, float scale, Tensor(a!) log_sum, Tensor(b!)? mean)")
def compute_logit_sums(logits: Tensor, scale: float, log_sum: Tensor, mean: Tensor | None) -> None:
    """Compute log(sum(exp(z))) of each row of z = logits * scale and, with `mean`, the mean of z under softmax(z).

    logits: [n, V] float32 -> [n] float32 each; -inf if there are no columns, NaN if a logit is NaN or inf
    """
    if not logits.shape[1]:
        log_sum.fill_(-float("inf"))
        if mean is not None:
            mean.zero_()
        return
    _sums_kernel[(len(logits),)](
        logits, log_sum, log_sum if mean is None else mean, logits.shape[1], scale,
        MEAN=mean is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@register_kernel(
    "softmax_gradient(Tensor logits, Tensor log_sum, Tensor factor, float scale, float cap, Tensor(a!) gradient)"
)
def compute_softmax_gradient(
    logits: Tensor, log_sum: Tensor, factor: Tensor, scale: float, cap: float, gradient: Tensor
) -> None:
    """Compute -factor * exp(logits * scale - log_sum). logits: [n, V] float32; log_sum, factor: [n] -> [n, V]

    If `cap` is above 0, the result is multiplied by 1 - (logits / cap)², the derivative of the soft cap.
    """
    grid = (len(logits), triton.cdiv(logits.shape[1], _BLOCK))
    if grid[1]:
        _gradient_kernel[grid](
            logits, log_sum, factor, gradient, logits.shape[1], scale, cap,
            CAP=cap > 0, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
