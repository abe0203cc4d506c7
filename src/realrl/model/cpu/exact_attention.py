"""Attention on a CPU whose results are exact: each depends only on the query, its keys and its values, bit for bit.

One kernel serves decode steps, prefills and training. It computes all scores of a query before the softmax, and
sums weights and values in the order of the keys' positions. The result does not depend on where keys lie, how many
keys other queries have, or which queries are read together.

A run consists of neighbouring rows that share keys. A unit of work is a key/value head of a run.

If ranks divide a cache, the kernel attends to the keys of its rank alone, like that of `paged_attention`. Such
results are not exact.
"""

from typing import Any

import numba
import numpy as np

from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.layout.limits import LANES
from realrl.model.cpu import vectors
from realrl.model.cpu.arithmetic import LOG2_E, count_here
from realrl.model.cpu.rows import (
    Work,
    bfloat16_pointer,
    claim,
    float_pointer,
    int_row,
    number,
    row,
    row_kernel,
)
from realrl.model.cpu.vectors import add, fill, load_vector, multiply_add, repeat, store_vector

assert BLOCK_TOKENS == LANES, "the scores of a block are a vector"


@numba.njit(inline="always")
def _compute_scores(
    q: Any, a: int, b: int, dim: int, k: Any, block: int, scores: Any, at_a: int, at_b: int
) -> None:
    """Compute the scores of a block's keys for queries a and b, which may be the same."""
    a_even, a_odd, b_even, b_odd = vectors.zeros(), vectors.zeros(), vectors.zeros(), vectors.zeros()
    for d in range(0, dim, 2):
        even, odd = load_vector(k, block + d * LANES), load_vector(k, block + d * LANES + LANES)
        a_even = multiply_add(repeat(q, a * dim + d), even, a_even)
        b_even = multiply_add(repeat(q, b * dim + d), even, b_even)
        a_odd = multiply_add(repeat(q, a * dim + d + 1), odd, a_odd)
        b_odd = multiply_add(repeat(q, b * dim + d + 1), odd, b_odd)
    store_vector(scores, at_a, add(a_even, a_odd))
    store_vector(scores, at_b, add(b_even, b_odd))


@numba.njit(inline="always")
def _weigh(
    scores: Any, first: int, hidden: int, keys: int, bound: np.float32, sink: np.float32
) -> tuple[np.float32, np.float32]:
    """Turn a query's scores into weights, relative to the largest score or the sink; return this largest score, and
    the sum of all weights.

    The sum includes the sink's weight. The first `hidden` keys get no weight. Scores are bounded softly if `bound`
    is above 0.
    """
    if hidden >= keys:
        # Another rank has the keys that this query sees.
        for place in range(first, first + keys, LANES):
            store_vector(scores, place, vectors.zeros())
        return sink, np.float32(1.0) if sink > -np.inf else np.float32(0.0)
    if bound > 0:
        steep = fill(np.float32(1.0) / bound)
        for place in range(first, first + keys, LANES):
            capped = vectors.tanh(vectors.multiply(load_vector(scores, place), steep))
            store_vector(scores, place, vectors.multiply(capped, fill(bound)))
    for place in range(first, first + hidden, LANES):
        store_vector(scores, place, vectors.drop_first(load_vector(scores, place), first + hidden - place))
    last = first + (keys - 1) // LANES * LANES
    store_vector(scores, last, vectors.keep_first(load_vector(scores, last), first + keys - last))
    best = load_vector(scores, first)
    for place in range(first + LANES, last + LANES, LANES):
        best = vectors.larger(best, load_vector(scores, place))
    highest = max(vectors.find_maximum(best), sink)
    top = fill(highest)
    total = vectors.zeros()
    for place in range(first, last + LANES, LANES):
        weights = vectors.exp2(vectors.subtract(load_vector(scores, place), top))
        store_vector(scores, place, weights)
        total = add(total, weights)
    return highest, vectors.add_halves(total) + vectors.find_first(vectors.exp2(fill(sink - highest)))


@numba.njit(inline="always")
def _add_values(
    scores: Any,
    at_a: int,
    at_b: int,
    v: Any,
    block: int,
    count: int,
    outputs: Any,
    a: int,
    b: int,
    padded: int,
) -> None:
    """Add the first `count` values of a block, times their weights, to the outputs of queries a and b, in order."""
    for c in range(0, padded, LANES):
        a_sum, b_sum = load_vector(outputs, a * padded + c), load_vector(outputs, b * padded + c)
        for t in range(count):
            value = load_vector(v, block + t * padded + c)
            a_sum = multiply_add(repeat(scores, at_a + t), value, a_sum)
            b_sum = multiply_add(repeat(scores, at_b + t), value, b_sum)
        store_vector(outputs, a * padded + c, a_sum)
        store_vector(outputs, b * padded + c, b_sum)


