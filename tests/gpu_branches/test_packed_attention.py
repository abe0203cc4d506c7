"""Attention over packed sequences by every path of GPUs, on a CPU, beside the kernel for CPUs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from realrl.layout import limits
from realrl.model import attention
from realrl.model.attention import attend_to_spans, varlen_attention
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.group import Group
from realrl.model.packing import Packing, TokenShare

Attend = Callable[..., torch.Tensor]

LENGTHS = [1, 17, 60, 16, 33, 2]
RULES = {
    "causal": CAUSAL,
    "window": AttentionRule(window=16),
    "one token": AttentionRule(window=1),
    "wide window": AttentionRule(window=60),
    "cap": AttentionRule(cap=0.7),
    "sinks": AttentionRule(sinks=torch.linspace(-2.0, 3.0, 4)),
    "all": AttentionRule(window=20, cap=1.5, sinks=torch.linspace(3.0, -1.0, 4)),
}


def attend_by_spans(
    qkv: torch.Tensor, packing: Packing, heads: int, kv_heads: int, rule: AttentionRule
) -> torch.Tensor:
    """Attend from two of four pieces, as a context-parallel rank does, and from the other two."""
    outputs = torch.empty(0)
    for index in range(2):
        share = TokenShare(packing.lengths, "cpu", Group((0, 1), index))
        padded = torch.nn.functional.pad(qkv, (0, 0, 0, sum(share.padded_lengths) - len(qkv)))
        q, kv = padded.split((heads * 16, 2 * kv_heads * 16), 1)
        if not len(outputs):
            outputs = padded.new_zeros(len(padded), heads * 16)
        for piece, places in zip(share.pieces, share.places.split(share.piece_tokens), strict=True):
            keys = kv[piece.first_key : piece.stop]
            found = attend_to_spans(q[places], keys, piece.spans, heads, kv_heads, rule)
            outputs = outputs.index_copy(0, places, found)
    return outputs[: len(qkv)]


def attend(
    qkv: torch.Tensor, rule: AttentionRule, dtype: torch.dtype, function: Attend = varlen_attention
) -> list[torch.Tensor]:
    """Output and gradients, of sinks too if there are any."""
    x = qkv.to(dtype, copy=True).requires_grad_()
    sinks = None if rule.sinks is None else rule.sinks.clone().requires_grad_()
    out = function(x, Packing.of(LENGTHS, "cpu"), 4, 2, replace(rule, sinks=sinks))
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype))
    return [y.detach().float() for y in (out, x.grad, *([] if sinks is None else [sinks.grad]))]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("scores", [2**24, 6 * 8 * 64 * 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_attention_on_a_gpu_and_its_gradient_are_those_on_a_cpu(
    rule: AttentionRule,
    dtype: torch.dtype,
    scores: int,
    flash: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """With the flash kernel and without, with whole scores and with blocks of queries, of whole sequences and of
    their last tokens."""
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 8 * 16).to(dtype).float()
    expected = attend(qkv, rule, torch.float32)
    request.getfixturevalue("gpu_path")
    monkeypatch.setattr(attention, "has_flash_attention", lambda _: flash)
    monkeypatch.setattr(limits, "GPU_SCORES", scores)
    by_spans = attend(qkv, rule, dtype, attend_by_spans)
    for got, wanted in zip((*attend(qkv, rule, dtype), *by_spans), (*expected, *expected), strict=True):
        tolerance = (1e-5 if dtype == torch.float32 else 2**-6) * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
