"""Causal attention over packed sequences."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.layout.kv_blocks import CacheSize
from realrl.layout.shard import Shard
from realrl.model.arithmetic.autograd import apply_function
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.cpu.sequence_attention import attend_backward, attend_forward
from realrl.model.gpu.path import has_flash_attention, on_gpu
from realrl.model.gpu.scored_attention import ScoredAttention
from realrl.model.kv_cache import PagedCache
from realrl.model.packing import Packing, PaddedHeads, Spans
from realrl.model.paged_attention import attend_to_runs, count_run_rows

_LOG2_E = 1.4426950408889634


class _Pad(Function):
    """Pad packed heads: copy them to one query, key and value tensor per bucket of sequences. [T, C] -> 3 tensors
    [rows, D] per bucket"""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, padded: PaddedHeads) -> tuple[Tensor, ...]:
        ctx.padded = padded
        ctx.width = qkv.shape[1]
        dim = qkv.shape[1] // (padded.heads + 2 * padded.kv_heads)
        return qkv.view(-1, dim).index_select(0, padded.pad_input_index).split(padded.input_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(grads).index_select(0, ctx.padded.unpad_input_index).view(-1, ctx.width), None


class _Unpad(Function):
    """Copy attention's output per bucket back to packed tokens. [rows, D] per bucket -> [T, heads * D]"""

    @staticmethod
    def forward(ctx: Any, padded: PaddedHeads, *outputs: Tensor) -> Tensor:
        ctx.padded = padded
        ctx.dim = outputs[0].shape[1]
        return torch.cat(outputs).index_select(0, padded.unpad_output_index).view(-1, padded.heads * ctx.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, *tuple[Tensor, ...]]:
        padded = ctx.padded
        rows = grad.reshape(-1, ctx.dim).index_select(0, padded.pad_output_index)
        rows.index_fill_(0, padded.output_padding, 0)
        return None, *rows.split(padded.output_rows)


def _attend_padded(qkv: Tensor, padded: PaddedHeads, rule: AttentionRule) -> Tensor:
    """Compute `varlen_attention` on padded sequences. [T, (heads + 2 kv_heads) * D] -> [T, heads * D]"""
    parts = iter(_Pad.apply(qkv, padded))
    outputs = []
    group = padded.heads // padded.kv_heads
    for bucket in padded.buckets:
        shape = (
            len(bucket.sequences),
            -1,
            bucket.length,
            qkv.shape[1] // (padded.heads + 2 * padded.kv_heads),
        )
        # In float32, the only kernel for grouped heads keeps all scores in memory. So key and value heads are
        # repeated here.
        q, k, v = next(parts), next(parts), next(parts)
        q, k, v = q.view(shape), *(x.view(shape).repeat_interleave(group, 1) for x in (k, v))
        of_bucket = rule.within(bucket.length)
        if of_bucket.is_plain:
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            output = apply_function(ScoredAttention, q, k, v, rule.sinks, of_bucket.window, rule.cap)
        outputs.append(output.reshape(-1, shape[-1]))
    return _Unpad.apply(padded, *outputs)


@dataclass(frozen=True, eq=False)
class _Attention:
    """Arguments of the functions below that autograd does not track."""

    spans: Spans
    heads: int
    kv_heads: int
    rule: AttentionRule


class _SequenceAttention(Function):
    """Attention on a CPU. For the backward pass, it saves its output and one number per query: the logarithm of the
    softmax's denominator.

    Keys and values are in `kv`, or beside the queries in `q` if `kv` is None.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor | None, sinks: Tensor | None, of: _Attention) -> Tensor:
        heads, kv_heads, spans = of.heads, of.kv_heads, of.spans
        dim = q.shape[1] // (heads + 2 * kv_heads) if kv is None else kv.shape[1] // (2 * kv_heads)
        ctx.sizes = heads, kv_heads, dim, max(spans.keys)
        ctx.starts = spans.starts
        ctx.bounds = of.rule.bounds
        out, sums = torch.empty(len(q), heads * dim), torch.empty(len(q), heads)
        wide = _split_keys_off(q.float(), None if kv is None else kv.float(), heads * dim)
        pieces = len(spans.keys) * kv_heads
        attend_forward(pieces, *wide, *ctx.starts, *ctx.sizes, *of.rule.for_kernel(heads), out, sums, claim=1)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, sums, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, sums, sinks = ctx.saved_tensors
        heads, kv_heads, dim, _ = ctx.sizes
        grad_q, grad_kv = torch.empty(q.shape), None if kv is None else torch.empty(kv.shape)
        q, out, sums, wide = (of.float().contiguous() for of in (q, out, sums, grad))
        inputs = _split_keys_off(q, None if kv is None else kv.float(), heads * dim)
        gradients = _split_keys_off(grad_q, grad_kv, heads * dim)
        attend_backward(
            (len(ctx.starts[0]) - 1) * kv_heads, *inputs, *ctx.starts, *ctx.sizes, *ctx.bounds, out, sums, wide,
            *gradients, claim=1,
        )  # fmt: skip
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[2]:
            # d loss / d sink = -sum over tokens of softmax(sink) * (out · grad_out)
            weights = torch.exp2(sinks.float() * _LOG2_E - sums)
            grad_sinks = -(weights * (out * wide).view(len(out), heads, dim).sum(2)).sum(0)
        grad_kv = None if grad_kv is None else grad_kv.to(grad.dtype)
        return grad_q.to(grad.dtype), grad_kv, grad_sinks, None


def _split_keys_off(q: Tensor, kv: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """View queries, and keys with values, which follow the queries' `width` columns in `q` if `kv` is None."""
    return q, q[:, width:] if kv is None else kv


