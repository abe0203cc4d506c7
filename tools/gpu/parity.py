"""Compare all Triton kernels, and the operators of torch that exist only on GPUs, with float64 references.

Inputs are random, with a new seed in each run. Outputs are filled with NaN before a kernel writes them. The other
checks cover what Triton's interpreter cannot show: CUDA graphs against eager steps, asynchronous copies, the memory
of updates, and the speed of attention.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from results import CPU, PLACE, apart, attempt, replayed, seconds_of, sync
from torch import Tensor

if CPU:
    # Triton reads this variable when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation import decode_memory
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampler import choose_tokens_on_gpu
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.offload import Offloadable
from realrl.engine.training.optimizer import sum_squares
from realrl.families.shape import SWIGLU, Activation, Mixture, ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.model.arithmetic.grouped import Groups
from realrl.model.arithmetic.ops import PLAIN, Products
from realrl.model.attention import attend_to_spans, varlen_attention
from realrl.model.attention_rule import AttentionRule
from realrl.model.gpu import exact as exact_kernels
from realrl.model.gpu import logits as logit_kernels
from realrl.model.gpu import nucleus, paged_attention
from realrl.model.gpu.elementwise import AddRMSNorm, RMSNorm, RotateHeads, SwiGLU
from realrl.model.gpu_logprobs import TokenLogprobs
from realrl.model.group import make_single_rank_group
from realrl.model.logprobs import LogprobOptions
from realrl.model.packing import Packing, TokenShare
from realrl.recipe.generation import GenerationConfig

torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
EPS = 1e-6
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 8e-3}
"""Maximum relative distance to the reference, by dtype."""
BOTH = (torch.float32, torch.bfloat16)
FIRST = BOTH[:1] if CPU else BOTH
"""Dtypes of checks that are slow in Triton's interpreter, which therefore runs them only in float32."""

T = TypeVar("T")
Tensors = Tensor | tuple[Tensor, ...]
Check = tuple[str, Callable[[], dict[str, Any]]]


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Draw normally distributed numbers."""
    return (torch.randn(*shape, device=PLACE) * scale).to(dtype)


def small(size: T, tiny: T) -> T:
    """Choose between the size on a GPU and that of a dry run."""
    return tiny if CPU else size


def differentiate(
    function: Callable[..., Tensors], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """Compute the outputs of a function, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    outs = _as_tuple(out)
    torch.autograd.backward(outs, [g.to(o.dtype) for g, o in zip(upstream, outs, strict=True)])
    return [*outs, *(leaf.grad for leaf in leaves)]


