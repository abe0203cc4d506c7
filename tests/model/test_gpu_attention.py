"""Attention of a decode step over block tables, by the kernels for GPUs, in Triton's interpreter."""

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from paged_reference import Case, attend_by_row, divide, make_case, merge

from realrl.layout.kv_blocks import count_blocks
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.gpu import paged_attention
from realrl.model.gpu.paged_attention import PART_KEYS, PARTS, launch_attention
from realrl.model.paged_attention import attend_to_blocks

ROWS = {
    "no prompts": ([0, 0], [[0], [17]]),
    "own prompts": ([15, 16, 1], [[15], [16], [40]]),
    "shared prompts": ([300, 5], [[3, 0, 33], [15, 140]]),
}


def attend(case: Case, rule: AttentionRule = CAUSAL) -> torch.Tensor:
    return attend_to_part(case, rule)[0]


def attend_to_part(case: Case, rule: AttentionRule = CAUSAL) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (pool[0].contiguous() for pool in (case.cache.k, case.cache.v))
    rows = case.rows
    # What the operator calls on a GPU; it is registered for no other device.
    found = attend_to_blocks._init_fn(
        case.qkv,
        k,
        v,
        rows.prompt_tables,
        rows.prompt_lengths,
        rows.own_tables,
        rows.own_lengths,
        case.heads,
        *rule.bounds,
        rule.sinks if rows.part.index == 0 else None,
        rows.part.ranks,
        rows.part.index,
    )
    case.cache.k[0], case.cache.v[0] = k, v
    return found


@pytest.mark.parametrize("lengths", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(32, 3, 3), (80, 8, 4), (256, 8, 1)])
def test_attention_in_parts_matches_attention_row_by_row(
    dim: int, heads: int, kv_heads: int, lengths: tuple[list[int], list[list[int]]]
) -> None:
    case = make_case(*lengths, heads=heads, kv_heads=kv_heads, dim=dim)
    expected = attend_by_row(case)
    torch.testing.assert_close(attend(case).double(), expected, atol=2e-6, rtol=2e-5)


