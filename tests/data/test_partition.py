"""Every item is computed once, by ranks that have equally much to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.data.balance import (
    assign,
    even_micro_batches,
    micro_batches,
    minibatch_slices,
    partition,
    partition_samples,
    partition_shared,
)

COSTS = st.lists(st.integers(0, 500), max_size=60) | st.lists(st.integers(0, 2), max_size=12)


def total(costs: list[int], positions: list[int]) -> int:
    return sum(costs[i] for i in positions)


@given(COSTS, st.integers(1, 9))
def test_a_partition_holds_every_item_once_in_ascending_order(costs, parts):
    out = partition(costs, parts)
    assert len(out) == parts
    assert sorted(i for part in out for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in out)


@given(COSTS, st.integers(1, 9))
def test_no_part_is_empty_where_items_suffice(costs, parts):
    assert sum(1 for part in partition(costs, parts) if part) == min(parts, len(costs))


@given(COSTS.filter(bool), st.integers(1, 9))
def test_parts_differ_by_at_most_the_longest_item(costs, parts):
    loads = [total(costs, part) for part in partition(costs, parts)]
    assert max(loads) - min(loads) <= max(costs)


@given(st.integers(0, 50), st.integers(1, 8))
def test_mini_batches_are_contiguous_and_of_nearly_equal_size(n, minibatches):
    slices = minibatch_slices(n, minibatches)
    assert [i for part in slices for i in part] == list(range(n))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@given(st.lists(st.integers(1, 500), min_size=24, max_size=48), st.integers(1, 3), st.integers(1, 8))
def test_mini_batches_hold_the_same_items_for_every_dp(costs, minibatches, dp):
    by_rank = assign(costs, minibatches=minibatches, dp=dp)
    union = [sorted(i for rank in by_rank for i in rank[m]) for m in range(minibatches)]
    assert union == [list(positions) for positions in minibatch_slices(len(costs), minibatches)]


def test_a_mini_batch_that_cannot_reach_every_rank_is_refused():
    with pytest.raises(ValueError, match="2 items cannot be split over dp=3"):
        assign([5] * 4, minibatches=2, dp=3)


PROMPTS = st.lists(st.integers(1, 500), min_size=1, max_size=30)


@given(PROMPTS, st.integers(1, 9), st.integers(1, 9))
def test_samples_of_a_prompt_stay_together_but_for_prompts_that_do_not_go_round(prompts, samples, parts):
    costs = [cost for cost in prompts for _ in range(samples)]
    out = partition_samples(costs, samples, parts)
    assert sorted(i for part in out for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in out)
    assert max(map(len, out)) - min(map(len, out)) <= 1
    holders = [sum(prompt in {i // samples for i in part} for part in out) for prompt in range(len(prompts))]
    cut = [cost for cost, count in zip(prompts, holders, strict=True) if count > 1]
    assert len(cut) <= len(prompts) % parts
    assert not cut or max(cut) <= sorted(prompts)[len(prompts) % parts - 1]


@given(st.lists(st.integers(1, 500), min_size=8, max_size=32), st.integers(2, 4))
def test_ranks_with_equally_many_prompts_differ_by_at_most_the_longest(prompts, parts):
    prompts = prompts[: len(prompts) // parts * parts]
    loads = [
        sum(prompts[i // 3] for i in part)
        for part in partition_samples([p for p in prompts for _ in "123"], 3, parts)
    ]
    assert max(loads) - min(loads) <= 3 * max(prompts)


def count_once(part, costs, shared, samples):
    """Tokens of a part, if the samples of a prompt share some of them."""
    prompts = {i // samples: shared[i] for i in part}
    return sum(costs[i] - shared[i] for i in part) + sum(prompts.values())


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 500)), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 6),
)
def test_samples_stay_together_if_that_makes_the_largest_load_smaller(prompts, samples, parts):
    shared = [prompt for prompt, _ in prompts for _ in range(samples)]
    costs = [prompt + answer + 7 * i % 40 for prompt, answer in prompts for i in range(samples)]
    numbers = [i // samples for i in range(len(costs))]
    out = partition_shared(costs, parts, shared, numbers)
    assert sorted(i for part in out for i in part) == list(range(len(costs)))
    assert len(costs) < parts or all(out)
    loads, alone = (
        max(count_once(part, costs, shared, samples) for part in found)
        for found in (out, partition(costs, parts))
    )
    assert loads <= alone


def test_samples_of_as_many_prompts_as_ranks_stay_together():
    assert partition_shared([120] * 8, 2, [100] * 8, [0] * 4 + [1] * 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # One long prompt is divided, because a rank without items would not help.
    assert partition_shared([120] * 4, 2, [100] * 4, [0] * 4) == [[0, 1], [2, 3]]
    assert partition_shared([9, 5, 5, 1], 2, [0] * 4, [0, 0, 1, 1]) == partition([9, 5, 5, 1], 2)


@given(COSTS, st.integers(1, 1000))
def test_micro_batches_hold_every_item_once_within_the_budget(costs, budget):
    groups = micro_batches(costs, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(costs)))
    assert all(group and group == sorted(group) for group in groups)
    assert all(total(costs, group) <= budget or len(group) == 1 for group in groups)


def test_micro_batches_gather_items_of_similar_length():
    assert micro_batches([30, 60, 50], 100) == [[1], [0, 2]]


def test_short_items_fill_gaps_before_another_micro_batch_is_opened():
    assert micro_batches([90, 60, 40, 10], 100) == [[0, 3], [1, 2]]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(100, 2000), st.integers(2, 4))
def test_even_micro_batches_hold_every_item_once_within_the_budget(costs, budget, stages):
    groups = even_micro_batches(costs, budget, stages=stages, per_stage=2)
    assert sorted(i for group in groups for i in group) == list(range(len(costs)))
    assert all(total(costs, group) <= budget or len(group) == 1 for group in groups)


@given(st.lists(st.integers(50, 64), min_size=40, max_size=80))
def test_even_micro_batches_of_unequal_items_are_nearly_equal(costs):
    found = even_micro_batches(costs, 10_000, stages=2, per_stage=1)
    assert len(found) == 2
    assert max(total(costs, group) for group in found) < 1.05 * sum(costs) / 2 + 64


@pytest.mark.parametrize("split", [lambda: partition([1], 0), lambda: micro_batches([1], 0)])
def test_impossible_splits_are_refused(split):
    with pytest.raises(ValueError):
        split()