def compare(
    ours: Callable[..., Tensors],
    reference: Callable[..., Tensors],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Compare outputs and gradients of `ours` with those of `reference` in float64."""
    upstream_shapes = [o.shape for o in _as_tuple(reference(*[x.double() for x in inputs]))]
    upstream = [draw(*s).to(dtype) for s in upstream_shapes]
    got = differentiate(ours, inputs, upstream)
    wanted = differentiate(reference, [x.double() for x in inputs], [g.double() for g in upstream])
    worst = max(apart(a, b) for a, b in zip(got, wanted, strict=True))
    return {"error": worst, "bad": not worst < LIMITS[dtype]}


def _as_tuple(x: Tensors) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def norm64(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w


def check_norms(rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    x, d, w = draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype), draw(width, dtype=dtype)
    a = compare(lambda x, w: RMSNorm.apply(x, w, EPS), norm64, [x, w], dtype)

    # The kernel rounds the sum before it normalises it, and so does this reference.
    def added(x: Tensor, d: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + d
        rounded = total + (total.detach().to(dtype).double() - total.detach())
        return rounded, norm64(rounded, w)

    b = compare(lambda x, d, w: AddRMSNorm.apply(x, d, w, EPS), added, [x, d, w], dtype)
    return {"norm": a["error"], "add": b["error"], "bad": a["bad"] or b["bad"]}


def check_head_norms(dtype: torch.dtype) -> dict[str, Any]:
    tokens, heads, kv, dim = small(513, 7), 8, 2, small(128, 16)
    qkv, w = draw(tokens, (heads + 2 * kv) * dim, dtype=dtype), draw(dim, dtype=dtype)

    def cut(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: norm(x.view(tokens, -1, dim)[:, heads : heads + kv], w)

    return compare(cut(lambda x, w: RMSNorm.apply(x, w, EPS)), cut(norm64), [qkv, w], dtype)


def check_swiglu(rows: int, width: int, activation: Activation, dtype: torch.dtype) -> dict[str, Any]:
    slope, limit, offset = SWIGLU[activation]

    def reference(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, 1)
        gate = gate.clamp(max=limit)
        return gate * (slope * gate).sigmoid() * (up.clamp(-limit, limit) + offset)

    given = draw(rows, 2 * width, dtype=dtype) * 6
    return compare(lambda x: SwiGLU.apply(x, SWIGLU[activation]), reference, [given], dtype)


def check_rotation(heads: int, kv: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    tokens = small(1025, 5)
    angles = torch.rand(tokens, dim // 2, device=PLACE) * 100
    cos, sin = angles.cos(), angles.sin()

    def reference(x: Tensor) -> Tensor:
        y = x.view(tokens, -1, dim)
        low, high = y[..., : dim // 2], y[..., dim // 2 :]
        c, s = cos.double()[:, None], sin.double()[:, None]
        turned = torch.cat((low * c - high * s, high * c + low * s), -1)
        return torch.cat((turned[:, : heads + kv], y[:, heads + kv :]), 1).view(tokens, -1)

    return compare(
        lambda x: RotateHeads.apply(x * 1, cos, sin, heads + kv),
        reference,
        [draw(tokens, (heads + 2 * kv) * dim, dtype=dtype)],
        dtype,
    )


def check_logits(rows: int, columns: int, cap: float) -> dict[str, Any]:
    x = draw(rows, columns, scale=5)
    wide, scale = x.double(), 0.7
    if cap:
        logit_kernels.bound_logits(x, cap)
        wide = cap * torch.tanh(wide / cap)
    sums, means = (torch.full((rows,), torch.nan, device=PLACE) for _ in range(2))
    logit_kernels.compute_logit_sums(x, scale, sums, means)
    p = (wide * scale).softmax(1)
    factor, gradient = draw(rows), torch.full((rows, columns), torch.nan, device=PLACE)
    logit_kernels.compute_softmax_gradient(x, sums, factor, scale, cap, gradient)
    wanted = -factor.double()[:, None] * p * ((1 - (wide / cap).square()) if cap else 1)
    errors = (
        apart(sums, (wide * scale).logsumexp(1)),
        apart(means, (p * wide * scale).sum(1)),
        apart(gradient, wanted),
    )
    return {"sums": errors[0], "means": errors[1], "gradient": errors[2], "bad": not max(errors) < 1e-4}


def make_cache(
    rows: int, heads: int, kv: int, dim: int, dtype: torch.dtype, longest: int, own_most: int
) -> tuple[list[Tensor], list[Tensor]]:
    prompts = torch.randint(0, longest, (rows,))
    own = torch.randint(0, own_most, (rows,))
    prompts[0], own[0] = 0, 0  # a prompt of one token
    if rows > 2:
        prompts[1], own[1] = longest - 1, own_most - 1
        prompts[2], own[2] = 16, 15  # whole blocks
    shared, mine = max(1, -(-longest // BLOCK_TOKENS)), -(-(own_most + 1) // BLOCK_TOKENS)
    blocks = rows * (shared + mine) + 1
    places = torch.randperm(blocks - 1)[: rows * (shared + mine)].view(rows, -1) + 1
    pools = [draw(blocks, kv, BLOCK_TOKENS, dim, dtype=dtype) for _ in range(2)]
    device = [
        t.to(PLACE) for t in (places[:, :shared].contiguous(), prompts, places[:, shared:].contiguous(), own)
    ]
    return pools, device


def gather(pool: Tensor, parts: Sequence[tuple[Tensor, int]], new: Tensor) -> Tensor:
    """Collect the keys or values of a row: of its prompt, of its own tokens, and of the new token."""
    found = []
    for table, length in parts:
        place = torch.arange(length)
        found.append(pool[table[place // BLOCK_TOKENS], :, place % BLOCK_TOKENS].double())
    return torch.cat([*found, new])


def attend64(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    heads: int,
    kv: int,
    dim: int,
    window: int,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    out = torch.zeros(len(qkv), heads * dim, dtype=torch.float64, device=qkv.device)
    prompt_tables, prompts, own_tables, own = (t.cpu() for t in tables)
    for row in range(len(qkv)):
        q, nk, nv = qkv[row].double().split((heads * dim, kv * dim, kv * dim))

        parts = ((prompt_tables[row], int(prompts[row])), (own_tables[row], int(own[row])))
        keys, values = (gather(pool, parts, new.view(1, kv, dim)) for pool, new in ((k, nk), (v, nv)))
        group = heads // kv
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q.view(heads, dim), keys) * dim**-0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if window < len(keys):
            scores[:, : len(keys) - window] = -torch.inf
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
        weights = scores.softmax(1)[:, : len(keys)]
        out[row] = torch.einsum("hn,nhd->hd", weights, values).flatten()
    return out


def check_decode(
    rows: int,
    heads: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    window: int = 1 << 24,
    cap: float = 0.0,
    with_sinks: bool = False,
    longest: int | None = None,
    own_most: int | None = None,
) -> dict[str, Any]:
    longest, own_most = longest or small(2500, 40), own_most or small(300, 20)
    (k, v), tables = make_cache(rows, heads, kv, dim, dtype, longest, own_most)
    qkv = draw(rows, (heads + 2 * kv) * dim, dtype=dtype)
    sinks = draw(heads, dtype=dtype) if with_sinks else None
    wanted = attend64(qkv, k, v, tables, heads, kv, dim, window, cap, sinks)
    got, _ = paged_attention.launch_attention(qkv, k, v, *tables, heads, window, cap, sinks)
    sync()
    error = apart(got, wanted)
    # The kernel must also have stored the key of the newest token in its block.
    _, _, own_tables, own = tables
    block = own_tables.gather(1, (own // BLOCK_TOKENS)[:, None])[:, 0]
    stored = k[block, :, own % BLOCK_TOKENS].flatten(1)
    kept = torch.equal(stored, qkv[:, heads * dim : (heads + kv) * dim])
    return {"error": error, "stored": kept, "bad": not (error < LIMITS[dtype] and kept)}


def divide_cache(pools: Sequence[Tensor], tables: Sequence[Tensor], ranks: int, index: int) -> list[Tensor]:
    """Copy the tokens of a cache that a rank holds if `ranks` ranks divide it. Its blocks are the first ones of
    each table."""
    found = [torch.zeros_like(pool) for pool in pools]
    for table in tables:
        positions = torch.arange(index, table.shape[1] * BLOCK_TOKENS, ranks)
        local = torch.arange(len(positions))
        for own, pool in zip(found, pools, strict=True):
            values = pool[table[:, positions // BLOCK_TOKENS], :, positions % BLOCK_TOKENS]
            own[table[:, local // BLOCK_TOKENS], :, local % BLOCK_TOKENS] = values
    return found


def check_divided_decode(
    ranks: int,
    dtype: torch.dtype,
    window: int = 1 << 24,
    cap: float = 0.0,
    with_sinks: bool = False,
) -> dict[str, Any]:
    rows, heads, kv, dim = small(9, 4), 14, 2, small(64, 16)
    (k, v), tables = make_cache(rows, heads, kv, dim, dtype, small(2500, 40), small(300, 20))
    qkv = draw(rows, (heads + 2 * kv) * dim, dtype=dtype)
    sinks = draw(heads, dtype=dtype) if with_sinks else None
    wanted = attend64(qkv, k, v, tables, heads, kv, dim, window, cap, sinks)
    found = []
    for index in range(ranks):
        pools = divide_cache((k, v), (tables[0], tables[2]), ranks, index)
        rule = window, cap, sinks if index == 0 else None
        found.append(paged_attention.launch_attention(qkv, *pools, *tables, heads, *rule, ranks, index))
    sync()
    outputs, sums = (torch.stack(parts).double() for parts in zip(*found, strict=True))
    weights = torch.softmax(sums * math.log(2), 0).unsqueeze(-1)
    error = apart((outputs.view(*sums.shape, dim) * weights).sum(0).flatten(1), wanted)
    return {"error": error, "bad": not error < LIMITS[dtype]}


def time_decode(rows: int, heads: int, kv: int, dim: int, context: int) -> dict[str, Any]:
    layers = max(2, min(12, int(2e9 // (rows * context * kv * dim * 4 + 1))))
    shared = context // BLOCK_TOKENS
    blocks = rows * (shared + 2) + 1
    pools = [
        (
            draw(blocks, kv, BLOCK_TOKENS, dim, dtype=torch.bfloat16),
            draw(blocks, kv, BLOCK_TOKENS, dim, dtype=torch.bfloat16),
        )
        for _ in range(layers)
    ]
    places = (torch.randperm(blocks - 1)[: rows * (shared + 2)].view(rows, -1) + 1).to(PLACE)
    tables = (
        places[:, :shared].contiguous(),
        torch.full((rows,), context, device=PLACE),
        places[:, shared:].contiguous(),
        torch.full((rows,), 7, device=PLACE),
    )
    qkv = draw(rows, (heads + 2 * kv) * dim, dtype=torch.bfloat16)
    number = iter(range(10**9))

    def run() -> None:
        k, v = pools[next(number) % layers]
        paged_attention.launch_attention(qkv, k, v, *tables, heads, 1 << 24, 0.0, None)

    seconds = replayed(run, calls=2 * layers)
    moved = 2 * rows * (context + 8) * kv * dim * 2
    return {"us": seconds * 1e6, "gb_per_s": moved / seconds / 1e9}


def check_exact_products(columns: int, depth: int, dtype: torch.dtype) -> dict[str, Any]:
    rows = small(200, 40)
    x, w = draw(rows, depth, dtype=dtype), draw(columns, depth, dtype=dtype)
    whole = torch.full((rows, columns), torch.nan, dtype=dtype, device=PLACE)
    exact_kernels.launch_products(x, w, whole)
    same = True
    for part in ((0, 1), (3, 6), (0, 16), (5, 5 + small(64, 17)), (rows - 1, rows)):
        few = torch.full((part[1] - part[0], columns), torch.nan, dtype=dtype, device=PLACE)
        exact_kernels.launch_products(x[slice(*part)].contiguous(), w, few)
        same &= torch.equal(few, whole[slice(*part)])
    error = apart(whole, x.double() @ w.double().T)
    result = {"error": error, "same_bits": same, "bad": not ((same or CPU) and error < LIMITS[dtype])}
    if not CPU and dtype == torch.bfloat16:
        big = draw(8192, depth, dtype=dtype)
        out = torch.empty(8192, columns, dtype=dtype, device=PLACE)
        seconds, library = (
            seconds_of(f, 5)
            for f in (lambda: exact_kernels.launch_products(big, w, out), lambda: F.linear(big, w))
        )
        result |= {"tflops": 2 * 8192 * columns * depth / seconds / 1e12, "of_library": library / seconds}
    return result


def check_exact_attention(
    heads: int, kv: int, dim: int, dtype: torch.dtype, rule: AttentionRule
) -> dict[str, Any]:
    """Check that prefill and decoding of the same rows give the same bits."""
    from realrl.layout.kv_blocks import CacheSize
    from realrl.model.kv_cache import PagedCache
    from realrl.model.paged_attention import CachedRows, CachePlaces

    lengths = small((1, 17, 130, 333), (1, 5, 18))
    qkv = draw(sum(lengths), (heads + 2 * kv) * dim, dtype=dtype)
    packing = Packing.of(lengths, PLACE)
    with torch.no_grad():
        whole = varlen_attention(qkv, packing, heads, kv, rule, exact=True)
        ends = torch.tensor(lengths).cumsum(0) - 1
        cache = PagedCache(CacheSize(64, 4), layers=1, kv_heads=kv, head_dim=dim, dtype=dtype, device=PLACE)
        start = 0
        tables = torch.zeros(len(lengths), 16, dtype=torch.int64)
        block = 1
        for row, length in enumerate(lengths):
            need = -(-max(1, length - 1) // BLOCK_TOKENS)
            tables[row, :need] = torch.arange(block, block + need)
            block += need
            heads_of = qkv[start : start + length - 1].view(-1, heads + 2 * kv, dim)
            place = torch.arange(length - 1)
            if length > 1:
                cache.store(
                    0,
                    heads_of[:, heads : heads + kv],
                    heads_of[:, heads + kv :],
                    CachePlaces(
                        None, tables[row, place // BLOCK_TOKENS].to(PLACE), (place % BLOCK_TOKENS).to(PLACE)
                    ),
                )
            start += length
        own = torch.arange(block, block + len(lengths))[:, None]
        rows = CachedRows(
            tables.to(PLACE),
            (torch.tensor(lengths) - 1).to(PLACE),
            own.to(PLACE),
            torch.zeros(len(lengths), dtype=torch.int64, device=PLACE),
        )
        decoded = cache.attend(0, qkv[ends.to(PLACE)], rows, heads, rule, exact=True)
    same = torch.equal(decoded, whole[ends.to(PLACE)])
    error = apart(decoded, whole[ends.to(PLACE)])
    return {"same_bits": same, "error": error, "bad": not (same or (CPU and error < LIMITS[dtype]))}


def check_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    """Check products with float32 results, and products that add to a float32 gradient in place."""
    x, w, g = (
        draw(rows, inputs, dtype=dtype),
        draw(outputs, inputs, dtype=dtype),
        draw(rows, outputs, dtype=dtype),
    )
    first = apart(PLAIN.matmul_nt_float32(x, w), x.double() @ w.double().T)
    into = draw(outputs, inputs)
    wanted = into.double() + g.double().T @ x.double()
    PLAIN.add_weight_gradient(g, x, into)
    second = apart(into, wanted)
    return {"mm": first, "addmm": second, "bad": not max(first, second) < 1e-4}


def check_slices() -> dict[str, Any]:
    """Check gradients that are slices of rows, as in LoRA and experts. cublasLt could mistake a row for a bias."""
    errors = []
    for outputs, inputs, rows in ((1, 256, 64), (5, 256, 1), (1, 8, 3), (64, 8, 7)):
        whole, x, g = (
            draw(outputs + 3, inputs),
            draw(rows, inputs, dtype=torch.bfloat16),
            draw(rows, outputs, dtype=torch.bfloat16),
        )
        wanted = whole[2 : 2 + outputs].double() + g.double().T @ x.double()
        PLAIN.add_weight_gradient(g, x, whole[2 : 2 + outputs])
        errors.append(apart(whole[2 : 2 + outputs], wanted))
    return {"error": max(errors), "bad": not max(errors) < 1e-4}


def check_varlen(
    lengths: tuple[int, ...],
    heads: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    rule: AttentionRule,
    ranks: int = 1,
) -> dict[str, Any]:
    """Check attention beside its definition. With several `ranks`, attend as each context-parallel rank does."""

    def attend(x: Tensor) -> Tensor:
        if ranks == 1:
            return varlen_attention(x * 1, packing, heads, kv, rule)
        found = x.new_zeros(len(x), heads * dim)
        for index in range(ranks):
            share = TokenShare(lengths, PLACE, index, ranks)
            missing = sum(share.padded_lengths) - len(x)
            q, keys = F.pad(x, (0, 0, 0, missing)).split((heads * dim, 2 * kv * dim), 1)
            for piece, places in zip(share.pieces, share.places.split(share.piece_tokens), strict=True):
                seen = keys[piece.first_key : piece.stop]
                out = attend_to_spans(q.index_select(0, places), seen, piece.spans, heads, kv, rule)
                real = places < len(x)
                found = found.index_copy(0, places[real], out[real])
        return found

    def reference(x: Tensor) -> Tensor:
        outs, start = [], 0
        group = heads // kv
        for n in lengths:
            q, k, v = x[start : start + n].view(n, -1, dim).split((heads, kv, kv), 1)
            k, v = (y.repeat_interleave(group, 1) for y in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
            if rule.cap:
                scores = rule.cap * torch.tanh(scores / rule.cap)
            hidden = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            if rule.window is not None:
                hidden |= torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-rule.window)
            outs.append(
                torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(2), v).flatten(1)
            )
            start += n
        return torch.cat(outs)

    packing = Packing.of(lengths, PLACE)
    return compare(
        attend,
        reference,
        [draw(sum(lengths), (heads + 2 * kv) * dim, dtype=dtype)],
        dtype,
    )


def time_varlen(heads: int, kv: int, dim: int, length: int) -> dict[str, Any]:
    tokens = 16384
    packing = Packing.of((length,) * (tokens // length), PLACE)
    x = draw(tokens, (heads + 2 * kv) * dim, dtype=torch.bfloat16).requires_grad_()
    out = varlen_attention(x, packing, heads, kv)
    g = torch.randn_like(out)
    forward = seconds_of(lambda: varlen_attention(x, packing, heads, kv), 5)
    both = seconds_of(lambda: varlen_attention(x, packing, heads, kv).backward(g), 5)
    work = 2 * heads * dim * length * tokens  # two products, half of the scores
    return {"forward_tflops": work / forward / 1e12, "backward_tflops": 2.5 * work / (both - forward) / 1e12}


def check_grouped() -> dict[str, Any]:
    experts, per, tokens, k, m = 8, 2, small(515, 33), small(256, 16), small(384, 24)
    chosen = torch.randint(
        1, experts - 1, (tokens, per), device=PLACE
    )  # the first and last expert have no row
    groups = Groups.of(chosen, experts)
    x, w = draw(tokens * per, k, dtype=torch.bfloat16), draw(experts, m, k, dtype=torch.bfloat16, scale=0.1)
    out = F.grouped_mm(x, w.transpose(1, 2), offs=groups.ends)
    ends = [0, *groups.ends.tolist()]
    wanted = torch.cat([x[a:b].double() @ w[i].double().T for i, (a, b) in enumerate(pairwise(ends))])
    first = apart(out, wanted)
    g = draw(tokens * per, m, dtype=torch.bfloat16)
    found = F.grouped_mm(g.T, x, offs=groups.ends)
    wanted = torch.stack([g[a:b].double().T @ x[a:b].double() for a, b in pairwise(ends)])
    second, empty = apart(found, wanted), float(found[0].abs().max() + found[-1].abs().max())
    return {
        "rows": first,
        "weights": second,
        "of_empty": empty,
        "bad": not (first < 8e-3 and second < 8e-3 and empty == 0),
    }


def check_logprobs(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Any]:
    h, table, bias = (
        draw(tokens, hidden, dtype=dtype, scale=0.5),
        draw(vocabulary, hidden, dtype=dtype, scale=0.05),
        None,
    )
    targets = torch.randint(vocabulary, (tokens, 1), device=PLACE)
    size = max(1, (1 << small(26, 12)) // vocabulary)
    narrow, weight = h.clone().requires_grad_(), table.clone().requires_grad_()
    options = LogprobOptions(0.8, True, make_single_rank_group(), vocabulary, PLAIN, size, None)
    chosen, entropy = TokenLogprobs.apply(narrow, weight, bias, targets, options)
    factor = draw(tokens, 1)
    (chosen * factor).sum().backward()
    few = slice(0, small(64, 8))
    logp = (h[few].double() @ table.double().T / 0.8).log_softmax(1)
    first = apart(chosen[few], logp.gather(1, targets[few]))
    second = apart(entropy[few], -(logp.exp() * logp).sum(1))
    d = -logp.exp() * factor[few].double()
    d.scatter_add_(1, targets[few], factor[few].double())
    third = apart(narrow.grad[few], d @ table.double() / 0.8)
    limit = LIMITS[dtype] * 2
    return {"logp": first, "entropy": second, "grad": third, "bad": not max(first, second, third) < limit}


def check_choice() -> dict[str, Any]:
    rows, vocabulary = small(64, 4), small(151936, 700)
    p = draw(rows, vocabulary).mul_(3).softmax(1)
    noise = torch.rand(rows, dtype=torch.float64, device=PLACE)
    got = choose_tokens_on_gpu(p, noise)
    sums = p.double().cumsum(1)
    wanted = torch.searchsorted(sums, (noise * sums[:, -1])[:, None], right=True)[:, 0]
    same = int((got == wanted).sum())
    return {"same": f"{same}/{rows}", "bad": same < rows - 1}


def check_top_p(rows: int, vocabulary: int, share: float) -> dict[str, Any]:
    p = draw(rows, vocabulary).mul_(3).softmax(1)
    kept = torch.full_like(p, torch.nan)
    nucleus.launch_top_p(p, share, kept)
    ordered, order = p.double().sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    wanted = torch.zeros_like(p, dtype=torch.bool).scatter_(
        1, order, before < share * ordered.sum(1, keepdim=True)
    )
    # Float32 sums may decide differently about the last token of a row.
    off = int(((kept > 0) != wanted).sum(1).max())
    same = torch.equal(kept[kept > 0], p[kept > 0])
    return {"tokens_off": off, "same_values": same, "bad": off > small(64, 1) or not same}


def check_norm_memory() -> dict[str, Any]:
    """Measure the memory of the gradient norm; a float64 copy would take 8 bytes per element."""
    n = small(1 << 28, 1 << 16)
    values = draw(n)
    if CPU:
        return {"skipped": "CPU"}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = sum_squares(values)
    extra = (torch.cuda.max_memory_allocated() - before) / n
    wanted = float(torch.stack([part.double().square().sum() for part in values.split(1 << 24)]).sum())
    seconds = seconds_of(lambda: sum_squares(values), 3)
    error = abs(float(found) / wanted - 1)
    return {
        "bytes_per_element": extra,
        "error": error,
        "gb_per_s_of_gradient": 4 * n / seconds / 1e9,
        "bad": extra > 0.5 or error > 3e-6,
    }


def check_update() -> dict[str, Any]:
    from realrl.engine.buffers import FlatBuffer
    from realrl.engine.training.optimizer import ShardedAdamW
    from realrl.families.registry import model_tensors
    from realrl.recipe.model import OptimizerConfig

    shape = ModelShape(
        vocab_size=small(32000, 50),
        hidden_size=small(1024, 16),
        intermediate_size=small(4096, 24),
        layers=small(8, 2),
        heads=8,
        kv_heads=2,
        head_dim=small(128, 8),
    )
    specs = model_tensors(shape, "lm")
    parameters = FlatBuffer(specs, torch.bfloat16, PLACE)
    gradients = FlatBuffer(specs, torch.float32, PLACE)
    parameters.data.normal_(0, 0.02)
    optimizer = ShardedAdamW(
        parameters, gradients, OptimizerConfig(grad_clip=1.0, weight_decay=0.0), make_single_rank_group()
    )
    before = parameters.data.double()
    gradients.data.normal_()
    g = gradients.data.double()
    norm = optimizer.step(1e-3)
    g = g / max(1.0, norm)
    config = OptimizerConfig()
    wanted = before - 1e-3 * g / (g.abs() + config.eps)
    error = float((parameters.data.double() - wanted).abs().max())
    result = {
        "parameters": len(before),
        "error": error,
        "zeroed": not bool(gradients.data.any()),
        "bad": error > 2e-3 or bool(gradients.data.any()),
    }
    if not CPU:
        gradients.data.normal_()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        seconds = seconds_of(lambda: optimizer.step(1e-6), 3, 1)
        result |= {
            "ns_per_parameter": seconds / len(before) * 1e9,
            "peak_bytes_per_parameter": (torch.cuda.max_memory_allocated() - held) / len(before),
        }
    return result


def check_offload() -> dict[str, Any]:
    n = small(1 << 29, 1 << 12)  # 2 GiB
    tensor = draw(n)
    wanted = tensor.sum(dtype=torch.float32).item()
    memory = Offloadable([tensor])
    times = []
    for _ in range(3):
        sync()
        begin = time.perf_counter()
        memory.offload()
        memory._copies.wait_saved()
        middle = time.perf_counter()
        memory.load()
        sync()
        times.append((middle - begin, time.perf_counter() - middle))
    same = tensor.sum(dtype=torch.float32).item() == wanted
    pinned = CPU or all(m.pinned for m in memory._copies._memory)
    size = 4 * n / 1e9
    return {
        "pinned": pinned,
        "first_offload_s": times[0][0],
        "offload_gb_per_s": size / times[-1][0],
        "load_gb_per_s": size / times[-1][1],
        "same": same,
        "bad": not (same and pinned),
    }


DENSE = ModelShape(
    family="qwen2",
    vocab_size=3000,
    hidden_size=256,
    intermediate_size=704,
    layers=3,
    heads=7 * 2,
    kv_heads=2,
    head_dim=32,
    tied_embeddings=True,
)
QWEN3 = DENSE.model_copy(update={"family": "qwen3"})
EXPERTS = ModelShape(
    family="mixtral",
    vocab_size=3000,
    hidden_size=256,
    intermediate_size=320,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=32,
    mixture=Mixture(experts=8, per_token=2),
)


def sample(
    model: Model, sampling: GenerationConfig, rows: int = 13, eager: bool = False
) -> tuple[list[int], Tensor]:
    g = torch.Generator().manual_seed(3)
    prompts = Ragged.of(
        [
            torch.randint(4, 3000, (int(n),), generator=g)
            for n in torch.randint(1, small(60, 9), (rows,), generator=g)
        ]
    )
    batch = Batch(tuple(range(rows)), {"prompts": prompts})
    graphs = decode_memory.StepGraphs
    if eager:
        decode_memory.StepGraphs = lambda step, device: step
    try:
        out = generate(
            model,
            batch,
            "prompts",
            sampling=sampling,
            stop_token_ids=(3, 7, 11),
            seed=SamplingSeed(5, 1),
            kv_capacity=100000,
        )
    finally:
        decode_memory.StepGraphs = graphs
    return out["sequences"].values.tolist(), out["logprobs"].values


def check_graphs(
    shape: ModelShape, dtype: torch.dtype, sampling: dict[str, Any], exact: bool = False
) -> dict[str, Any]:
    shape = shape.model_copy(update={"init_std": 0.1})
    products = Products(exact=True) if exact else PLAIN
    model = make_unsharded_model(shape, "lm", dtype=dtype, device=PLACE, products=products)
    initialise(model.parameters, model.layout.specs, shape, 1)
    settings = GenerationConfig.model_validate({"max_new_tokens": small(70, 5), **sampling})
    tokens, logprobs = sample(model, settings)
    if CPU:
        return {"tokens": len(tokens)}
    eager, wanted = sample(model, settings, eager=True)
    again, _ = sample(model, settings)
    same, repeated = tokens == eager, tokens == again
    error = float((logprobs - wanted).abs().max()) if same else float("nan")
    return {
        "same_tokens": same,
        "repeated": repeated,
        "logprobs": error,
        "bad": not (same and repeated and error == 0),
    }


def list_elementwise() -> Iterator[Check]:
    """List the checks of norms, SwiGLU, rotation and logits."""
    for dtype in BOTH:
        kind = str(dtype).removeprefix("torch.")
        for rows, width in small(
            ((4096, 896), (1000, 1536), (515, 3584), (64, 8192), (33, 129), (1, 896)), ((5, 33), (1, 65))
        ):
            yield f"rms norm {rows}x{width} {kind}", partial(check_norms, rows, width, dtype)
        yield f"norm of heads {kind}", partial(check_head_norms, dtype)
        for rows, width in small(((4096, 4864), (7, 3001), (1, 18944)), ((3, 30),)):
            for activation in SWIGLU:
                name = f"swiglu {activation} {rows}x{width} {kind}"
                yield name, partial(check_swiglu, rows, width, activation, dtype)
        for heads, kv, dim in small(((14, 2, 64), (28, 4, 128), (16, 8, 256), (32, 32, 80)), ((4, 2, 8),)):
            yield f"rotation {heads}/{kv}x{dim} {kind}", partial(check_rotation, heads, kv, dim, dtype)
    for rows, columns, cap in small(
        ((300, 151936, 0.0), (64, 256000, 30.0), (3, 1, 0.0), (5, 4097, 5.0)), ((3, 100, 0.0), (3, 100, 5.0))
    ):
        yield f"logits {rows}x{columns} cap {cap}", partial(check_logits, rows, columns, cap)


def list_decode_attention() -> Iterator[Check]:
    """List the checks of attention over the KV cache."""
    for heads, kv, dim in small(
        (
            (14, 2, 64),
            (12, 2, 128),
            (28, 4, 128),
            (32, 8, 128),
            (32, 32, 128),
            (16, 8, 256),
            (48, 1, 128),
            (32, 32, 80),
            (8, 2, 32),
            (3, 1, 8),
        ),
        ((6, 2, 16), (4, 4, 8)),
    ):
        for dtype in FIRST:
            kind = str(dtype).removeprefix("torch.")
            yield (
                f"decode attention {heads}/{kv}x{dim} {kind}",
                partial(check_decode, small(9, 4), heads, kv, dim, dtype),
            )
    for name, rule in {
        "window": {"window": 100},
        "narrow window": {"window": 3},
        "cap": {"cap": 20.0},
        "sinks": {"with_sinks": True},
        "all": {"window": 700, "cap": 5.0, "with_sinks": True},
    }.items():
        yield (
            f"decode attention with {name}",
            partial(check_decode, small(9, 4), 8, 2, small(64, 16), BOTH[not CPU], **rule),
        )
    for ranks in (2, 3):
        for dtype in FIRST:
            kind = str(dtype).removeprefix("torch.")
            yield f"decode attention of {ranks} ranks {kind}", partial(check_divided_decode, ranks, dtype)
    yield "decode attention of 2 ranks with all", partial(check_divided_decode, 2, FIRST[0], 20, 1.5, True)
    if not CPU:
        yield (
            "decode attention of long rows",
            partial(check_decode, 3, 14, 2, 64, torch.bfloat16, longest=40000, own_most=9000),
        )
        yield (
            "decode attention with tables of one block",
            partial(check_decode, 5, 14, 2, 64, torch.bfloat16, longest=16, own_most=15),
        )


def list_exact() -> Iterator[Check]:
    """List the checks of exact kernels."""
    for dtype in FIRST:
        kind = str(dtype).removeprefix("torch.")
        for columns, depth in small(((1152, 896), (3000, 1536), (33, 100)), ((33, 40),)):
            yield (
                f"exact product {columns}x{depth} {kind}",
                partial(check_exact_products, columns, depth, dtype),
            )
        for heads, kv, dim in small(((14, 2, 64), (32, 8, 128), (16, 8, 256)), ((6, 2, 16),)):
            for name, rule in {"plain": AttentionRule(), "window": AttentionRule(window=40)}.items():
                if not CPU:
                    yield (
                        f"exact attention {heads}/{kv}x{dim} {name} {kind}",
                        partial(check_exact_attention, heads, kv, dim, dtype, rule),
                    )


def list_operators() -> Iterator[Check]:
    """List the checks of sampling kernels and of torch's operators."""
    yield "choice of tokens", check_choice
    for rows, columns, share in small(((64, 151936, 0.9), (3, 256000, 0.5), (5, 33, 0.99)), ((3, 100, 0.9),)):
        yield f"top-p {share} {rows}x{columns}", partial(check_top_p, rows, columns, share)
    if not CPU:
        for dtype in BOTH:
            kind = str(dtype).removeprefix("torch.")
            for rows, outputs, inputs in ((2048, 1152, 896), (441, 151936, 896), (1, 64, 64), (17, 1, 129)):
                yield (
                    f"float32 products {rows}x{outputs}x{inputs} {kind}",
                    partial(check_products, rows, outputs, inputs, dtype),
                )
        yield "gradients of slices", check_slices
        for heads, kv, dim, rule in (
            (14, 2, 64, AttentionRule()),
            (12, 2, 128, AttentionRule()),
            (16, 8, 256, AttentionRule()),
            (4, 2, 8, AttentionRule()),
            (32, 32, 80, AttentionRule()),
            (14, 2, 64, AttentionRule(window=50)),
            (8, 2, 64, AttentionRule(cap=3.0, window=90)),
            (3, 1, 12, AttentionRule()),
        ):
            for dtype in BOTH:
                kind = str(dtype).removeprefix("torch.")
                yield (
                    f"packed attention {heads}/{kv}x{dim} {rule.window} {rule.cap} {kind}",
                    partial(check_varlen, (1, 17, 300, 64, 513), heads, kv, dim, dtype, rule),
                )
                yield (
                    f"context-parallel attention {heads}/{kv}x{dim} {rule.window} {rule.cap} {kind}",
                    partial(check_varlen, (1, 17, 300, 64, 513), heads, kv, dim, dtype, rule, 3),
                )
        yield (
            "packed attention of single tokens",
            partial(check_varlen, (1,) * 9, 14, 2, 64, torch.bfloat16, AttentionRule()),
        )
        yield "grouped products", check_grouped
        for dtype in BOTH:
            yield (
                f"log-probabilities {str(dtype).removeprefix('torch.')}",
                partial(check_logprobs, 1000, 896, 151936, dtype),
            )


def list_memory() -> Iterator[Check]:
    """List the checks of updates and copies."""
    yield "memory of the gradient norm", check_norm_memory
    yield "update", check_update
    yield "offloading", check_offload


def list_graphs() -> Iterator[Check]:
    """List the comparisons of CUDA graphs with eager steps."""
    ways = {
        "plain": {},
        "greedy": {"greedy": True},
        "top-k": {"top_k": 20},
        "top-p": {"top_p": 0.9},
        "minimum": {"min_new_tokens": small(9, 3), "temperature": 0.7},
    }
    for name, way in ways.items():
        yield f"graphs, {name}, bfloat16", partial(check_graphs, DENSE, torch.bfloat16, way)
    yield "graphs, float32", partial(check_graphs, DENSE, torch.float32, {})
    yield "graphs, norms of heads", partial(check_graphs, QWEN3, torch.bfloat16, {})
    yield "graphs, experts", partial(check_graphs, EXPERTS, torch.bfloat16, {})
    yield "graphs, exact", partial(check_graphs, DENSE, torch.bfloat16, {}, exact=True)


def list_timings() -> Iterator[Check]:
    """List the measurements of attention."""
    if not CPU:
        for heads, kv, dim, rows, context in (
            (14, 2, 64, 1, 1024),
            (14, 2, 64, 64, 1024),
            (14, 2, 64, 256, 1024),
            (12, 2, 128, 64, 1024),
            (12, 2, 128, 256, 1024),
            (28, 4, 128, 64, 1024),
            (28, 4, 128, 256, 1024),
            (32, 8, 128, 64, 4096),
            (32, 8, 128, 1, 32768),
            (16, 8, 256, 64, 2048),
        ):
            yield (
                f"decode attention {heads}/{kv}x{dim}, {rows} rows of {context}",
                partial(time_decode, rows, heads, kv, dim, context),
            )
        for heads, kv, dim, length in (
            (14, 2, 64, 2048),
            (12, 2, 128, 2048),
            (28, 4, 128, 2048),
            (28, 4, 128, 8192),
            (16, 8, 256, 2048),
        ):
            yield (
                f"packed attention {heads}/{kv}x{dim}, {length} tokens",
                partial(time_varlen, heads, kv, dim, length),
            )


def main() -> int:
    lists = (list_elementwise, list_decode_attention, list_exact, list_operators, list_memory, list_graphs)
    good = [attempt("parity", name, run) for checks in lists for name, run in checks()]
    for name, run in list_timings():
        attempt("time", name, run)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
