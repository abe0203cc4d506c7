"""Attention of a decode step over the paged KV cache on a GPU, in Triton: split-KV, as in FlashDecoding.

Each program attends to a part of a row's keys, from the query heads that share one key/value head. A second kernel
combines the parts by their log-sum-exps. A row's lengths alone decide how it is cut into parts, so its result does
not depend on other rows.

If ranks divide the cache (`CachePart`), the kernels attend to the keys of their rank alone. Lengths and windows
count the keys of all ranks.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from realrl.layout.kv_blocks import BLOCK_TOKENS

PARTS = 16
"""Maximum number of parts of a row. Even with few rows, there are then enough programs for all multiprocessors of a
GPU."""
PART_KEYS = 256
"""Minimum number of keys in a part; smaller parts would cost more than they gain. Parts are larger if a row is too
long for PARTS such parts."""
_TILE_BYTES = 1 << 14
"""Bytes of keys, or of values, that a program reads at a time. Several such tiles fit into shared memory."""
_QUERIES = 16
"""Minimum number of queries of a product: the smallest tile of tensor cores. Usually fewer heads share a key."""
LOG2_E = 1.4426950408889634
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on a CPU, in Triton's interpreter."""


def product_type(dtype: torch.dtype) -> tl.dtype:
    """Find the type of the factors of products. It is always float32 in Triton's interpreter, which has no bfloat16
    products."""
    return tl.float32 if _INTERPRETED or dtype == torch.float32 else tl.bfloat16


@triton.jit
def count_here(tokens, RANKS: tl.constexpr, INDEX: tl.constexpr):
    """Count those of the first `tokens` tokens of a segment that rank INDEX holds."""
    return (tl.maximum(tokens, 0) + RANKS - 1 - INDEX) // RANKS


@triton.jit
def _count_tiles(
    prompt, own, RANKS: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    PART_TILES: tl.constexpr,
):  # fmt: skip
    """Count the tiles of the prompt, of the whole row, and of a part."""
    of_prompt = tl.cdiv(count_here(prompt, RANKS, INDEX), TILE)
    tiles = of_prompt + tl.cdiv(count_here(own + 1, RANKS, INDEX), TILE)
    return of_prompt, tiles, tl.maximum(PART_TILES, tl.cdiv(tiles, PARTS))


