"""Attention of a decode step over block tables, by the kernel for CPUs."""

import pytest
import torch
from paged_reference import attend_by_row, divide, make_case, merge

from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.paged_attention import attend_to_cache, attend_to_runs

HEADS = {"one each": (3, 3), "pairs": (8, 4), "threes": (6, 2), "eights": (8, 1)}
ROWS = {
    "no prompts": ([0, 0], [[0], [17]]),
    "own prompts": ([15, 16, 17, 1], [[0], [15], [16], [40]]),
    "shared prompts": ([300, 5, 128], [[3, 0, 33], [129], [2, 15, 16, 31, 140]]),
}


@pytest.mark.parametrize("lengths", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
@pytest.mark.parametrize("dim", [6, 16, 32, 80, 128, 256])
def test_attention_over_blocks_matches_attention_row_by_row(
    dim: int, heads: tuple[int, int], lengths: tuple[list[int], list[list[int]]]
) -> None:
    case = make_case(*lengths, heads=heads[0], kv_heads=heads[1], dim=dim)
    expected = attend_by_row(case)
    got = case.cache.attend(0, case.qkv, case.rows, case.heads)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-5)


RULES = {
    "window": AttentionRule(window=20),
    "one token": AttentionRule(window=1),
    "long window": AttentionRule(window=150),
    "cap": AttentionRule(cap=0.5),
    "sinks": AttentionRule(sinks=torch.linspace(-2, 3, 8)),
    "all": AttentionRule(window=130, cap=1.5, sinks=torch.linspace(3, -1, 8)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("lengths", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("exact", [False, True])
def test_windows_caps_and_sinks_are_those_of_attention_row_by_row(
    exact: bool, lengths: tuple[list[int], list[list[int]]], rule: AttentionRule
) -> None:
    case = make_case(*lengths, heads=8, kv_heads=4, dim=32)
    expected = attend_by_row(case, rule)
    got = case.cache.attend(0, case.qkv, case.rows, case.heads, rule, exact=exact)
    torch.testing.assert_close(got.double(), expected, atol=5e-6, rtol=5e-5)


@pytest.mark.parametrize("kernel", ["decode", "runs"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rule", [CAUSAL, *RULES.values()], ids=["plain", *RULES])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=list(ROWS))
def test_ranks_that_divide_the_cache_find_together_what_one_rank_finds(
    lengths: tuple[list[int], list[list[int]]], rule: AttentionRule, ranks: int, kernel: str
) -> None:
    """With three ranks, rank 1 and 2 hold none of the keys of the shortest rows."""
    case = make_case(*lengths, heads=8, kv_heads=4, dim=32)
    expected, parts = attend_by_row(case, rule), divide(case, ranks)
    found = [attend_to_cache(of.qkv, of.cache.k[0], of.cache.v[0], of.rows, of.heads, rule) for of in parts]
    if kernel == "runs":  # keys are stored now
        found = [
            attend_to_runs(of.qkv, of.cache.k[0], of.cache.v[0], of.rows.runs, of.heads, rule) for of in parts
        ]
    torch.testing.assert_close(merge(found), expected, atol=5e-6, rtol=5e-5)


def test_outputs_of_ranks_are_rounded_only_when_they_have_been_merged() -> None:
    case = make_case(*ROWS["shared prompts"], heads=6, kv_heads=2, dim=64, dtype=torch.bfloat16)
    expected, parts = attend_by_row(case), divide(case, 4)
    found = [attend_to_cache(of.qkv, of.cache.k[0], of.cache.v[0], of.rows, of.heads) for of in parts]
    assert {output.dtype for output, _ in found} == {torch.float32}
    torch.testing.assert_close(merge(found), expected, atol=1e-5, rtol=1e-4)


def test_only_the_rank_that_holds_the_newest_token_stores_it() -> None:
    case = make_case(*ROWS["shared prompts"], heads=4, kv_heads=2, dim=32)
    parts = divide(case, 2)
    before = [of.cache.k.clone() for of in parts]
    for of in parts:
        attend_to_cache(of.qkv, of.cache.k[0], of.cache.v[0], of.rows, of.heads)
    keys = case.qkv.view(len(case.qkv), -1, 32)[:, 4:6]
    for of, old in zip(parts, before, strict=True):
        for i, length in enumerate(of.rows.own_lengths.tolist()):
            if length % 2 == of.rows.part.index:
                old[0, of.rows.own_tables[i, length // 32], :, length // 2 % 16] = keys[i]
        assert torch.equal(of.cache.k.nan_to_num(7.0), old.nan_to_num(7.0))


def test_attention_in_bfloat16_rounds_only_what_is_stored_and_returned() -> None:
    case = make_case(*ROWS["shared prompts"], heads=6, kv_heads=2, dim=64, dtype=torch.bfloat16)
    expected = attend_by_row(case)
    got = case.cache.attend(0, case.qkv, case.rows, case.heads)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=2**-8)


def test_the_newest_tokens_are_stored_and_nothing_else_changes() -> None:
    case = make_case(*ROWS["shared prompts"], heads=4, kv_heads=2, dim=32, dtype=torch.bfloat16)
    before = case.cache.k.clone(), case.cache.v.clone()
    case.cache.attend(0, case.qkv, case.rows, case.heads)
    stored = case.qkv.view(len(case.qkv), -1, 32).split((4, 2, 2), 1)[1:]
    for pool, old, new in zip((case.cache.k, case.cache.v), before, stored, strict=True):
        for i, length in enumerate(case.rows.own_lengths.tolist()):
            old[0, case.rows.own_tables[i, length // 16], :, length % 16] = new[i]
        assert torch.equal(pool.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize("rule", [CAUSAL, AttentionRule(window=140), AttentionRule(window=9, cap=1.0)])
def test_a_row_attends_bit_for_bit_as_it_would_alone(rule: AttentionRule) -> None:
    """Neither neighbours nor rows of the same prompt change the order of sums."""
    case = make_case(*ROWS["shared prompts"], heads=6, kv_heads=2, dim=32)
    together = case.cache.attend(0, case.qkv, case.rows, case.heads, rule)
    for i in range(len(case.qkv)):
        rows = case.rows
        alone = type(rows)(
            prompt_tables=rows.prompt_tables[i : i + 1],
            prompt_lengths=rows.prompt_lengths[i : i + 1],
            own_tables=rows.own_tables[i : i + 1],
            own_lengths=rows.own_lengths[i : i + 1],
            prompt_starts=torch.tensor([0, 1]),
            most=1,
        )
        assert torch.equal(case.cache.attend(0, case.qkv[i : i + 1], alone, case.heads, rule)[0], together[i])
