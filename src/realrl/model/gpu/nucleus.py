"""Top-p on a GPU: one kernel, with a program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from realrl.model.gpu.library import register_kernel

_BLOCK = 1024


@triton.jit(do_not_specialize=["columns", "share"])
def _top_p_kernel(probabilities, kept, columns, share, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    digit = tl.arange(0, 16).to(tl.uint32)
    # Non-negative floats are ordered like their bits. Find, four bits at a time, the largest threshold such that
    # all probabilities from it upwards sum to at least the share.
    lowest = tl.full([], 0, tl.uint32)
    target = tl.full([], 0.0, tl.float64)
    larger = tl.full([], 0.0, tl.float64)  # in the end, the sum of the probabilities above `lowest`
    for step in range(8):
        shift = 28 - 4 * step
        bounds = lowest + (digit << shift)
        sums = tl.zeros([16, BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(probabilities + start + column, column < columns, other=0.0)
            bits = value.to(tl.uint32, bitcast=True)
            sums += tl.where(bits[None, :] >= bounds[:, None], value[None, :], 0.0)
        # All sums add in the same order, so a sum of more numbers is never smaller.
        totals = tl.sum(sums.to(tl.float64), 1)
        target = tl.where(step == 0, share * tl.max(totals, 0), target)
        enough = totals >= target
        # The sum for digit 0 is always enough.
        chosen = tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0)
        lowest += chosen.to(tl.uint32) << shift
        larger = tl.maximum(larger, tl.max(tl.where(enough, 0.0, totals), 0))
    each = lowest.to(tl.float32, bitcast=True).to(tl.float64)
    before = tl.full([], 0, tl.int32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(probabilities + start + column, inside, other=0.0)
        bits = value.to(tl.uint32, bitcast=True)
        equal = (bits == lowest) & inside
        # Among equal probabilities, earlier tokens come first.
        place = before + tl.cumsum(equal.to(tl.int32), 0) - 1
        keeps = (bits > lowest) | (equal & (larger + place.to(tl.float64) * each < target))
        tl.store(kept + start + column, tl.where(keeps, value, 0.0), inside)
        before += tl.sum(equal.to(tl.int32), 0)


@register_kernel("keep_top_p(Tensor probabilities, float share, Tensor(a!) kept)")
def launch_top_p(probabilities: Tensor, share: float, kept: Tensor) -> None:
    """Copy the probabilities of each row's likeliest tokens, which together have at least `share` of the row's sum.
    Set the other probabilities to 0.

    A row's result does not depend on other rows. Both tensors are [B, V] float32, contiguous.
    """
    assert probabilities.is_contiguous() and kept.is_contiguous(), "one number after the other"
    if probabilities.numel():
        rows, columns = probabilities.shape
        _top_p_kernel[(rows,)](probabilities, kept, columns, share, BLOCK=_BLOCK, num_warps=8)


def keep_top_p_on_gpu(probabilities: Tensor, share: float) -> Tensor:
    kept = torch.empty_like(probabilities)
    launch_top_p(probabilities, share, kept)
    return kept
