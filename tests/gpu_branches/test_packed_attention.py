"""Attention over packed sequences by every path of GPUs, on a CPU, beside the kernel for CPUs."""

from dataclasses import replace

import pytest
import torch

from realrl.layout import limits
from realrl.model import attention
from realrl.model.attention import varlen_attention
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.packing import Packing

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


def attend(qkv: torch.Tensor, rule: AttentionRule, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients, of sinks too if there are any."""
    x = qkv.to(dtype, copy=True).requires_grad_()
    sinks = None if rule.sinks is None else rule.sinks.clone().requires_grad_()
    out = varlen_attention(x, Packing.of(LENGTHS, "cpu"), 4, 2, replace(rule, sinks=sinks))
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
    """With the flash kernel and without, with whole scores and with blocks of queries."""
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 8 * 16).to(dtype).float()
    expected = attend(qkv, rule, torch.float32)
    request.getfixturevalue("gpu_path")
    monkeypatch.setattr(attention, "has_flash_attention", lambda _: flash)
    monkeypatch.setattr(limits, "GPU_SCORES", scores)
    for got, wanted in zip(attend(qkv, rule, dtype), expected, strict=True):
        tolerance = (1e-5 if dtype == torch.float32 else 2**-6) * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