@numba.njit(inline="always")
def _attend(work: Work, k: Any, v: Any) -> None:
    """Implement `attend_runs_float32` and `attend_runs_bfloat16`."""
    shared_lengths, own_numbers, own_lengths = int_row(work, 4, 0), int_row(work, 6, 0), int_row(work, 7, 0)
    starts = int_row(work, 8, 0)
    heads, kv_heads, dim = int(number(work, 9)), int(number(work, 10)), int(number(work, 11))
    most, longest = int(number(work, 12)), int(number(work, 13))
    window, bound, sinks = int(number(work, 14)), number(work, 15) * LOG2_E, row(work, 16, 0)
    ranks, index = int(number(work, 17)), int(number(work, 18))
    group = heads // kv_heads
    padded = (dim + LANES - 1) // LANES * LANES
    # The last block of scores may extend past a query's last key.
    width = (longest + 2 * LANES - 1) // LANES * LANES
    q = np.empty(most * group * dim, np.float32)
    outputs = np.empty(most * group * padded, np.float32)
    scores = np.empty(most * group * width, np.float32)
    shared_here, own_here = np.empty(most, np.int64), np.empty(most, np.int64)
    scale = LOG2_E / np.sqrt(np.float32(dim))
    first, last = claim(work)
    while first < last:
        for item in range(first, last):
            run, head = item // kv_heads, item % kv_heads
            begin, end = starts[run], starts[run + 1]
            queries = (end - begin) * group
            outputs[: queries * padded] = 0.0
            shared = 0
            for r in range(begin, end):
                shared_here[r - begin] = count_here(shared_lengths[r], ranks, index)
                own_here[r - begin] = count_here(own_lengths[r], ranks, index)
                shared = max(shared, shared_here[r - begin])
                of_row = row(work, 0, r)
                at = (r - begin) * group * dim
                for d in range(group * dim):
                    q[at + d] = of_row[head * group * dim + d] * scale
            table = int_row(work, 3, run)
            for t in range(0, shared, LANES):
                block = (table[t // LANES] * kv_heads + head) * LANES * dim
                for a in range(0, queries, 2):
                    b = min(a + 1, queries - 1)
                    _compute_scores(q, a, b, dim, k, block, scores, a * width + t, b * width + t)
            for r in range(begin, end):
                own = int_row(work, 5, own_numbers[r])
                here = (r - begin) * group
                for t in range(0, own_here[r - begin], LANES):
                    block = (own[t // LANES] * kv_heads + head) * LANES * dim
                    place = shared_here[r - begin] + t
                    for a in range(here, here + group, 2):
                        b = min(a + 1, here + group - 1)
                        _compute_scores(q, a, b, dim, k, block, scores, a * width + place, b * width + place)
            for a in range(queries):
                r = begin + a // group
                keys = shared_here[a // group] + own_here[a // group]
                past = shared_lengths[r] + own_lengths[r] - window
                hidden = count_here(min(past, shared_lengths[r]), ranks, index)
                hidden += count_here(past - shared_lengths[r], ranks, index)
                query_head = head * group + a % group
                sink = sinks[query_head] * LOG2_E
                highest, total = _weigh(scores, a * width, hidden, keys, bound, sink)
                row(work, 20, r)[query_head] = highest + np.log2(total)
                # The query is no longer needed.
                q[a * dim] = np.float32(1.0) / total if total > 0 else np.float32(0.0)
            for t in range(0, shared, LANES):
                block = (table[t // LANES] * kv_heads + head) * LANES * padded
                for a in range(0, queries, 2):
                    b = min(a + 1, queries - 1)
                    a_count = min(LANES, shared_here[a // group] - t)
                    b_count = min(LANES, shared_here[b // group] - t)
                    a_place, b_place = a * width + t, b * width + t
                    if a_count == b_count:
                        _add_values(scores, a_place, b_place, v, block, a_count, outputs, a, b, padded)
                    else:
                        _add_values(scores, a_place, a_place, v, block, a_count, outputs, a, a, padded)
                        _add_values(scores, b_place, b_place, v, block, b_count, outputs, b, b, padded)
            for r in range(begin, end):
                own = int_row(work, 5, own_numbers[r])
                here = (r - begin) * group
                for t in range(0, own_here[r - begin], LANES):
                    block = (own[t // LANES] * kv_heads + head) * LANES * padded
                    place, count = shared_here[r - begin] + t, min(LANES, own_here[r - begin] - t)
                    for a in range(here, here + group, 2):
                        b = min(a + 1, here + group - 1)
                        a_place, b_place = a * width + place, b * width + place
                        _add_values(scores, a_place, b_place, v, block, count, outputs, a, b, padded)
            for a in range(queries):
                out = row(work, 19, begin + a // group)
                at = (head * group + a % group) * dim
                for d in range(dim):
                    out[at + d] = outputs[a * padded + d] * q[a * dim]
        first, last = claim(work)


@row_kernel(outputs=2, strict=True)
def attend_runs_float32(work: Work) -> None:
    """Attend from rows to the keys that a run of rows shares, and then to the rows' own keys.

    Units of work are the key/value heads of runs. Arguments:
        q [N, heads * D or more]; all keys and all values as vectors;
        shared tables [runs, any], shared lengths [N];
        own tables [tables, any], number of each row's own table [N], own lengths [N];
        first row of each run and N [runs + 1]; heads, kv_heads, D, most rows of a run, most keys of a row;
        window (tokens that a token sees, itself included), cap of scores (0 for none);
        sinks [heads] (-inf for none); number of ranks that divide the cache, index of this rank
        -> out [N, heads * D]; log2 of the sums of the exponentials of scores [N, heads]

    Keys of a block are stored dim by dim, D x 16; values token by token, padded to whole vectors.
    """
    _attend(work, float_pointer(work, 1), float_pointer(work, 2))


@row_kernel(outputs=2, strict=True)
def attend_runs_bfloat16(work: Work) -> None:
    """`attend_runs_float32` with keys and values in bfloat16; all other numbers are float32."""
    _attend(work, bfloat16_pointer(work, 1), bfloat16_pointer(work, 2))