# These arguments differ from call to call. Triton would compile the kernel again for 1, for multiples of 16, and
# for other numbers.
@triton.jit(do_not_specialize=["prompt_width", "own_width", "window"])
def attend_part(
    qkv, k_pool, v_pool, prompt_tables, prompt_lengths, own_tables, own_lengths, outputs, tops, totals,
    prompt_width, own_width, scale, window, bound, RANKS: tl.constexpr, INDEX: tl.constexpr, CAP: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PART_TILES: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Store the newest key and value of a row, and attend to a part of its keys within the window.

    qkv: [B, (heads + 2 kv_heads) * D]; pools: [blocks, kv_heads, BLOCK, D]; outputs: [B, heads, PARTS, D] float32,
    not divided by totals; tops, totals: [B, heads, PARTS] float32. PRODUCT: type of the factors of products.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    prompt = tl.load(prompt_lengths + row).to(tl.int32)
    own = tl.load(own_lengths + row).to(tl.int32)
    prompt_tiles, tiles, each = _count_tiles(prompt, own, RANKS, INDEX, TILE, PARTS, PART_TILES)
    first = part * each
    if first >= tiles:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    dims = tl.arange(0, PADDED)
    queries = tl.arange(0, QUERIES)
    here = qkv + row * (HEADS + 2 * KV_HEADS) * DIM
    is_dim = dims < DIM
    is_query = (queries < group)[:, None] & is_dim[None, :]
    q = tl.load(here + (head * group + queries[:, None]) * DIM + dims[None, :], mask=is_query, other=0.0)
    new_k = tl.load(here + (HEADS + head) * DIM + dims, mask=is_dim, other=0.0)
    new_v = tl.load(here + (HEADS + KV_HEADS + head) * DIM + dims, mask=is_dim, other=0.0)
    holds_new = own % RANKS == INDEX
    newest = own // RANKS
    if (part == 0) & holds_new:
        block = tl.load(own_tables + row * own_width + newest // BLOCK)
        place = ((block * KV_HEADS + head) * BLOCK + newest % BLOCK) * DIM + dims
        tl.store(k_pool + place, new_k, mask=is_dim)
        tl.store(v_pool + place, new_v, mask=is_dim)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    output = tl.zeros([QUERIES, PADDED], tl.float32)
    # Tiles before the window are not read. The first visible token may lie in the prompt or after it.
    seen = tl.maximum(prompt + own + 1 - window, 0)
    hidden = count_here(tl.where(seen < prompt, seen, seen - prompt), RANKS, INDEX) // TILE
    of_seen = tl.where(seen < prompt, hidden, prompt_tiles + hidden)
    prompt_here, own_here = count_here(prompt, RANKS, INDEX), count_here(own + 1, RANKS, INDEX)
    for tile in range(tl.maximum(first, of_seen), tl.minimum(first + each, tiles)):
        in_own = tile >= prompt_tiles
        keys = (tile - tl.where(in_own, prompt_tiles, 0)) * TILE + tl.arange(0, TILE)
        is_own = keys < tl.where(in_own, own_here, 0)
        is_prompt = keys < tl.where(in_own, 0, prompt_here)
        position = keys * RANKS + INDEX + tl.where(in_own, prompt, 0)
        is_key = (is_own | is_prompt) & (position >= seen)
        of_own = tl.load(own_tables + row * own_width + keys // BLOCK, mask=is_own, other=0)
        of_prompt = tl.load(prompt_tables + row * prompt_width + keys // BLOCK, mask=is_prompt, other=0)
        places = (((of_own + of_prompt) * KV_HEADS + head) * BLOCK + keys % BLOCK) * DIM
        # Take the newest token from qkv: the program that stores it may not have run yet.
        is_new = is_own & holds_new & (keys == newest)
        k = tl.load(
            k_pool + places[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )
        k = tl.where(is_new[None, :], new_k[:, None], k)
        scores = tl.dot(q.to(PRODUCT), k.to(PRODUCT), input_precision="ieee") * scale
        if CAP:
            # tanh(x) = 2 / (1 + e^-2x) - 1
            scores = bound * (2.0 * tl.sigmoid(2.0 * scores / bound) - 1.0)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # If no key has been seen yet, infinity must not be subtracted from infinity.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(top - finite)
        weights = tl.exp2(scores - finite[:, None])
        total = total * factor + tl.sum(weights, 1)
        v = tl.load(
            v_pool + places[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        )
        v = tl.where(is_new[:, None], new_v[None, :], v)
        output = output * factor[:, None] + tl.dot(weights.to(PRODUCT), v.to(PRODUCT), input_precision="ieee")
        top = higher
    at = (row * HEADS + head * group + queries) * PARTS + part
    tl.store(tops + at, top, mask=queries < group)
    tl.store(totals + at, total, mask=queries < group)
    tl.store(outputs + at[:, None] * DIM + dims[None, :], output, mask=is_query)


@triton.jit
def combine_parts(
    outputs, tops, totals, prompt_lengths, own_lengths, sinks, out, sums,
    RANKS: tl.constexpr, INDEX: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PART_TILES: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a query head, and its sink if there is one. -> out [B, heads * D], and the log2 of the
    sum of the exponentials of the scores, sums [B, heads]"""
    row = tl.program_id(0).to(tl.int64)
    query = row * HEADS + tl.program_id(1)
    prompt = tl.load(prompt_lengths + row).to(tl.int32)
    own = tl.load(own_lengths + row).to(tl.int32)
    _, tiles, each = _count_tiles(prompt, own, RANKS, INDEX, TILE, PARTS, PART_TILES)
    parts = tl.arange(0, PARTS)
    exists = parts * each < tiles
    dims = tl.arange(0, PADDED)
    top = tl.load(tops + query * PARTS + parts, mask=exists, other=float("-inf"))
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    # A rank may hold no key that the query sees. Infinity must not be subtracted from infinity.
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    factors = tl.exp2(top - finite)
    total = tl.sum(tl.load(totals + query * PARTS + parts, mask=exists, other=0.0) * factors, 0)
    if SINKS:
        total += tl.exp2(sink - finite)
    each_output = tl.load(
        outputs + (query * PARTS + parts[:, None]) * DIM + dims[None, :],
        mask=exists[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    output = tl.sum(each_output * factors[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(sums + query, finite + tl.log2(total))
    tl.store(out + query * DIM + dims, output.to(out.dtype.element_ty), mask=dims < DIM)


def launch_attention(
    qkv: Tensor, k: Tensor, v: Tensor, prompt_tables: Tensor, prompt_lengths: Tensor, own_tables: Tensor,
    own_lengths: Tensor, heads: int, window: int, cap: float, sinks: Tensor | None, ranks: int = 1, index: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernels of `attend_to_blocks`; all tensors are contiguous."""
    _, kv_heads, _, dim = k.shape
    count = len(qkv)
    sizes = {"HEADS": heads, "DIM": dim, "PADDED": max(16, triton.next_power_of_2(dim))}
    sizes |= {"RANKS": ranks, "INDEX": index}
    tile = min(64, max(16, _TILE_BYTES // (sizes["PADDED"] * k.itemsize)))
    parts = {"TILE": tile, "PARTS": PARTS, "PART_TILES": PART_KEYS // tile}
    outputs = torch.empty(count, heads, PARTS, dim, dtype=torch.float32, device=qkv.device)
    tops = torch.empty(count, heads, PARTS, dtype=torch.float32, device=qkv.device)
    totals = torch.empty_like(tops)
    most = _count_parts(prompt_tables.shape[1], own_tables.shape[1], tile)
    attend_part[(count, kv_heads, most)](
        qkv, k, v, prompt_tables, prompt_lengths, own_tables, own_lengths, outputs, tops, totals,
        prompt_tables.shape[1], own_tables.shape[1], LOG2_E * dim**-0.5, window, LOG2_E * cap,
        CAP=cap > 0, KV_HEADS=kv_heads, QUERIES=max(_QUERIES, triton.next_power_of_2(heads // kv_heads)),
        BLOCK=BLOCK_TOKENS, PRODUCT=product_type(k.dtype), **sizes, **parts,
    )  # fmt: skip
    # Outputs of several ranks are rounded only when they have been merged.
    out = torch.empty(count, heads * dim, dtype=qkv.dtype if ranks == 1 else torch.float32, device=qkv.device)
    sums = torch.empty(count, heads, dtype=torch.float32, device=qkv.device)
    combine_parts[(count, heads)](
        outputs, tops, totals, prompt_lengths, own_lengths, outputs if sinks is None else sinks, out, sums,
        SINKS=sinks is not None, LOG2_E=LOG2_E, **sizes, **parts,
    )  # fmt: skip
    return out, sums


def _count_parts(prompt_width: int, own_width: int, tile: int) -> int:
    """Compute the maximum number of parts of a row, given the widths of its block tables; further programs would
    exit at once."""
    tiles = sum(-(-width * BLOCK_TOKENS // tile) for width in (prompt_width, own_width))
    return min(PARTS, -(-tiles // (PART_KEYS // tile)))
