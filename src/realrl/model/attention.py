"""Causal attention over packed sequences."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention.varlen import varlen_attn

from realrl.layout.kv_blocks import CacheSize
from realrl.model.autograd import apply_function
from realrl.model.cache import PagedCache
from realrl.model.gpu.path import has_flash_attention, on_gpu
from realrl.model.packing import Packing, PaddedHeads
from realrl.model.paged_attention import attend_to_runs, count_run_rows

# torch 2.11 accepts grouped heads as they are; from 2.12 on they need a flag.
GQA_OPTION: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class _Pad(Function):
    """Packed heads to one query, key and value tensor per bucket. [T, C] -> 3 tensors [rows, D] per bucket"""

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
    """Attention's output per bucket back to packed tokens. [rows, D] per bucket -> [T, heads * D]"""

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


def _padded_attention(qkv: Tensor, padded: PaddedHeads) -> Tensor:
    parts = iter(_Pad.apply(qkv, padded))
    outputs = []
    for bucket, mask in zip(padded.buckets, padded.masks, strict=True):
        batch = len(bucket.sequences)
        length = bucket.length
        q, k, v = next(parts), next(parts), next(parts)
        dim = q.shape[-1]
        if mask is not None and q.dtype == torch.float32:
            k = k.view(-1, length, dim)
            v = v.view(-1, length, dim)
            q = q.view(k.shape[0], -1, dim)
            # Scores are not bound to a name, so they are freed once their softmax is computed.
            output = torch.bmm(torch.baddbmm(mask, q, k.transpose(1, 2), alpha=dim**-0.5).softmax(-1), v)
        else:
            q, k, v = (x.view(batch, -1, length, dim) for x in (q, k, v))
            output = _causal_attention(q, k, v)
        outputs.append(output.reshape(-1, dim))
    return _Unpad.apply(padded, *outputs)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with grouped heads. q: [B, heads, L, D]; k, v: [B, kv_heads, L, D] -> [B, heads, L, D]"""
    group = q.shape[1] // k.shape[1]
    if group > 1 and on_gpu(q):
        # In float32 only the kernel that keeps all scores in memory takes grouped heads.
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)


def _has_varlen_kernel(qkv: Tensor, dim: int) -> bool:
    """Check whether the flash kernel for packed sequences takes these heads: half precision, a multiple of 8 dims.

    It needs compute capability 8.0 (Ampere); what it does not take is padded, as on a CPU.
    """
    if not on_gpu(qkv) or qkv.dtype == torch.float32 or dim % 8 or dim > 256:
        return False
    return has_flash_attention(qkv.device)


def _attend_exactly(qkv: Tensor, packing: Packing, heads: int, kv_heads: int) -> Tensor:
    """Compute `varlen_attention` without gradient, each row as a decode step would, from keys in blocks.

    qkv: [T, (heads + 2 kv_heads) * D] -> [T, heads * D]
    """
    heads_of_rows = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    k, v = heads_of_rows[:, heads : heads + kv_heads], heads_of_rows[:, heads + kv_heads :]
    blocked = packing.arrange_blocks(count_run_rows(heads, kv_heads))
    cache = PagedCache(
        CacheSize(blocked.count, 1),
        layers=1,
        kv_heads=kv_heads,
        head_dim=qkv.shape[1] // (heads + 2 * kv_heads),
        dtype=qkv.dtype,
        device=qkv.device,
    )
    with torch.no_grad():
        cache.store(0, k, v, blocked.places)
        return attend_to_runs(qkv, cache.k[0], cache.v[0], blocked.runs, heads)


class _ExactAttention(Function):
    """Attention by the exact kernel, whose gradient is that of the fast one: nothing is said of its last bits."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, packing: Packing, heads: int, kv_heads: int) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.arguments = packing, heads, kv_heads
        return _attend_exactly(qkv, packing, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (saved,) = ctx.saved_tensors
        qkv = saved.detach().requires_grad_(True)
        with torch.enable_grad():
            out = varlen_attention(qkv, *ctx.arguments)
        return torch.autograd.grad(out, qkv, grad)[0], None, None, None


def varlen_attention(
    qkv: Tensor, packing: Packing, heads: int, kv_heads: int, *, exact: bool = False
) -> Tensor:
    """Compute causal attention: each token attends to itself and those before it in its sequence.

    If `exact`, a token's result is that of a decode step, bit for bit.

    qkv: [T, (heads + 2 kv_heads) * D], queries first, then keys, then values -> [T, heads * D]
    """
    if exact:
        return apply_function(_ExactAttention, qkv, packing, heads, kv_heads)
    q, k, v = split_heads(qkv, heads, kv_heads)
    if _has_varlen_kernel(qkv, q.shape[-1]):
        cu_seqlens = packing.cu_seqlens
        output = varlen_attn(
            q,
            k,
            v,
            cu_seq_q=cu_seqlens,
            cu_seq_k=cu_seqlens,
            max_q=packing.max_length,
            max_k=packing.max_length,
            window_size=(-1, 0),  # causal
            **GQA_OPTION,
        )
        assert isinstance(output, Tensor)
        return output.reshape(len(qkv), -1)
    return _padded_attention(qkv, packing.pad_heads(heads, kv_heads))


def split_heads(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the queries [T, heads, D], keys and values [T, kv_heads, D]."""
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1)
    return q, k, v