RULES = {
    "window": AttentionRule(window=20),
    "one token": AttentionRule(window=1),
    "long window": AttentionRule(window=150),
    "window of everything": AttentionRule(window=334),
    "cap": AttentionRule(cap=0.5),
    "sinks": AttentionRule(sinks=torch.linspace(-2, 3, 8)),
    "all": AttentionRule(window=130, cap=1.5, sinks=torch.linspace(3, -1, 8)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("lengths", ROWS.values(), ids=list(ROWS))
def test_windows_caps_and_sinks_are_those_of_attention_row_by_row(
    lengths: tuple[list[int], list[list[int]]], rule: AttentionRule
) -> None:
    case = make_case(*lengths, heads=8, kv_heads=4, dim=32)
    expected = attend_by_row(case, rule)
    torch.testing.assert_close(attend(case, rule).double(), expected, atol=5e-6, rtol=5e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rule", [CAUSAL, *RULES.values()], ids=["plain", *RULES])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=list(ROWS))
def test_ranks_that_divide_the_cache_find_together_what_one_rank_finds(
    lengths: tuple[list[int], list[list[int]]], rule: AttentionRule, ranks: int
) -> None:
    case = make_case(*lengths, heads=8, kv_heads=4, dim=32)
    expected, parts = attend_by_row(case, rule), divide(case, ranks)
    found = [attend_to_part(of, rule) for of in parts]
    torch.testing.assert_close(merge(found), expected, atol=5e-6, rtol=5e-5)
    newest = case.qkv.view(len(case.qkv), -1, 32)[:, 8:12]
    for i, length in enumerate(case.rows.own_lengths.tolist()):
        of = parts[length % ranks]
        block, offset = of.rows.own_tables[i, length // ranks // 16], length // ranks % 16
        assert torch.equal(of.cache.k[0, block, :, offset], newest[i])


@pytest.mark.parametrize("window", [5, 16 * 256 - 3])
def test_parts_that_lie_before_the_window_count_for_nothing(window: int) -> None:
    most = PARTS * PART_KEYS + 100
    case = make_case([most, 10], [[5], [most]], heads=2, kv_heads=1, dim=16)
    rule = AttentionRule(window=window)
    torch.testing.assert_close(attend(case, rule).double(), attend_by_row(case, rule), atol=2e-6, rtol=2e-5)


def test_long_rows_are_cut_into_parts_of_more_keys() -> None:
    most = PARTS * PART_KEYS + 100
    case = make_case([most, 10], [[5], [most]], heads=2, kv_heads=1, dim=16)
    expected = attend_by_row(case)
    torch.testing.assert_close(attend(case).double(), expected, atol=2e-6, rtol=2e-5)


def test_bfloat16_is_rounded_where_it_is_stored_and_returned() -> None:
    case = make_case(*ROWS["shared prompts"], heads=6, kv_heads=2, dim=64, dtype=torch.bfloat16)
    expected = attend_by_row(case)
    got = attend(case)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=4e-3, rtol=2**-7)


def test_the_newest_tokens_are_stored_and_nothing_else_changes() -> None:
    case = make_case(*ROWS["shared prompts"], heads=4, kv_heads=2, dim=32)
    before = case.cache.k.clone(), case.cache.v.clone()
    attend(case)
    stored = case.qkv.view(len(case.qkv), -1, 32).split((4, 2, 2), 1)[1:]
    for pool, old, new in zip((case.cache.k, case.cache.v), before, stored, strict=True):
        for i, length in enumerate(case.rows.own_lengths.tolist()):
            old[0, case.rows.own_tables[i, length // 16], :, length % 16] = new[i]
        assert torch.equal(pool.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize("rule", [CAUSAL, AttentionRule(window=20, cap=1.0)])
def test_a_row_attends_bit_for_bit_as_it_would_alone(rule: AttentionRule) -> None:
    case = make_case(*ROWS["own prompts"], heads=6, kv_heads=2, dim=32)
    together, rows = attend(case, rule), case.rows
    k, v = (pool[0].contiguous() for pool in (case.cache.k, case.cache.v))
    for i in range(len(case.qkv)):
        one = slice(i, i + 1)
        segments = (rows.prompt_tables, rows.prompt_lengths, rows.own_tables, rows.own_lengths)
        own = (part[one] for part in segments)
        alone, _ = launch_attention(case.qkv[one], k, v, *own, 6, *rule.bounds, None)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("lengths", [*ROWS.values(), ([700, 2], [[3], [300]])], ids=[*ROWS, "several parts"])
def test_programs_are_launched_for_parts_that_tables_have_room_for(
    lengths: tuple[list[int], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []
    kernel = paged_attention.attend_part

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return kernel[grid]

    def run() -> torch.Tensor:
        return attend(make_case(*lengths, heads=4, kv_heads=2, dim=32))

    monkeypatch.setattr(paged_attention, "attend_part", Launcher())
    few = run()
    monkeypatch.setattr(paged_attention, "_count_parts", lambda *_: PARTS)
    assert torch.equal(few, run())
    (_, _, launched), (_, _, all_parts) = grids
    assert launched < all_parts == PARTS


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("prompt", [0, 1, 255, 256, 1000, 4096, 9000])
@pytest.mark.parametrize("own", [0, 15, 16, 1007, 1008, 5000])
def test_tables_as_wide_as_a_row_have_room_for_all_of_its_parts(prompt: int, own: int, tile: int) -> None:
    tiles = -(-prompt // tile) + -(-(own + 1) // tile)
    each = max(PART_KEYS // tile, -(-tiles // PARTS))
    widths = max(1, count_blocks(prompt)), count_blocks(own + 1)
    assert -(-tiles // each) <= paged_attention._count_parts(*widths, tile) <= PARTS
