"""Exact products and attention by the kernels for GPUs, in Triton's interpreter."""

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import numpy as np
from paged_reference import attend_by_row, divide, make_case, merge
from torch import Tensor

from realrl.model import paged_attention
from realrl.model.arithmetic import ops
from realrl.model.arithmetic.ops import Products
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.gpu.exact import launch_products
from realrl.model.packing import Packing
from realrl.model.paged_attention import attend_to_runs, count_run_rows


@pytest.fixture(autouse=True)
def tile_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows of a tile's product not depend on their place in the tile, as on tensor cores.

    The interpreter calls numpy, whose library computes rows at the edge of a tile otherwise.
    """

    def multiply_in_order(a: np.ndarray, b: np.ndarray, dtype: object = None) -> np.ndarray:
        total = np.zeros((len(a), b.shape[1]), np.float32)
        for k in range(len(b)):
            total += a[:, k, None] * b[k]
        return total

    monkeypatch.setattr(np, "matmul", multiply_in_order)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the branches of GPUs."""
    for module in (ops, paged_attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype)
    launch_products(x, weight, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_product_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(130, 70).to(dtype), torch.randn(97, 70).to(dtype)
    whole = multiply(x, weight)
    assert torch.equal(torch.cat([multiply(x[a : a + 1], weight) for a in range(0, 130, 43)]), whole[::43])
    assert torch.equal(multiply(x[:64], weight), whole[:64])
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, rtol=2e-2, atol=tolerance)


def test_models_on_a_gpu_multiply_by_these_kernels(on_gpus: None) -> None:
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    assert torch.equal(Products(exact=True).forward_nt(x, weight), multiply(x, weight))


RULES = {
    "causal": CAUSAL,
    "window": AttentionRule(window=37),
    "one token": AttentionRule(window=1),
    "cap": AttentionRule(cap=0.5),
    "sinks": AttentionRule(sinks=torch.linspace(-2, 3, 4)),
    "all": AttentionRule(window=20, cap=1.5, sinks=torch.linspace(3, -1, 4)),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", list(RULES))
def test_ranks_that_divide_the_cache_find_together_what_one_rank_finds(
    on_gpus: None, name: str, ranks: int
) -> None:
    case = make_case([0, 40], [[20], [3]], heads=4, kv_heads=2, dim=20)
    expected, found = attend_by_row(case, RULES[name]), []
    for of in divide(case, ranks):
        k, v = (pool[0].contiguous() for pool in (of.cache.k, of.cache.v))
        newest = of.qkv.view(len(of.qkv), -1, 20)[:, 4:].split(2, 1)
        for i, length in enumerate(of.rows.own_lengths.tolist()):
            if length % ranks == of.rows.part.index:
                block, offset = of.rows.own_tables[i, length // ranks // 16], length // ranks % 16
                k[block, :, offset], v[block, :, offset] = newest[0][i], newest[1][i]
        found.append(attend_to_runs(of.qkv, k, v, of.rows.runs, of.heads, RULES[name]))
    torch.testing.assert_close(merge(found), expected, atol=5e-6, rtol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "name"),
    [(20, 1, 16, "window"), (5, 1, 16, "causal"), *((4, 2, 20, name) for name in RULES)],
)
def test_a_decode_step_over_the_cache_is_the_last_row_of_a_packed_sequence(
    on_gpus: None, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, name: str
) -> None:
    rule = RULES[name]
    case = make_case([0, 40], [[20], [3]], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    expected = attend_by_row(case, rule)
    rows, cache = case.rows, case.cache
    newest = case.qkv.view(len(case.qkv), -1, dim)[:, heads:].split(kv_heads, 1)
    cache.store(0, *newest, rows.newest)
    assert torch.equal(rows.runs.starts, torch.arange(len(case.qkv) + 1)), "each row by itself"
    # On a GPU, pools are contiguous.
    k, v = (pool[0].contiguous() for pool in (cache.k, cache.v))
    got, _ = attend_to_runs(case.qkv, k, v, rows.runs, heads, rule)
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(got.double(), expected, **tolerance)
    for i in range(len(got)):
        keys, values = (
            torch.cat(
                [
                    pool[0][table[i]].transpose(1, 2).flatten(0, 1)[:length]
                    for table, length in (
                        (rows.prompt_tables, int(rows.prompt_lengths[i])),
                        (rows.own_tables, int(rows.own_lengths[i]) + 1),
                    )
                ]
            )
            for pool in (cache.k, cache.v)
        )
        packing = Packing.of([5, len(keys)], "cpu")
        blocked = packing.spans.arrange_blocks(count_run_rows(heads, kv_heads))
        pools = []
        for values_of in (keys, values):
            pool = torch.zeros(blocked.count, kv_heads, 16, dim, dtype=dtype)
            filled = torch.cat([torch.randn(5, kv_heads, dim).to(dtype), values_of])
            pool[blocked.places.blocks, :, blocked.places.offsets] = filled
            pools.append(pool)
        qkv = torch.randn(5 + len(keys), (heads + 2 * kv_heads) * dim).to(dtype)
        qkv[-1] = case.qkv[i]
        alone, _ = attend_to_runs(qkv, *pools, blocked.runs, heads, rule)
        assert not alone.isnan().any()
        assert torch.equal(alone[-1], got[i])
