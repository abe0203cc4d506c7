"""Attention over padded sequences on a GPU, with windows, caps and sinks. Memory holds the scores of one block of
queries at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.layout import limits


class ScoredAttention(Function):
    """Attention that library kernels do not support, block by block of queries.

    The backward pass recomputes the weights, so that memory never holds the weights of all queries at once.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None, cap: float | None
    ) -> Tensor:
        """The queries are the last tokens of each sequence. q: [N, queries, D]; k, v: [N, L, D]; sinks: [heads], N
        is a multiple of heads -> [N, queries, D]"""
        ctx.save_for_backward(q, k, v, sinks)
        ctx.window, ctx.cap = window, cap
        out = torch.empty_like(q)
        for rows, keys in _split_queries(q, k, window):
            weights, _, _ = _weigh(q, k, sinks, window, cap, rows, keys)
            torch.bmm(weights.to(v.dtype), v[:, keys], out=out[:, rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        window, cap = ctx.window, ctx.cap
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for rows, keys in _split_queries(q, k, window):
            weights, of_sinks, slope = _weigh(q, k, sinks, window, cap, rows, keys, with_slope=True)
            upstream = grad[:, rows].contiguous()
            grad_v[:, keys] += _multiply(weights.to(v.dtype).transpose(1, 2), upstream)
            grad_scores = _multiply(upstream, v[:, keys].transpose(1, 2))
            mean = (grad_scores * weights).sum(2, keepdim=True)
            grad_scores.sub_(mean).mul_(weights).mul_(q.shape[2] ** -0.5)
            if slope is not None:
                grad_scores.mul_(slope)
            if grad_sinks is not None and of_sinks is not None:
                grad_sinks -= (of_sinks * mean).sum((1, 2)).view(-1, len(grad_sinks)).sum(0)
            narrow = grad_scores.to(q.dtype)
            torch.bmm(narrow, k[:, keys], out=grad_q[:, rows])
            grad_k[:, keys] += _multiply(narrow.transpose(1, 2), q[:, rows])
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None


def _split_queries(q: Tensor, k: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Split queries into blocks with a limited number of scores; yield each block with the keys that it sees."""
    count, length, _ = k.shape
    queries = q.shape[1]
    skipped = length - queries
    rows = max(1, limits.GPU_SCORES // (count * length))
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        begin = 0 if window is None else max(0, skipped + first + 1 - window)
        yield slice(first, last), slice(begin, skipped + last)


def _weigh(
    q: Tensor,
    k: Tensor,
    sinks: Tensor | None,
    window: int | None,
    cap: float | None,
    rows: slice,
    keys: slice,
    *,
    with_slope: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the weights of a block of queries, the weights of their sinks, and with `with_slope` the derivative
    of the cap.

    All results are float32. q: [N, queries, D]; k: [N, L, D]; sinks: [heads], N is a multiple of heads
    -> weights [N, rows, keys], weights of sinks [N, rows, 1], derivative [N, rows, keys]
    """
    scores = _multiply(q[:, rows], k[:, keys].transpose(1, 2)).mul_(q.shape[2] ** -0.5)
    slope = None
    if cap is not None:
        scores.div_(cap).tanh_()
        slope = scores.square().neg_().add_(1) if with_slope else None
        scores.mul_(cap)
    of_query = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + k.shape[1] - q.shape[1]
    of_key = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = of_key > of_query
    if window is not None:
        hidden |= of_key <= of_query - window
    scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(2, keepdim=True)
    if sinks is None:
        weights = scores.sub_(top).exp_()
        return weights.div_(weights.sum(2, keepdim=True)), None, slope
    sink_scores = sinks.float().repeat(len(q) // len(sinks))[:, None, None]
    top = torch.maximum(top, sink_scores)
    weights, of_sinks = scores.sub_(top).exp_(), (sink_scores - top).exp_()
    total = weights.sum(2, keepdim=True) + of_sinks
    return weights.div_(total), of_sinks.div_(total), slope


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices; results are the float32 sums, not rounded. [N, n, k], [N, k, m] -> [N, n, m] float32"""
    return torch.bmm(a, b) if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)
