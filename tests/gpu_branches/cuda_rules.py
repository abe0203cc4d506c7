"""Operators that torch has for CUDA alone, on a CPU: their rules are checked, and their values computed.

The rules are those of the documentation of `torch.mm`, `torch.bmm` and `torch.addmm` (`out_dtype`), and of torch's
sources (`Blas.cpp` of its native CUDA operators, `flash_api.cpp`); what is stricter in one of 2.11 to 2.13 holds.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import _scoped_library

HALF = (torch.bfloat16, torch.float16)


def _check_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> None:
    assert a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], (a.shape, b.shape)
    assert a.dtype == b.dtype, "mat1 and mat2 must have the same dtype"
    assert out_dtype == a.dtype or (out_dtype == torch.float32 and a.dtype in HALF), (
        "out_dtype must be the input's or float32 for float16 and bfloat16"
    )


def _mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check_product(self, mat2, out_dtype)
    return (self.float() @ mat2.float()).to(out_dtype)


def _addmm_out(
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    _check_product(mat1, mat2, out_dtype)
    assert out.dtype == out_dtype and self.dtype in (out_dtype, mat1.dtype)
    assert out.shape == (mat1.shape[0], mat2.shape[1]), "an output of another shape would be resized"
    return out.copy_(beta * self.float() + alpha * (mat1.float() @ mat2.float()))


def _bmm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    assert self.dim() == mat2.dim() == 3 and len(self) == len(mat2) and self.dtype in HALF
    _check_product(self[0], mat2[0], out_dtype)
    return (self.float() @ mat2.float()).to(out_dtype)


def _check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype and q.dtype in HALF, "flash attention computes in half precision"
    assert q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256, "heads have a multiple of 8 dims, at most 256"
    assert q.shape[1] % k.shape[1] == 0, "equal groups of query heads"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "heads are contiguous"


def _check_starts(rows: Tensor, starts: Tensor, longest: int) -> None:
    assert starts.dtype == torch.int32 and starts.is_contiguous(), "starts are int32"
    assert int(starts[0]) == 0 and int(starts[-1]) == len(rows) and int(starts.diff().max()) <= longest


def _split(starts: Tensor, heads: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Rows of each sequence, for every query head. [T, any heads, D] -> [heads, L, D] float32"""
    lengths = starts.diff().tolist()
    wide = [x.float().repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in tensors]
    for parts in zip(*(x.split(lengths, 1) for x in wide), strict=True):
        yield list(parts)


def _weigh(q: Tensor, k: Tensor, left: int | None) -> Tensor:
    """Causal softmax of scores, of `left` keys before each query if that is not -1. The last query and the last key
    belong to one token.

    [heads, queries, D], [heads, keys, D] -> [heads, queries, keys]
    """
    skipped = k.shape[1] - q.shape[1]
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(skipped + 1)
    if left is not None and left >= 0:
        hidden |= torch.ones_like(hidden).tril(skipped - left - 1)
    return (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(hidden, -torch.inf).softmax(2)


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_attention(query, key, value)
    _check_starts(query, cum_seq_q, max_q)
    _check_starts(key, cum_seq_k, max_k)
    assert is_causal == (window_size_left == -1) and window_size_right == 0, "causal, or with a window"
    assert scale is None and not dropout_p and not return_debug_mask
    heads = query.shape[1]
    each = zip(_split(cum_seq_q, heads, query), _split(cum_seq_k, heads, key, value), strict=True)
    parts = [_weigh(q, k, window_size_left) @ v for (q,), (k, v) in each]
    output = torch.cat(parts, 1).transpose(0, 1).to(query.dtype)
    sums = query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    return output, sums, query.new_zeros(2), query.new_zeros(()), query.new_zeros(0)


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, *_: object, window_size_left: int | None = None, **__: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert grad_out.dtype == query.dtype and out.shape == grad_out.shape
    grads: list[list[Tensor]] = [[], [], []]
    scale = query.shape[2] ** -0.5
    heads = query.shape[1]
    each = zip(_split(cum_seq_q, heads, query, grad_out), _split(cum_seq_k, heads, key, value), strict=True)
    for (q, g), (k, v) in each:
        weights = _weigh(q, k, window_size_left)
        grad_weights = g @ v.transpose(1, 2)
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(2, keepdim=True)) * scale
        parts = (grad_scores @ k, grad_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
        for found, part in zip(grads, parts, strict=True):
            found.append(part)
    whole = [torch.cat(found, 1).transpose(0, 1) for found in grads]
    # The query heads of a key head add up.
    a, b, c = (
        g.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
        for g, x in zip(whole, (query, key, value), strict=True)
    )
    return a, b, c


@contextmanager
def apply_rules() -> Iterator[None]:
    """Define the operators for tensors on a CPU."""
    with _scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", _mm, "CPU")
        library.impl("bmm.dtype", _bmm, "CPU")
        library.impl("addmm.dtype_out", _addmm_out, "CPU")
        library.impl("_flash_attention_forward", _flash_forward, "CPU")
        library.impl("_flash_attention_backward", _flash_backward, "CPU")
        yield
