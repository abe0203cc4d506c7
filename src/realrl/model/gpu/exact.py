"""Exact products and attention on a GPU, in Triton: a row's result depends only on the row itself and on its
weights or keys.

Tiles have one size for any number of rows. One program computes each sum, in one order. Decode steps, prefills and
training run the same compiled kernel. By default, Triton compiles special kernels for arguments that are 1 or
divisible by 16; `do_not_specialize` prevents this.
"""

import triton
import triton.language as tl
from torch import Tensor

from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.model.gpu.library import register_kernel
from realrl.model.gpu.paged_attention import LOG2_E, count_here, product_type

_ROWS, _COLUMNS, _DEPTH = 64, 64, 32
"""Rows, columns and depth of the tile of every product. The tile is small enough for decode steps of few rows."""
_QUERIES = 16
"""Minimum number of queries of a program: the smallest tile of tensor cores. A program has more queries if more
query heads share a key."""
_TILE = 32
"""Keys that a program reads at a time."""


@triton.jit(do_not_specialize=["rows"])
def _multiply_kernel(
    x, weight, out, rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, DEPTH):
        place = first + tl.arange(0, DEPTH)
        inside = place < depth
        a = tl.load(x + row[:, None] * depth + place[None, :], is_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            weight + column[None, :] * depth + place[:, None], is_column[None, :] & inside[:, None], other=0.0
        )
        total = tl.dot(a.to(PRODUCT), b.to(PRODUCT), total, input_precision="ieee")
    tl.store(
        out + row[:, None] * columns + column[None, :],
        total.to(out.dtype.element_ty),
        is_row[:, None] & is_column[None, :],
    )


