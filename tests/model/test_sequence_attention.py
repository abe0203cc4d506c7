"""Attention within packed sequences on a CPU, and its gradient, beside that of torch sequence by sequence."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from realrl.model.attention import split_heads, varlen_attention
from realrl.model.attention_rule import AttentionRule
from realrl.model.packing import Packing

LENGTHS = [1, 17, 150, 16, 48, 49, 2, 700]
"""Around the sizes of tiles: 48 queries, 256 keys, 16 lanes."""
HEADS = [(4, 2, 32), (3, 3, 16), (5, 1, 20), (2, 2, 7), (2, 1, 96)]


RULES = {
    "window": AttentionRule(window=33),
    "one token": AttentionRule(window=1),
    "long window": AttentionRule(window=400),
    "cap": AttentionRule(cap=0.7),
    "sinks": AttentionRule(sinks=torch.linspace(-2.0, 3.0, 4)),
    "all": AttentionRule(window=290, cap=1.5, sinks=torch.linspace(3.0, -1.0, 4)),
}


def attend_by_rule(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """The definition, for one sequence. [heads, L, D] -> the same"""
    scores = q @ k.transpose(1, 2) / q.shape[2] ** 0.5
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    distances = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (distances >= 0) & (distances < (rule.window or len(distances)))
    scores = scores.masked_fill(~seen, -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[1], 1)
        return torch.cat((scores, sinks), 2).softmax(2)[..., :-1] @ v
    return scores.softmax(2) @ v


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("exact", [False, True])
def test_windows_caps_and_sinks_have_the_output_and_gradients_of_their_definition(
    exact: bool, rule: AttentionRule
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 24
    qkv = torch.randn(sum(LENGTHS), (heads + 2 * kv_heads) * dim, dtype=torch.float64)
    upstream = torch.randn(len(qkv), heads * dim, dtype=torch.float64)
    found = []
    for dtype in (torch.float64, torch.float32):
        x = qkv.to(dtype, copy=True).requires_grad_()
        sinks = None if rule.sinks is None else rule.sinks.to(dtype, copy=True).requires_grad_()
        own = replace(rule, sinks=sinks)
        if dtype == torch.float32:
            out = varlen_attention(x, Packing.of(LENGTHS, "cpu"), heads, kv_heads, own, exact=exact)
        else:
            parts = []
            for part in x.split(LENGTHS):
                q, k, v = (y.transpose(0, 1) for y in split_heads(part, heads, kv_heads))
                k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
                parts.append(attend_by_rule(q, k, v, own).transpose(0, 1).flatten(1))
            out = torch.cat(parts)
        out.backward(upstream.to(dtype))
        found.append([y.double() for y in (out, x.grad, *([] if sinks is None else [sinks.grad]))])
    for got, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


def attend_one_by_one(qkv: Tensor, lengths: list[int], heads: int, kv_heads: int) -> Tensor:
    outputs = []
    for part in qkv.split(lengths):
        q, k, v = (x.transpose(0, 1) for x in split_heads(part, heads, kv_heads))
        group = heads // kv_heads
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        outputs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_output_and_gradient_are_those_of_torch(heads: int, kv_heads: int, dim: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), (heads + 2 * kv_heads) * dim, dtype=torch.float64)
    upstream = torch.randn(len(qkv), heads * dim, dtype=torch.float64)
    expected_input = qkv.clone().requires_grad_()
    expected = attend_one_by_one(expected_input, LENGTHS, heads, kv_heads)
    expected.backward(upstream)
    x = qkv.float().requires_grad_()
    out = varlen_attention(x, Packing.of(LENGTHS, "cpu"), heads, kv_heads)
    out.backward(upstream.float())
    torch.set_num_threads(before)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), expected_input.grad, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_computed_in_float32_and_rounded() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 8 * 16).bfloat16()
    upstream = torch.randn(len(qkv), 4 * 16).bfloat16()
    found = []
    for x in (qkv.clone().requires_grad_(), qkv.float().requires_grad_()):
        out = varlen_attention(x, Packing.of(LENGTHS, "cpu"), 4, 2)
        out.backward(upstream.to(out.dtype))
        found.append((out, x.grad))
    assert found[0][0].dtype == found[0][1].dtype == torch.bfloat16
    torch.testing.assert_close(found[0][0], found[1][0].bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(found[0][1].float(), found[1][1], rtol=2e-2, atol=2e-2)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(300, 3 * 16) * 60
    qkv[:, :16] *= torch.linspace(0, 30, 300)[:, None]
    x, y = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    out, expected = varlen_attention(x, Packing.of([300], "cpu"), 1, 1), attend_one_by_one(y, [300], 1, 1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-2)
    out.backward(torch.ones_like(out))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_what_sees_it_and_no_other_sequence(value: float) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(60 + 20, 4 * 16)
    qkv[30, 2 * 16 : 3 * 16] = value  # a key of the first sequence
    out = varlen_attention(qkv, Packing.of([60, 20], "cpu"), 2, 1)
    assert out[:30].isfinite().all() and out[60:].isfinite().all()
    assert not out[30:60].isfinite().all()
    qkv[30, 2 * 16 :] = 0.0
    qkv[30, 3 * 16 :] = value  # a value
    out = varlen_attention(qkv, Packing.of([60, 20], "cpu"), 2, 1)
    # Earlier tokens of its tile have it with a weight of 0.
    assert out[60:].isfinite().all()
    assert not out[30:60].isfinite()[:, : 2 * 16].any()


def test_a_row_does_not_depend_on_the_sequences_beside_its_own() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 8 * 20)
    whole = varlen_attention(qkv, Packing.of(LENGTHS, "cpu"), 4, 2)
    for part, out in zip(qkv.split(LENGTHS), whole.split(LENGTHS), strict=True):
        assert torch.equal(varlen_attention(part, Packing.of([len(part)], "cpu"), 4, 2), out)
