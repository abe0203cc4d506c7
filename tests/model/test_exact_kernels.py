"""Exact kernels on a CPU: a row's result is the same bits wherever the row is and whatever is beside it."""

from collections.abc import Iterator
from itertools import pairwise, product

import pytest
import torch
from paged_reference import attend_by_row, make_case
from small_models import SHAPES
from torch import Tensor

from realrl.model.arithmetic.elementwise import activate, add_rms_norm, rms_norm, swiglu
from realrl.model.arithmetic.ops import Products, linear
from realrl.model.attention import varlen_attention
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.cpu.products import Panels
from realrl.model.group import make_single_rank_group
from realrl.model.layer import Norm
from realrl.model.logprobs import cap_logits, compute_logprobs
from realrl.model.matrices import DecodeWeights
from realrl.model.packing import Packing
from realrl.model.rotary import Rotation, apply_rotary_emb

EXACT = Products(exact=True)
HEADS = [(4, 2, 32), (3, 3, 16), (5, 1, 20)]
LENGTHS = [1, 17, 150, 16, 33, 2]
RULES = {
    "causal": CAUSAL,
    "window": AttentionRule(window=40),
    "cap": AttentionRule(cap=0.7),
    "sinks": AttentionRule(sinks=torch.linspace(-2.0, 3.0, 5)),
    "all": AttentionRule(window=33, cap=1.5, sinks=torch.linspace(3.0, -1.0, 5)),
}
ATTENTION = [
    *((*heads, "causal") for heads in HEADS),
    *((*HEADS[-1], name) for name in RULES if name != "causal"),
]
"""Heads, and names of rules."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("products", [EXACT, Products(exact=True, bfloat16=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "depth"), [(40, 64), (97, 37), (200, 15), (1, 300)])
def test_rows_of_a_product_do_not_depend_on_other_rows(
    columns: int, depth: int, dtype: torch.dtype, products: Products, threads: None
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    whole = products.forward_nt(x, weight)
    bounds = [0, 1, 2, 5, 12, 51, 180, 300]
    parts = [products.forward_nt(x[a:b].clone(), weight) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(products.forward_nt(x.flip(0), weight).flip(0), whole)
    rounds = products.bfloat16 or dtype == torch.bfloat16
    tolerance = {"rtol": 2e-2, "atol": 0.1} if rounds else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, **tolerance)


@pytest.mark.parametrize("products", [Products(packed=True), EXACT, Products(packed=True, bfloat16=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "depth"), [(40, 64), (97, 37), (16, 300)])
def test_decode_steps_multiply_with_packed_weights(
    columns: int, depth: int, dtype: torch.dtype, products: Products, threads: None
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(columns, depth).to(dtype), torch.randn(columns).to(dtype)
    weights = DecodeWeights([weight], weight, products)
    for rows in (1, 3, 7, 30, 64, 200):
        x = torch.randn(rows, depth).to(dtype)
        rounds = dtype == torch.bfloat16 or products.bfloat16
        tolerance = {"rtol": 2e-2, "atol": 0.3} if rounds else {"rtol": 1e-5, "atol": 1e-4}
        expected = x.double() @ weight.double().T
        out = weights.multiply(x, weight, bias)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected + bias.double(), **tolerance)
        if products.exact:
            expected_bits = linear(x, weight, bias, products)
            assert torch.equal(out, expected_bits)
        assert torch.equal(
            weights.multiply(x, weight),
            products.multiply_packed(x, Panels.of(weight.bfloat16() if products.bfloat16 else weight)).to(
                dtype
            ),
        )
        logits = weights.multiply_by_head(x)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), expected, **tolerance)
        if products.exact:
            assert torch.equal(weights.multiply(x, weight), products.forward_nt(x, weight))


def test_weights_on_a_gpu_are_not_packed_on_any_stage() -> None:
    weight = torch.empty(4, 8, device="meta")
    for head in (None, weight):
        weights = DecodeWeights([weight], head, EXACT)
        assert weights.follow_parameters and weights._packed_head is None


def test_errors_of_long_sums_stay_small() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 8192), torch.randn(32, 8192)
    expected = x.double() @ weight.double().T

    def error(out: Tensor) -> float:
        return float((out.double() - expected).square().mean().sqrt())

    assert error(EXACT.forward_nt(x, weight)) < 2 * error(x @ weight.T)


def test_nothing_is_multiplied_where_there_are_no_rows_columns_or_depth() -> None:
    for rows, columns, depth in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        out = EXACT.forward_nt(torch.ones(rows, depth), torch.ones(columns, depth))
        assert torch.equal(out, torch.zeros(rows, columns))


def test_values_that_are_not_finite_reach_the_result() -> None:
    x = torch.ones(2, 33)
    x[1, 32] = torch.nan
    out = EXACT.forward_nt(x, torch.ones(4, 33))
    assert torch.equal(out[0], torch.full((4,), 33.0))
    assert out[1].isnan().all()


def test_gradients_are_those_of_other_products() -> None:
    torch.manual_seed(0)
    upstream = torch.randn(7, 5)
    grads = []
    for products in (EXACT, Products()):
        torch.manual_seed(1)
        x, weight = torch.randn(7, 12, requires_grad=True), torch.nn.Parameter(torch.randn(5, 12))
        linear(x, weight, products=products).backward(upstream)
        grads.append((x.grad, weight.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "name"), ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_sequence_does_not_depend_on_others_or_on_what_follows(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, name: str, threads: None
) -> None:
    torch.manual_seed(0)
    rule = RULES[name]
    qkv = torch.randn(sum(LENGTHS), (heads + 2 * kv_heads) * dim).to(dtype)
    whole = varlen_attention(qkv, Packing.of(LENGTHS, "cpu"), heads, kv_heads, rule, exact=True)
    start = 0
    for length in LENGTHS:
        for part in {length, max(1, length // 2)}:
            rows = slice(start, start + part)
            packing = Packing.of([part], "cpu")
            alone = varlen_attention(qkv[rows], packing, heads, kv_heads, rule, exact=True)
            assert torch.equal(alone, whole[rows])
        start += length


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_and_its_gradient_match_the_fast_path(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), (heads + 2 * kv_heads) * dim)
    upstream = torch.randn(len(qkv), heads * dim)
    found = []
    for exact in (True, False):
        x = qkv.clone().requires_grad_()
        out = varlen_attention(x, Packing.of(LENGTHS, "cpu"), heads, kv_heads, exact=exact)
        out.backward(upstream)
        found.append((out, x.grad))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "name"), ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_over_the_cache_is_the_last_row_of_a_forward_pass(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, name: str, threads: None
) -> None:
    rule = RULES[name]
    case = make_case(
        [0, 40, 15, 300],
        [[0], [3, 17, 0], [16], [5, 140]],
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
    )
    expected = attend_by_row(case, rule)
    rows = case.rows
    got = case.cache.attend(0, case.qkv, rows, heads, rule, exact=True)
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(got.double(), expected, **tolerance)
    for i in range(len(got)):
        # Keys and values where the cache has them, the newest included, as one packed sequence.
        pools = [
            torch.cat(
                [
                    pool[0][table[i]].transpose(1, 2).flatten(0, 1)[: lengths[i] + newest]
                    for table, lengths, newest in (
                        (rows.prompt_tables, rows.prompt_lengths, 0),
                        (rows.own_tables, rows.own_lengths, 1),
                    )
                ]
            ).flatten(1)
            for pool in (case.cache.k, case.cache.v)
        ]
        q = case.qkv[i : i + 1, : heads * dim].expand(len(pools[0]), -1)
        packed = torch.cat([q, *pools], 1)
        packing = Packing.of([len(packed)], "cpu")
        alone = varlen_attention(packed, packing, heads, kv_heads, rule, exact=True)
        assert torch.equal(alone[-1], got[i])


def test_other_functions_work_row_by_row(threads: None) -> None:
    """Those that are the same with and without `exact`."""
    torch.manual_seed(0)
    x, gate_up, qkv, logits = (torch.randn(500, n) for n in (48, 70, 4 * 20, 1003))
    weight, positions = torch.randn(48), torch.arange(500) * 7 % 499
    frequencies = torch.rand(10)

    def rotate(rows: slice) -> Tensor:
        cos, sin = Rotation(frequencies, None).tables(positions[rows])
        return apply_rotary_emb(qkv[rows].clone(), cos, sin, 3)

    alone = make_single_rank_group()
    heads = x.view(500, 6, 8)
    functions = [
        *(
            lambda rows, of=(activation, gated): activate(gate_up[rows], of[0], gated=of[1])
            for activation, gated in (
                *product(("silu", "gelu", "gelu_tanh"), (True, False)),
                ("clamped_silu", True),
            )
        ),
        lambda rows: Norm(SHAPES["olmo2"]).normalize_together(heads[rows], weight, torch.ones(6), 48, alone),
        lambda rows: rms_norm(x[rows], weight, 1e-5),
        lambda rows: add_rms_norm(x[rows], x[rows] * 0.3, weight, 1e-5)[1],
        lambda rows: swiglu(gate_up[rows]),
        lambda rows: compute_logprobs(logits[rows], 0.7),
        lambda rows: cap_logits(logits[rows] * 20, 30.0),
        lambda rows: compute_logprobs(logits[rows], 0.7).exp(),
        lambda rows: torch.nn.functional.layer_norm(x[rows], (48,), weight),
        rotate,
    ]
    with torch.no_grad():
        for function in functions:
            whole = function(slice(None))
            for start in range(0, 500, 17):
                rows = slice(start, start + 1 + start % 5)
                assert torch.equal(function(rows), whole[rows])
