"""Causal attention within packed sequences and its gradient, on a CPU, without padding or whole score matrices.

The queries of a sequence may be only its last tokens.

A unit of work is a key/value head of a sequence, with all query heads that read it. Scores are computed in tiles of
queries and keys that stay in a cache. The softmax is combined tile by tile, as in FlashAttention (Dao et al., arXiv
2205.14135; backward pass: section B.2 there). All sums of products go through one panel kernel (`vectors`); keys
and values are packed for it once per unit of work.

A sequence can use at most one thread per key/value head.
"""

from typing import Any

import numba
import numpy as np

from realrl.layout.limits import LANES
from realrl.model.cpu import vectors
from realrl.model.cpu.arithmetic import LOG2_E
from realrl.model.cpu.rows import Work, claim, float_pointer, int_row, number, row, row_kernel, row_stride
from realrl.model.cpu.vectors import (
    add_rows_by_panel,
    fill,
    load_vector,
    multiply_rows_by_panel,
    store_vector,
)

_QUERIES = 48
"""Queries of a tile of scores: a multiple of the rows that the panel kernel multiplies at a time."""
_KEYS = 256
"""Keys of a tile. The scores of a tile take 48 KiB; backward passes keep two such tiles."""


@numba.njit(inline="always")
def _pack_by_dim(x: Any, at: int, stride: int, length: int, dim: int, panels: Any) -> None:
    """Pack rows as panels for products that sum over dims. -> [blocks of 16 rows, dim, 16], 0 beyond the last
    row"""
    for t in range(0, length, LANES):
        count = min(LANES, length - t)
        for lane in range(LANES):
            begin = t * dim + lane
            if lane < count:
                start = at + (t + lane) * stride
                for d in range(dim):
                    panels[begin + d * LANES] = x[start + d]
            else:
                for d in range(dim):
                    panels[begin + d * LANES] = np.float32(0.0)


