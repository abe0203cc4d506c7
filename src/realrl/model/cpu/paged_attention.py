"""Attention of a decode step over the paged KV cache, on a CPU.

A unit of work is a key/value head of a prompt. The prompt's keys are read once for all query heads that share them
and for all rows that continue the prompt; then each row attends to its own keys. The softmax is computed in tiles,
which are combined one by one (Milakov and Gimelshein, arXiv 1805.02867). A row's result does not depend on other
rows.

If ranks divide the cache, the kernel attends to the keys of its rank alone. Lengths and windows count the keys of
all ranks.
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
from realrl.model.cpu.vectors import (
    REGISTER_ROWS,
    add,
    fill,
    load_vector,
    make_panel_product,
    multiply_add,
    repeat,
    store_vector,
)

assert BLOCK_TOKENS == LANES, "the scores of a block are a vector"

_TILE = 8
"""Blocks per tile: few enough that keys, values and scores stay in the nearest caches."""
_WIDTH = _TILE * LANES

_multiply_most, _add_most = make_panel_product(REGISTER_ROWS), make_panel_product(REGISTER_ROWS, adds=True)


@numba.njit(inline="always")
def _compute_scores(
    q: Any,
    a: int,
    b: int,
    dim: int,
    k: Any,
    block: int,
    next_block: int,
    scores: Any,
    place: int,
    following: int,
) -> None:
    """Compute the scores of the keys of two blocks for queries a and b. The two blocks, or queries, may be the
    same.

    scores: [queries * _WIDTH]
    """
    a_here, b_here, a_next, b_next = vectors.zeros(), vectors.zeros(), vectors.zeros(), vectors.zeros()
    for d in range(dim):
        here, then = load_vector(k, block + d * LANES), load_vector(k, next_block + d * LANES)
        of_a, of_b = repeat(q, a * dim + d), repeat(q, b * dim + d)
        a_here, b_here = multiply_add(of_a, here, a_here), multiply_add(of_b, here, b_here)
        a_next, b_next = multiply_add(of_a, then, a_next), multiply_add(of_b, then, b_next)
    store_vector(scores, a * _WIDTH + place, a_here)
    store_vector(scores, b * _WIDTH + place, b_here)
    store_vector(scores, a * _WIDTH + following, a_next)
    store_vector(scores, b * _WIDTH + following, b_next)


@numba.njit(inline="always")
def _add_values(
    scores: Any, a: int, b: int, place: int, v: Any, block: int, count: int, outputs: Any, padded: int
) -> None:
    """Add a block's values, times their weights, to the outputs of queries a and b, which may be the same.

    scores: [queries * _WIDTH], outputs: [queries * padded]
    """
    a_weights, b_weights = a * _WIDTH + place, b * _WIDTH + place
    for c in range(0, padded, 2 * LANES):
        then = min(c + LANES, padded - LANES)  # equals c at the last vector
        a_sum, b_sum, a_next, b_next = vectors.zeros(), vectors.zeros(), vectors.zeros(), vectors.zeros()
        for t in range(count):
            at = block + t * padded
            value, following = load_vector(v, at + c), load_vector(v, at + then)
            of_a, of_b = repeat(scores, a_weights + t), repeat(scores, b_weights + t)
            a_sum, b_sum = multiply_add(of_a, value, a_sum), multiply_add(of_b, value, b_sum)
            a_next, b_next = multiply_add(of_a, following, a_next), multiply_add(of_b, following, b_next)
        # If b equals a, or `then` equals c, the same sum is stored twice, not added twice.
        a_sum, b_sum = (
            add(load_vector(outputs, a * padded + c), a_sum),
            add(load_vector(outputs, b * padded + c), b_sum),
        )
        a_next, b_next = (
            add(load_vector(outputs, a * padded + then), a_next),
            add(load_vector(outputs, b * padded + then), b_next),
        )
        store_vector(outputs, a * padded + c, a_sum)
        store_vector(outputs, b * padded + c, b_sum)
        store_vector(outputs, a * padded + then, a_next)
        store_vector(outputs, b * padded + then, b_next)


@numba.njit(inline="always")
def _weigh(
    scores: Any,
    query: int,
    hidden: int,
    keys: int,
    bound: np.float32,
    tops: Any,
    totals: Any,
    outputs: Any,
    padded: int,
) -> None:
    """Turn a query's scores in a tile into weights, relative to the largest score so far.

    The first `hidden` keys get no weight. Scores are bounded softly if `bound` is above 0.
    """
    first = query * _WIDTH
    blocks = (keys + LANES - 1) // LANES
    begin = min(hidden // LANES, blocks)
    for j in range(begin):
        store_vector(scores, first + j * LANES, vectors.zeros())
    if hidden >= keys:
        for j in range(begin, blocks):
            store_vector(scores, first + j * LANES, vectors.zeros())
        return
    if bound > 0:
        steep = fill(np.float32(1.0) / bound)
        for j in range(begin, blocks):
            capped = vectors.tanh(vectors.multiply(load_vector(scores, first + j * LANES), steep))
            store_vector(scores, first + j * LANES, vectors.multiply(capped, fill(bound)))
    last = first + (blocks - 1) * LANES
    store_vector(scores, last, vectors.keep_first(load_vector(scores, last), keys - (blocks - 1) * LANES))
    start = first + begin * LANES
    store_vector(scores, start, vectors.drop_first(load_vector(scores, start), hidden - begin * LANES))
    best = load_vector(scores, start)
    for j in range(begin + 1, blocks):
        best = vectors.larger(best, load_vector(scores, first + j * LANES))
    top = max(tops[query], vectors.find_maximum(best))
    # Outputs are always rescaled, because a branch on whether the largest score is new would be mispredicted.
    factor = vectors.exp2(fill(tops[query] - top))
    for c in range(query * padded, (query + 1) * padded, LANES):
        store_vector(outputs, c, vectors.multiply(load_vector(outputs, c), factor))
    total = vectors.zeros()
    for j in range(begin, blocks):
        weights = vectors.exp2(vectors.subtract(load_vector(scores, first + j * LANES), fill(top)))
        store_vector(scores, first + j * LANES, weights)
        total = add(total, weights)
    tops[query] = top
    totals[query] = totals[query] * vectors.find_first(factor) + vectors.add_up(total)


@numba.njit(inline="always")
def _attend(work: Work, k: Any, v: Any) -> None:
    """Implement `attend_float32` and `attend_bfloat16`."""
    starts, prompt_lengths, own_lengths = int_row(work, 7, 0), int_row(work, 4, 0), int_row(work, 6, 0)
    heads, kv_heads, dim, most = (
        int(number(work, 8)),
        int(number(work, 9)),
        int(number(work, 10)),
        int(number(work, 11)),
    )
    window, bound, sinks = int(number(work, 12)), number(work, 13) * LOG2_E, row(work, 14, 0)
    ranks, index = int(number(work, 15)), int(number(work, 16))
    group = heads // kv_heads
    padded = (dim + LANES - 1) // LANES * LANES
    q = np.empty(most * group * dim, np.float32)
    outputs = np.empty(most * group * padded, np.float32)
    scores = np.empty(most * group * _WIDTH, np.float32)
    tops, totals = np.empty(most * group, np.float32), np.empty(most * group, np.float32)
    scale = LOG2_E / np.sqrt(np.float32(dim))
    first, last = claim(work)
    while first < last:
        for item in range(first, last):
            prompt, head = item // kv_heads, item % kv_heads
            begin, end = starts[prompt], starts[prompt + 1]
            queries = (end - begin) * group
            for a in range(queries):
                sink = sinks[head * group + a % group] * LOG2_E
                tops[a] = sink
                totals[a] = np.float32(0.0) if sink == -np.inf else np.float32(1.0)
            outputs[: queries * padded] = 0.0
            for r in range(begin, end):
                qkv = row(work, 0, r)
                if own_lengths[r] % ranks == index:
                    place = own_lengths[r] // ranks
                    block = (int_row(work, 5, r)[place // LANES] * kv_heads + head) * LANES
                    slot = place % LANES
                    for d in range(dim):
                        vectors.store_number(k, block * dim + d * LANES + slot, qkv[(heads + head) * dim + d])
                        vectors.store_number(
                            v, (block + slot) * padded + d, qkv[(heads + kv_heads + head) * dim + d]
                        )
                at = (r - begin) * group * dim
                for d in range(group * dim):
                    q[at + d] = qkv[head * group * dim + d] * scale
            for segment in range(1 + end - begin):
                # All queries attend to segment 0, the prompt. The queries of row i attend to segment 1 + i, the
                # row's own tokens.
                r = begin if segment == 0 else begin + segment - 1
                table = int_row(work, 3, r) if segment == 0 else int_row(work, 5, r)
                length = count_here(prompt_lengths[r] if segment == 0 else own_lengths[r] + 1, ranks, index)
                here = 0 if segment == 0 else (r - begin) * group
                until = queries if segment == 0 else here + group
                # Find the first key of the segment that any row sees. The row with the fewest generated tokens sees
                # it. Tiles always begin at multiples of their width, so that a row's sums do not depend on its
                # neighbours.
                start = length
                for other in range(begin, end) if segment == 0 else range(r, r + 1):
                    newest = prompt_lengths[other] + own_lengths[other]
                    past = newest + 1 - window - (0 if segment == 0 else prompt_lengths[r])
                    start = min(start, count_here(past, ranks, index))
                for tile in range(start // _WIDTH * _WIDTH, length, _WIDTH):
                    keys = min(_WIDTH, length - tile)
                    for t in range(0, keys, 2 * LANES):
                        # `then` equals t at the last block.
                        then = t + LANES if t + LANES < keys else t
                        block = (table[(tile + t) // LANES] * kv_heads + head) * LANES
                        next_block = (table[(tile + then) // LANES] * kv_heads + head) * LANES
                        for line in range(0, padded * LANES, LANES):
                            vectors.prefetch(v, block * padded + line)  # for the second loop over the tile
                            vectors.prefetch(v, next_block * padded + line)
                        a = here
                        while until - a >= REGISTER_ROWS:
                            at = a * _WIDTH + t
                            _multiply_most(q, a * dim, dim, 1, k, block * dim, LANES, dim, scores, at, _WIDTH)
                            at = a * _WIDTH + then
                            _multiply_most(
                                q, a * dim, dim, 1, k, next_block * dim, LANES, dim, scores, at, _WIDTH
                            )
                            a += REGISTER_ROWS
                        while a < until:
                            b = min(a + 1, until - 1)
                            _compute_scores(q, a, b, dim, k, block * dim, next_block * dim, scores, t, then)
                            a += 2
                    for a in range(here, until):
                        of = begin + a // group
                        newest = prompt_lengths[of] + own_lengths[of]
                        past = newest + 1 - window - (0 if segment == 0 else prompt_lengths[of])
                        hidden = max(0, count_here(past, ranks, index) - tile)
                        _weigh(scores, a, hidden, keys, bound, tops, totals, outputs, padded)
                    for t in range(0, keys, LANES):
                        block = (table[(tile + t) // LANES] * kv_heads + head) * LANES
                        count = min(LANES, keys - t)
                        a = here
                        while until - a >= REGISTER_ROWS:
                            for c in range(0, padded, LANES):
                                at, to = a * _WIDTH + t, a * padded + c
                                _add_most(
                                    scores, at, _WIDTH, 1, v, block * padded + c, padded, count, outputs, to,
                                    padded,
                                )  # fmt: skip
                            a += REGISTER_ROWS
                        while a < until:
                            b = min(a + 1, until - 1)
                            _add_values(scores, a, b, t, v, block * padded, count, outputs, padded)
                            a += 2
            for a in range(queries):
                out, sums = row(work, 17, begin + a // group), row(work, 18, begin + a // group)
                query_head = head * group + a % group
                at = query_head * dim
                # A rank that holds no key of a row has a sum of 0, and its output does not count.
                share = np.float32(1.0) / totals[a] if totals[a] > 0 else np.float32(0.0)
                sums[query_head] = tops[a] + np.log2(totals[a])
                for d in range(dim):
                    out[at + d] = outputs[a * padded + d] * share
        first, last = claim(work)


@row_kernel(outputs=2)
def attend_float32(work: Work) -> None:
    """Store new keys and values of rows, and attend from the rows to all of their keys.

    Units of work are the key/value heads of prompts. Arguments:
        qkv [B, (heads + 2 kv_heads) * D]; all keys and all values of a layer;
        prompt tables [B, blocks] and lengths [B]; own tables [B, blocks] and lengths [B] without the new token;
        first row of each prompt and B [prompts + 1]; heads, kv_heads, D, most rows of a prompt;
        window (tokens that a token sees, itself included), cap of scores (0 for none);
        sinks [heads] (-inf for none); number of ranks that divide the cache, index of this rank
        -> out [B, heads * D]; log2 of the sums of the exponentials of scores [B, heads]
    """
    _attend(work, float_pointer(work, 1), float_pointer(work, 2))


@row_kernel(outputs=2)
def attend_bfloat16(work: Work) -> None:
    """`attend_float32` with keys and values in bfloat16; all other numbers are float32."""
    _attend(work, bfloat16_pointer(work, 1), bfloat16_pointer(work, 2))
