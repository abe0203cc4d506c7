"""Kernels of other packages on a GPU beside the built-in ones, if they are installed."""

import pytest
import torch
from torch import Tensor

from realrl.engine.generation.sampler import keep_top_k, keep_top_p
from realrl.engine.optional_kernels import use_kernels
from realrl.model.attention import varlen_attention
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.packing import Packing
from tests.gpu.devices import ONE_GPU

on_one_gpu = pytest.mark.parametrize("device", [ONE_GPU])
LENGTHS = [1, 300, 64, 1000]


@on_one_gpu
@pytest.mark.parametrize("rule", [CAUSAL, AttentionRule(window=100)], ids=["causal", "window"])
@pytest.mark.parametrize("dim", [64, 128])
def test_flash_attention_4_computes_what_the_built_in_attention_does(
    device: str, rule: AttentionRule, dim: int
) -> None:
    pytest.importorskip("flash_attn.cute.interface", reason="the extra fa4 is not installed")
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 8 * dim, device=device).bfloat16()
    grad = torch.randn(sum(LENGTHS), 4 * dim, device=device).bfloat16()

    def attend() -> list[Tensor]:
        x = qkv.clone().requires_grad_()
        out = varlen_attention(x, Packing.of(LENGTHS, device), 4, 2, rule)
        out.backward(grad)
        return [out.detach().float(), x.grad.float()]

    expected = attend()
    with use_kernels(["fa4"], torch.device(device)):
        found = attend()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2**-6 * max(1.0, theirs.abs().max().item()))


@on_one_gpu
def test_flashinfer_restricts_tokens_as_the_built_in_kernels_do_in_graphs_too(device: str) -> None:
    pytest.importorskip("flashinfer.sampling", reason="the extra flashinfer is not installed")
    torch.manual_seed(0)
    probabilities = (3 * torch.randn(40, 151_936, device=device)).softmax(-1)
    expected = keep_top_k(probabilities, 50)
    with use_kernels(["flashinfer"], torch.device(device)):
        for restrict in (lambda: keep_top_k(probabilities, 50), lambda: keep_top_p(probabilities, 0.9)):
            eager, graph = restrict(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = restrict()
            graph.replay()
            assert torch.equal(captured, eager)
        few, many = keep_top_k(probabilities, 50), keep_top_p(probabilities, 0.9)
    torch.testing.assert_close(few, expected / expected.sum(-1, keepdim=True))
    kept = probabilities.where(many > 0, torch.inf)
    least = kept.min(-1).values
    total = probabilities.where(many > 0, 0.0).double().sum(-1)
    assert torch.equal(many > 0, probabilities >= least.unsqueeze(-1)), "the likeliest"
    assert bool((total > 0.9 - 1e-5).all() and (total - least < 0.9 + 1e-5).all())