@numba.njit(inline="always")
def _pack_by_row(x: Any, at: int, stride: int, length: int, dim: int, height: int, panels: Any) -> None:
    """Pack rows as panels for products that sum over rows. -> [blocks of 16 dims, height, 16], 0 beyond rows and
    dims"""
    for c in range(0, dim, LANES):
        count = min(LANES, dim - c)
        for t in range((length + LANES - 1) // LANES * LANES):
            place = c * height + t * LANES
            start = at + t * stride + c
            for lane in range(LANES):
                panels[place + lane] = x[start + lane] if t < length and lane < count else np.float32(0.0)


@numba.njit(inline="always")
def _weigh(
    scores: Any,
    first: int,
    hidden: int,
    seen: int,
    keys: int,
    scale: np.float32,
    query: int,
    tops: Any,
    totals: Any,
) -> Any:
    """Turn a query's scores in a tile into weights, relative to the largest score so far.

    scores: [_QUERIES * _KEYS]; the query's scores begin at `first`. The query sees keys `hidden` to `seen` - 1;
    other keys get weight 0. tops, totals: [_QUERIES], the largest scaled score so far, and the sum of weights.
    Returns the factor that earlier sums must be multiplied by.
    """
    begin, blocks = hidden // LANES, (seen + LANES - 1) // LANES
    for j in range(begin):
        store_vector(scores, first + j * LANES, vectors.zeros())
    last = first + (blocks - 1) * LANES
    store_vector(scores, last, vectors.keep_first(load_vector(scores, last), seen - (blocks - 1) * LANES))
    start = first + begin * LANES
    store_vector(scores, start, vectors.drop_first(load_vector(scores, start), hidden - begin * LANES))
    best = load_vector(scores, start)
    for j in range(begin + 1, blocks):
        best = vectors.larger(best, load_vector(scores, first + j * LANES))
    top = max(tops[query], vectors.find_maximum(best) * scale)
    factor = vectors.exp2(fill(tops[query] - top))
    total = vectors.zeros()
    steep, shift = fill(scale), fill(-top)
    for j in range(begin, blocks):
        exponents = vectors.multiply_add(load_vector(scores, first + j * LANES), steep, shift)
        # Rounding may make exponents positive, but `vectors.exp2` requires numbers up to 0.
        weights = vectors.exp2(vectors.smaller(exponents, vectors.zeros()))
        store_vector(scores, first + j * LANES, weights)
        total = vectors.add(total, weights)
    for j in range(blocks, (keys + LANES - 1) // LANES):
        store_vector(scores, first + j * LANES, vectors.zeros())
    tops[query] = top
    totals[query] = totals[query] * vectors.find_first(factor) + vectors.add_up(total)
    return factor


@numba.njit(inline="always")
def _cap(scores: Any, first: int, keys: int, steep: np.float32, bound: np.float32) -> None:
    """Bound scores softly: bound * tanh(steep * score)."""
    for t in range(first, first + keys, LANES):
        capped = vectors.tanh(vectors.multiply(load_vector(scores, t), fill(steep)))
        store_vector(scores, t, vectors.multiply(capped, fill(bound)))


@row_kernel(outputs=2)
def attend_forward(work: Work) -> None:
    """Attend from each query to its own token and to earlier tokens of its sequence.

    Units of work are the key/value heads of sequences. Arguments:
        q [N, heads * D or more]; kv [T, 2 kv_heads * D]; first query of each sequence and N; first token of each
        sequence and T; heads, kv_heads, D; tokens of the longest sequence;
        window (tokens that a query sees, its own included); cap of scores (0 for none);
        sinks [heads] (-inf for none)
        -> out [N, heads * D], and the logarithm to base 2 of each query's sum of exponentials [N, heads]
    """
    q, kv = float_pointer(work, 0), float_pointer(work, 1)
    out, sums = float_pointer(work, 11), float_pointer(work, 12)
    q_starts, starts, sinks = int_row(work, 2, 0), int_row(work, 3, 0), row(work, 10, 0)
    window, bound = int(number(work, 8)), number(work, 9)
    heads, kv_heads, dim = int(number(work, 4)), int(number(work, 5)), int(number(work, 6))
    height = (int(number(work, 7)) + LANES - 1) // LANES * LANES
    q_stride, stride = row_stride(work, 0), row_stride(work, 1)
    out_stride, sums_stride = row_stride(work, 11), row_stride(work, 12)
    group = heads // kv_heads
    padded = (dim + LANES - 1) // LANES * LANES
    share = np.float32(1.0) / np.sqrt(np.float32(dim))
    scale = LOG2_E * share
    keys_by_dim = np.empty(height * dim, np.float32)
    values_by_row = np.empty(height * padded, np.float32)
    scores = np.empty(_QUERIES * _KEYS, np.float32)
    outputs = np.empty(_QUERIES * padded, np.float32)
    tops, totals = np.empty(_QUERIES, np.float32), np.empty(_QUERIES, np.float32)
    first, last = claim(work)
    while first < last:
        for item in range(first, last):
            sequence, kv_head = item // kv_heads, item % kv_heads
            length = starts[sequence + 1] - starts[sequence]
            # Query of the sequence's token 0, or where it would be.
            begin = q_starts[sequence + 1] - length
            at_k = starts[sequence] * stride + kv_head * dim
            _pack_by_dim(kv, at_k, stride, length, dim, keys_by_dim)
            _pack_by_row(kv, at_k + kv_heads * dim, stride, length, dim, height, values_by_row)
            for head in range(kv_head * group, (kv_head + 1) * group):
                sink = sinks[head] * LOG2_E
                for i in range(q_starts[sequence] - begin, length, _QUERIES):
                    rows = min(_QUERIES, length - i)
                    at_q = (begin + i) * q_stride + head * dim
                    outputs[: rows * padded] = np.float32(0.0)
                    tops[:rows] = sink
                    totals[:rows] = np.float32(0.0) if sink == -np.inf else np.float32(1.0)
                    for j in range(max(0, i + 1 - window) // LANES * LANES, i + rows, _KEYS):
                        keys = min(_KEYS, i + rows - j)
                        for t in range(0, keys, LANES):
                            multiply_rows_by_panel(
                                rows, q, at_q, q_stride, 1, keys_by_dim, (j + t) * dim, LANES, dim, scores, t,
                                _KEYS,
                            )  # fmt: skip
                        for r in range(rows):
                            seen = min(keys, i + r + 1 - j)
                            hidden = max(0, i + r + 1 - j - window)
                            if seen > hidden:
                                if bound > 0:
                                    _cap(scores, r * _KEYS, seen, share / bound, bound / share)
                                factor = _weigh(scores, r * _KEYS, hidden, seen, keys, scale, r, tops, totals)
                                for c in range(r * padded, (r + 1) * padded, LANES):
                                    store_vector(
                                        outputs, c, vectors.multiply(load_vector(outputs, c), factor)
                                    )
                            else:
                                for t in range(0, keys, LANES):
                                    store_vector(scores, r * _KEYS + t, vectors.zeros())
                        for c in range(0, padded, LANES):
                            at_v = c * height + j * LANES
                            add_rows_by_panel(
                                rows, scores, 0, _KEYS, 1, values_by_row, at_v, LANES, keys, outputs, c,
                                padded,
                            )  # fmt: skip
                    for r in range(rows):
                        token = begin + i + r
                        part = np.float32(1.0) / totals[r]
                        to = token * out_stride + head * dim
                        for d in range(dim):
                            out[to + d] = outputs[r * padded + d] * part
                        sums[token * sums_stride + head] = tops[r] + np.float32(np.log2(totals[r]))
        first, last = claim(work)


@row_kernel(outputs=2)
def attend_backward(work: Work) -> None:
    """Compute the gradient of `attend_forward`.

    Units of work are the same. Arguments: q, kv, first queries, first tokens, heads, kv_heads, D, longest, window,
    cap as in `attend_forward`; out and sums as `attend_forward` returns them; gradient of out [N, heads * D]
    -> gradients of q and kv
    """
    q, kv = float_pointer(work, 0), float_pointer(work, 1)
    q_starts, starts = int_row(work, 2, 0), int_row(work, 3, 0)
    heads, kv_heads, dim = int(number(work, 4)), int(number(work, 5)), int(number(work, 6))
    longest, window, bound = int(number(work, 7)), int(number(work, 8)), number(work, 9)
    out, sums, grad_out = float_pointer(work, 10), float_pointer(work, 11), float_pointer(work, 12)
    to_q, to_kv = float_pointer(work, 13), float_pointer(work, 14)
    q_stride, stride = row_stride(work, 0), row_stride(work, 1)
    out_stride, sums_stride, grad_out_stride = (
        row_stride(work, 10),
        row_stride(work, 11),
        row_stride(work, 12),
    )
    to_q_stride, to_kv_stride = row_stride(work, 13), row_stride(work, 14)
    group = heads // kv_heads
    height = (longest + LANES - 1) // LANES * LANES
    padded = (dim + LANES - 1) // LANES * LANES
    share = np.float32(1.0) / np.sqrt(np.float32(dim))
    scale = LOG2_E * share
    one = fill(np.float32(1.0))
    # Panels for sums over dims, [blocks of 16 rows, dim, 16], and over rows, [blocks of 16 dims, height, 16].
    keys_by_dim, values_by_dim = np.empty(height * dim, np.float32), np.empty(height * dim, np.float32)
    keys_by_row = np.empty(height * padded, np.float32)
    queries_by_row, grads_by_row = (
        np.empty(height * padded, np.float32),
        np.empty(height * padded, np.float32),
    )
    grad_k, grad_v = np.empty(height * padded, np.float32), np.empty(height * padded, np.float32)
    grad_q = np.empty(_QUERIES * padded, np.float32)
    weights, changes = np.empty(_QUERIES * _KEYS, np.float32), np.empty(_QUERIES * _KEYS, np.float32)
    first, last = claim(work)
    while first < last:
        for item in range(first, last):
            sequence, kv_head = item // kv_heads, item % kv_heads
            length = starts[sequence + 1] - starts[sequence]
            begin = q_starts[sequence + 1] - length
            # Tokens before the first query, and the number of queries.
            skipped, queries = q_starts[sequence] - begin, q_starts[sequence + 1] - q_starts[sequence]
            at_k = starts[sequence] * stride + kv_head * dim
            at_v = at_k + kv_heads * dim
            _pack_by_dim(kv, at_k, stride, length, dim, keys_by_dim)
            _pack_by_dim(kv, at_v, stride, length, dim, values_by_dim)
            _pack_by_row(kv, at_k, stride, length, dim, height, keys_by_row)
            grad_k[: length * padded] = np.float32(0.0)
            grad_v[: length * padded] = np.float32(0.0)
            for head in range(kv_head * group, (kv_head + 1) * group):
                at_head = q_starts[sequence] * q_stride + head * dim
                _pack_by_row(q, at_head, q_stride, queries, dim, height, queries_by_row)
                at_head = q_starts[sequence] * grad_out_stride + head * dim
                _pack_by_row(grad_out, at_head, grad_out_stride, queries, dim, height, grads_by_row)
                for i in range(skipped, length, _QUERIES):
                    rows = min(_QUERIES, length - i)
                    at_q = (begin + i) * q_stride + head * dim
                    at_grad = (begin + i) * grad_out_stride + head * dim
                    grad_q[: rows * padded] = np.float32(0.0)
                    for j in range(max(0, i + 1 - window) // LANES * LANES, i + rows, _KEYS):
                        keys = min(_KEYS, i + rows - j)
                        for t in range(0, keys, LANES):
                            at = (j + t) * dim
                            multiply_rows_by_panel(
                                rows, q, at_q, q_stride, 1, keys_by_dim, at, LANES, dim, weights, t, _KEYS
                            )
                            multiply_rows_by_panel(
                                rows, grad_out, at_grad, grad_out_stride, 1, values_by_dim, at, LANES, dim,
                                changes, t, _KEYS,
                            )  # fmt: skip
                        for r in range(rows):
                            token = begin + i + r
                            at_out, at_given = token * out_stride + head * dim, at_grad + r * grad_out_stride
                            mean = np.float32(0.0)
                            for d in range(dim):
                                mean += out[at_out + d] * grad_out[at_given + d]
                            shift = fill(-sums[token * sums_stride + head])
                            seen = i + r + 1 - j
                            slope = fill(share)
                            for t in range(0, keys, LANES):
                                at = r * _KEYS + t
                                scores = load_vector(weights, at)
                                if bound > 0:
                                    capped = vectors.tanh(vectors.multiply(scores, fill(share / bound)))
                                    scores = vectors.multiply(capped, fill(bound / share))
                                    rest = vectors.subtract(one, vectors.multiply(capped, capped))
                                    slope = vectors.multiply(fill(share), rest)
                                scores = vectors.keep_first(scores, max(0, seen - t))
                                scores = vectors.drop_first(scores, max(0, seen - window - t))
                                exponents = vectors.multiply_add(scores, fill(scale), shift)
                                weight = vectors.exp2(vectors.smaller(exponents, vectors.zeros()))
                                change = vectors.subtract(load_vector(changes, at), fill(mean))
                                store_vector(weights, at, weight)
                                store_vector(
                                    changes, at, vectors.multiply(weight, vectors.multiply(change, slope))
                                )
                        for c in range(0, padded, LANES):
                            at = c * height + (i - skipped) * LANES
                            to = j * padded + c
                            add_rows_by_panel(
                                keys, weights, 0, 1, _KEYS, grads_by_row, at, LANES, rows, grad_v, to, padded
                            )
                            add_rows_by_panel(
                                keys, changes, 0, 1, _KEYS, queries_by_row, at, LANES, rows, grad_k, to,
                                padded,
                            )  # fmt: skip
                            at = c * height + j * LANES
                            add_rows_by_panel(
                                rows, changes, 0, _KEYS, 1, keys_by_row, at, LANES, keys, grad_q, c, padded
                            )
                    for r in range(rows):
                        to = (begin + i + r) * to_q_stride + head * dim
                        for d in range(dim):
                            to_q[to + d] = grad_q[r * padded + d]
            for t in range(length):
                to = (starts[sequence] + t) * to_kv_stride + kv_head * dim
                for d in range(dim):
                    to_kv[to + d] = grad_k[t * padded + d]
                    to_kv[to + kv_heads * dim + d] = grad_v[t * padded + d]
        first, last = claim(work)