@register_kernel("multiply_rows(Tensor x, Tensor weight, Tensor(a!) out)")
def launch_products(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute x @ weight.T with float32 sums. x: [N, K], weight: [M, K] -> out [N, M]; all are contiguous"""
    rows, depth = x.shape
    if out.numel():
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(len(weight), _COLUMNS))
        _multiply_kernel[grid](
            x, weight, out, rows, len(weight), depth,
            ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, PRODUCT=product_type(x.dtype), num_warps=4,
        )  # fmt: skip


@triton.jit
def _count_past(shared, own, window, RANKS: tl.constexpr, INDEX: tl.constexpr):
    """Count the keys before the window of rows whose newest key is their last one."""
    past = shared + own - window
    return count_here(tl.minimum(past, shared), RANKS, INDEX) + count_here(past - shared, RANKS, INDEX)


@triton.jit(do_not_specialize=["shared_width", "own_width", "window"])
def _attend_kernel(
    qkv, k_pool, v_pool, shared_tables, shared_lengths, own_tables, own_numbers, own_lengths, starts, out, sums,
    shared_width, own_width, scale, window, bound, sinks, RANKS: tl.constexpr, INDEX: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, LOG2_E: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Attend from a run (neighbouring rows that share keys) to all of its keys, tile by tile. A program computes
    the query heads of one key/value head.

    Lengths and the window count the keys of all RANKS ranks that divide the cache. All other numbers of keys and
    their places are those of this rank.
    """
    run = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    begin = tl.load(starts + run)
    end = tl.load(starts + run + 1)
    queries = tl.arange(0, QUERIES)
    row = begin + queries // group
    is_query = row < end
    dims = tl.arange(0, PADDED)
    is_dim = dims < DIM
    number = head * group + queries % group
    inside = is_query[:, None] & is_dim[None, :]
    q = tl.load(
        qkv + row[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + number[:, None] * DIM + dims[None, :],
        inside,
        other=0.0,
    )
    row_shared = tl.load(shared_lengths + row, is_query, other=0)
    row_own = tl.load(own_lengths + row, is_query, other=0)
    seen = count_here(row_shared, RANKS, INDEX) + count_here(row_own, RANKS, INDEX)
    past = _count_past(row_shared, row_own, window, RANKS, INDEX)
    # Rows of a run with own keys share them, too. The last row sees the most keys.
    shared = count_here(tl.load(shared_lengths + end - 1), RANKS, INDEX)
    keys = shared + count_here(tl.load(own_lengths + end - 1), RANKS, INDEX)
    own_number = tl.load(own_numbers + begin)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    output = tl.zeros([QUERIES, PADDED], tl.float32)
    # Tiles before every row's window are skipped. This does not change the result, because their weights would be
    # 0.
    first_shared, first_own = tl.load(shared_lengths + begin), tl.load(own_lengths + begin)
    hidden = _count_past(first_shared, first_own, window, RANKS, INDEX)
    for first in range(hidden // TILE * TILE, keys, TILE):
        position = first + tl.arange(0, TILE)
        is_shared = position < shared
        is_own = (position >= shared) & (position < keys)
        own = tl.where(is_own, position - shared, 0)
        of_shared = tl.load(shared_tables + run * shared_width + position // BLOCK, is_shared, other=0)
        of_own = tl.load(own_tables + own_number * own_width + own // BLOCK, is_own, other=0)
        offset = tl.where(is_own, own, position) % BLOCK
        place = (((of_shared + of_own) * KV_HEADS + head) * BLOCK + offset) * DIM
        is_key = position < keys
        k = tl.load(k_pool + place[None, :] + dims[:, None], is_key[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(q.to(PRODUCT), k.to(PRODUCT), input_precision="ieee") * scale
        if CAP:
            # tanh(x) = 2 / (1 + e^-2x) - 1
            scores = bound * (2.0 * tl.sigmoid(2.0 * scores / bound) - 1.0)
        is_seen = (position[None, :] < seen[:, None]) & (position[None, :] >= past[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        # A query that has seen no key yet must not subtract infinity from infinity.
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(top - finite)
        weights = tl.exp2(scores - finite[:, None])
        total = total * factor + tl.sum(weights, 1)
        v = tl.load(v_pool + place[:, None] + dims[None, :], is_key[:, None] & is_dim[None, :], other=0.0)
        output = output * factor[:, None] + tl.dot(weights.to(PRODUCT), v.to(PRODUCT), input_precision="ieee")
        top = higher
    if SINKS:
        sink = tl.load(sinks + number).to(tl.float32) * LOG2_E
        higher = tl.where(is_query, tl.maximum(top, sink), 0.0)
        factor = tl.exp2(top - higher)
        total = total * factor + tl.exp2(sink - higher)
        output = output * factor[:, None]
        top = higher
    output = output / tl.where(is_query & (total > 0.0), total, 1.0)[:, None]
    tl.store(sums + row * HEADS + number, top + tl.log2(total), is_query)
    target = out + row[:, None] * (HEADS * DIM) + number[:, None] * DIM + dims[None, :]
    tl.store(target, output.to(out.dtype.element_ty), inside)


@register_kernel(
    "attend_to_runs(Tensor qkv, Tensor k, Tensor v, Tensor shared_tables, Tensor shared_lengths, "
    "Tensor own_tables, Tensor own_numbers, Tensor own_lengths, Tensor starts, int heads, int window, float cap, "
    "Tensor? sinks, int ranks, int index, Tensor(a!) out, Tensor(b!) sums)"
)
def launch_run_attention(
    qkv: Tensor, k: Tensor, v: Tensor, shared_tables: Tensor, shared_lengths: Tensor, own_tables: Tensor,
    own_numbers: Tensor, own_lengths: Tensor, starts: Tensor, heads: int, window: int, cap: float,
    sinks: Tensor | None, ranks: int, index: int, out: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Compute `paged_attention.attend_to_runs`. Tensors are contiguous; all rows of a run have the same
    own keys.

    qkv: [N, (heads + 2 kv_heads) * D]; k, v: [blocks, kv_heads, BLOCK_TOKENS, D] -> out [N, heads * D], sums [N,
    heads]
    """
    _, kv_heads, _, dim = k.shape
    _attend_kernel[(len(starts) - 1, kv_heads)](
        qkv, k, v, shared_tables, shared_lengths, own_tables, own_numbers, own_lengths, starts, out, sums,
        shared_tables.shape[-1], own_tables.shape[-1], LOG2_E * dim**-0.5,
        window, LOG2_E * cap, out if sinks is None else sinks, RANKS=ranks, INDEX=index,
        CAP=cap > 0, SINKS=sinks is not None, LOG2_E=LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED=max(16, triton.next_power_of_2(dim)),
        QUERIES=max(_QUERIES, triton.next_power_of_2(heads // kv_heads)),
        BLOCK=BLOCK_TOKENS, TILE=_TILE, PRODUCT=product_type(k.dtype), num_warps=4,
    )  # fmt: skip