@cache
def load_packed_attention() -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """Import torch's flash kernel for packed sequences. Returns the function, and the options it needs for grouped
    heads.

    This import takes two seconds, as long as the import of torch itself. Ranks on a CPU do not need it.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 accepts grouped heads without a flag. From torch 2.12 on, they need `enable_gqa`.
    takes_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return cast(Callable[..., Tensor], varlen_attn), {"enable_gqa": True} if takes_flag else {}


def _reads_packed(qkv: Tensor, dim: int, rule: AttentionRule) -> bool:
    """Check whether torch's flash kernel for packed sequences supports this attention on a GPU. If not, sequences
    are padded.

    It needs half precision, a multiple of 8 dims up to 256, and compute capability 8.0 (Ampere) or higher.
    """
    if rule.needs_scores or qkv.dtype == torch.float32 or dim % 8 or dim > 256:
        return False
    return has_flash_attention(qkv.device)


def _attend_exactly(q: Tensor, kv: Tensor | None, of: _Attention) -> Tensor:
    """Compute attention without gradients, with the arithmetic of decode steps. Keys and values are stored in
    blocks first, as in a KV cache. Arguments as for `_SequenceAttention`."""
    k, v = split_heads(q, of.heads, of.kv_heads)[1:] if kv is None else _split_keys(kv, of.kv_heads)
    blocked = of.spans.arrange_blocks(count_run_rows(of.heads, of.kv_heads))
    cache = PagedCache(
        CacheSize(blocked.count, 1),
        layers=1,
        kv_heads=of.kv_heads,
        head_dim=k.shape[2],
        dtype=q.dtype,
        device=q.device,
    )
    with torch.no_grad():
        cache.store(0, k, v, blocked.places)
        return attend_to_runs(q, cache.k[0], cache.v[0], blocked.runs, of.heads, of.rule)[0]


class _ExactAttention(Function):
    """Attention whose forward pass uses the exact kernel. The gradient comes from the fast kernel, because only
    forward passes need to be exact. Arguments as for `_SequenceAttention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor | None, sinks: Tensor | None, of: _Attention) -> Tensor:
        ctx.save_for_backward(q, kv, sinks)
        ctx.of = of
        return _attend_exactly(q, kv, of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        q, kv, sinks = saved
        assert q is not None, "only keys beside queries and sinks may be missing"
        of = replace(ctx.of, rule=replace(ctx.of.rule, sinks=sinks))
        with torch.enable_grad():
            out = _attend(q, kv, of)
        grads = iter(torch.autograd.grad(out, [x for x in saved if x is not None], grad))
        return *(None if x is None else next(grads) for x in saved), None


def varlen_attention(
    qkv: Tensor,
    packing: Packing,
    heads: int,
    kv_heads: int,
    rule: AttentionRule = CAUSAL,
    *,
    exact: bool = False,
) -> Tensor:
    """Compute causal attention: a token attends to itself and to earlier tokens of its sequence. `rule` adds a
    window, a cap of scores, or sinks. If `exact`, a token's result equals that of a decode step, bit for bit.

    qkv: [U, (heads + 2 kv_heads) * D], queries first, then keys, then values -> [U, heads * D]; U: see `Packing`
    """
    common, of = packing.common, _Attention(packing.spans, heads, kv_heads, rule)
    if common is None:
        return _attend(qkv, None, of, exact=exact)
    width = qkv.shape[1] // (heads + 2 * kv_heads) * heads
    if on_gpu(qkv) and not _reads_packed(qkv, width // heads, rule):
        # Padded layouts have whole sequences.
        out = _attend(common.whole.copy(qkv), None, of, exact=exact)
        return out.index_select(0, common.kept)
    kv = common.keys.copy(qkv[:, width:])
    return _attend(qkv[:, :width], kv, replace(of, spans=common.spans), exact=exact)


def attend_to_spans(
    q: Tensor,
    kv: Tensor,
    spans: Spans,
    heads: int,
    kv_heads: int,
    rule: AttentionRule = CAUSAL,
    *,
    exact: bool = False,
) -> Tensor:
    """Compute `varlen_attention` of the last tokens of sequences. On a GPU, all sequences but the first must be
    whole.

    q: [queries, heads * D]; kv: [tokens, 2 * kv_heads * D], keys first, then values -> [queries, heads * D]
    """
    return _attend(q, kv, _Attention(spans, heads, kv_heads, rule), exact=exact)


def _attend(q: Tensor, kv: Tensor | None, of: _Attention, *, exact: bool = False) -> Tensor:
    """Attend with the kernel for these tensors. Arguments as for `_SequenceAttention`."""
    if exact or not on_gpu(q):
        return apply_function(_ExactAttention if exact else _SequenceAttention, q, kv, of.rule.sinks, of)
    heads, kv_heads, spans = of.heads, of.kv_heads, of.spans
    dim = q.shape[1] // (heads + 2 * kv_heads) if kv is None else kv.shape[1] // (2 * kv_heads)
    if _reads_packed(q, dim, of.rule):
        if kv is None:
            return _attend_packed(*split_heads(q, heads, kv_heads), spans, of.rule)
        return _attend_packed(q.view(len(q), heads, dim), *_split_keys(kv, kv_heads), spans, of.rule)
    if kv is None:
        return _attend_padded(q, spans.pad_heads(heads, kv_heads), of.rule)
    queries, keys = spans.queries[0], spans.keys[0]
    first = _attend_with_last_queries(q[:queries], kv[:keys], of)
    if len(spans.keys) == 1:
        return first
    others = torch.cat((q[queries:], kv[keys:]), 1)
    return torch.cat((first, _attend_padded(others, spans.others.pad_heads(heads, kv_heads), of.rule)))


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, spans: Spans, rule: AttentionRule) -> Tensor:
    """Compute attention with torch's flash kernel for packed sequences. q: [queries, heads, D]; k, v: [tokens,
    kv_heads, D] -> [queries, heads * D]"""
    attend, options = load_packed_attention()
    output = attend(
        q,
        k,
        v,
        cu_seq_q=spans.cu_queries,
        cu_seq_k=spans.cu_keys,
        max_q=max(spans.queries),
        max_k=max(spans.keys),
        # Causal. The kernel aligns the last query of a sequence with its last key.
        window_size=(-1 if rule.window is None else rule.window - 1, 0),
        **options,
    )
    return output.reshape(len(q), -1)


def _attend_with_last_queries(q: Tensor, kv: Tensor, of: _Attention) -> Tensor:
    """Compute attention of the last tokens of one sequence, block by block of queries. q: [queries, heads * D]; kv:
    [tokens, 2 * kv_heads * D] -> [queries, heads * D]"""
    of_heads = [q.view(len(q), of.heads, -1)]
    of_heads += [x.repeat_interleave(of.heads // of.kv_heads, 1) for x in _split_keys(kv, of.kv_heads)]
    by_head = [x.transpose(0, 1).contiguous() for x in of_heads]
    out = apply_function(ScoredAttention, *by_head, of.rule.sinks, of.rule.window, of.rule.cap)
    return out.transpose(0, 1).reshape(len(q), -1)


def _split_keys(kv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """View keys and values. [T, 2 * kv_heads * D] -> [T, kv_heads, D] each"""
    k, v = kv.view(len(kv), 2, kv_heads, -1).unbind(1)
    return k, v


def split_heads(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """View `qkv` as queries [T, heads, D], keys and values [T, kv_heads, D]."""
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1)
    return q, k, v


def find_repeated_heads(shard: Shard, device: torch.device) -> Tensor | None:
    """Find the heads of qkv to select, in order, so that each query head gets its own key and value head.

    Returns None if every key head of the rank serves equally many query heads. -> [3 * query heads] int64
    """
    if shard.uneven_groups is None:
        return None
    heads = len(shard.queries)
    key_heads = heads + torch.tensor(shard.uneven_groups)
    value_heads = key_heads + len(shard.keys)
    return torch.cat([torch.arange(heads), key_heads, value_heads]).to(device)
