"""Sequences that begin alike: their common tokens are computed once, and outputs and gradients stay the same."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from realrl.data.prefixes import Prefix
from realrl.engine.buffers import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.shape import Head
from realrl.families.tensors import Init
from realrl.layout.shard import Shard
from realrl.model import attention
from realrl.model.arithmetic.copies import Copies
from realrl.model.arithmetic.ops import Products
from realrl.model.attention_rule import AttentionRule
from realrl.model.group import make_single_rank_group
from realrl.model.packing import Packing
from realrl.model.routing import LIKELIEST, BalancedRouting, ExpertCounts, Routing
from realrl.model.transformer import Transformer
from tests.model.small_models import SHAPES

LENGTHS = (9, 14, 10, 6, 70, 75, 3)
PREFIXES = (Prefix(range(3), 8), Prefix(range(4, 6), 65))
"""Three sequences begin alike, and two; the others are alone."""


def make_tokens(vocab: int = 80) -> Tensor:
    """Sequences of LENGTHS with the beginnings PREFIXES. [T]"""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, vocab, (length,), generator=generator) for length in LENGTHS]
    for prefix in PREFIXES:
        for row in prefix.rows:
            rows[row][: prefix.tokens] = rows[prefix.rows.start][: prefix.tokens]
    return torch.cat(rows)


def pack(*, shared: bool) -> Packing:
    return Packing.of(LENGTHS, "cpu", prefixes=PREFIXES if shared else ())


def test_common_tokens_are_packed_once() -> None:
    shared = pack(shared=True).common
    assert shared is not None
    tokens = make_tokens()
    packed = tokens[shared.kept]
    assert len(packed) == sum(LENGTHS) - 2 * 8 - 65
    assert torch.equal(shared.whole.copy(packed), tokens)
    assert shared.spans.queries == (8, 1, 6, 2, 6, 65, 5, 10, 3)
    assert shared.spans.keys == (8, 9, 14, 10, 6, 65, 70, 75, 3)
    keys = torch.cat([tokens[:8], tokens[:39]])
    assert torch.equal(shared.keys.copy(packed)[: len(keys)], keys)
    lengths = shared.members @ torch.tensor(shared.spans.queries).double()
    assert lengths.tolist() == [*LENGTHS]


@pytest.mark.parametrize("sources", [[0, 1, 2], [2, 0, 2, 2, 4, 0], [1, 1], [3]])
def test_gradient_of_copies(sources: Sequence[int]) -> None:
    index = torch.tensor(sources)
    x = torch.randn(5, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    copied = Copies.of(index, 5, "cpu").copy(x)
    upstream = torch.randn(len(sources), 3)
    (copied * upstream).sum().backward()
    (y.index_select(0, index) * upstream).sum().backward()
    assert torch.equal(copied, y.index_select(0, index))
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("path", ["fast", "exact", "padded"])
@pytest.mark.parametrize(
    "rule",
    [AttentionRule(), AttentionRule(window=5), AttentionRule(cap=2.0), AttentionRule(sinks=torch.ones(4))],
)
def test_attention(rule: AttentionRule, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = path == "exact"
    if path == "padded":  # as on a GPU, in float32
        monkeypatch.setattr(attention, "on_gpu", lambda _: True)
    torch.manual_seed(0)
    packing = pack(shared=True)
    assert packing.common is not None
    x = torch.randn(len(packing.positions), (4 + 2 * 2) * 8, requires_grad=True)
    out = packing.common.whole.copy(attention.varlen_attention(x, packing, 4, 2, rule, exact=exact))
    whole = packing.common.whole.copy(x)
    expected = attention.varlen_attention(whole, pack(shared=False), 4, 2, rule, exact=exact)
    if exact:
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad((y * upstream).sum(), x)[0] for y in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Results:
    """What a model computes for sequences, and its gradients."""

    def __init__(self, family: str, head: Head, *, shared: bool, recompute: bool, exact: bool) -> None:
        shape = SHAPES[family]
        torch.manual_seed(0)
        tensors = model_tensors(shape, head)
        buffer = FlatBuffer(tensors, torch.float32, "cpu")
        for tensor in tensors:
            buffer[tensor.name].copy_(torch.randn(tensor.shape) * 0.2 + float(tensor.init is Init.ONES))
        group = make_single_rank_group()
        model = Transformer(Shard(shape, head), buffer.fused, group, Products(exact=exact))
        packing, tokens = pack(shared=shared), make_tokens(shape.vocab_size)
        routing: Routing = LIKELIEST
        self.counts: ExpertCounts | None = None
        if shape.mixture is not None:
            self.counts = ExpertCounts(shape.layers, shape.mixture.experts, torch.device("cpu"))
            routing = BalancedRouting(
                LIKELIEST,
                self.counts,
                rows=packing.rows if packing.common is None else packing.common.parts,
                members=None if packing.common is None else packing.common.members,
                lengths=packing.starts.diff(),
                coefficient=torch.tensor(3.0),
            )
        hidden = model(tokens, packing, recompute=recompute, routing=routing)
        upstream = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
        if head == "scalar":
            self.outputs = [model.compute_values(hidden, packing)]
        else:
            logprobs, entropy, _ = model.compute_logprobs(
                hidden, tokens, packing, temperature=0.7, entropy=True
            )
            assert entropy is not None
            self.outputs = [logprobs, entropy]
        (self.outputs[0] * upstream).sum().backward()
        self.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        if head == "lm":
            with torch.no_grad():
                self.outputs += model.find_likeliest(hidden, tokens, packing, count=3, temperature=0.7)


CASES = [
    ("qwen3", "lm", False, False),
    ("qwen3", "lm", True, False),
    ("qwen3", "lm", False, True),
    ("llama3", "scalar", True, False),
    ("gpt2", "lm", False, False),  # learned positions, biases
    ("gemma2", "lm", False, False),  # windows and caps
    ("gpt_oss", "lm", True, False),  # sinks, biases of experts
    ("qwen3_moe", "lm", False, False),
    ("qwen3_moe", "lm", True, True),
    ("mixtral", "scalar", False, False),
    ("llama4", "lm", False, False),
]


@pytest.mark.parametrize(("family", "head", "recompute", "exact"), CASES)
def test_models_compute_the_same(family: str, head: Head, recompute: bool, exact: bool) -> None:
    found, expected = (
        Results(family, head, shared=shared, recompute=recompute, exact=exact) for shared in (True, False)
    )
    for output, wanted in zip(found.outputs, expected.outputs, strict=True):
        if exact:
            assert torch.equal(output, wanted)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
    for name, wanted in expected.gradients.items():
        assert wanted is not None
        torch.testing.assert_close(found.gradients[name], wanted, rtol=1e-3, atol=1e-4, msg=name)
    if found.counts is not None and expected.counts is not None:
        assert torch.equal(found.counts.chosen, expected.counts.chosen)
        torch.testing.assert_close(found.counts.losses, expected.counts.losses, rtol=1e-5, atol=0)
