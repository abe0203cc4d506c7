"""Degrees of context parallelism for single items."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.plan.pool import Share, divide_pool, list_block_sizes


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 3]), (6, [1, 2, 6]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 12])],
)
def test_blocks_are_apart_or_one_in_the_other(ranks: int, sizes: list[int]) -> None:
    assert list_block_sizes(ranks) == sizes
    assert all(large % small == 0 for small, large in pairwise(sizes))


def measure(shares: list[Share], costs: list[int], ranks: int) -> list[float]:
    """Load of each rank."""
    return [
        sum(costs[item] / len(share.ranks) for share in shares if rank in share.ranks for item in share.items)
        for rank in range(ranks)
    ]


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    st.sampled_from([2, 3, 4, 6, 8]),
    st.integers(1, 2000),
)
def test_every_item_is_computed_once_by_a_block_that_has_room(
    tokens: list[int], ranks: int, most: int
) -> None:
    costs = [n + n * n // 500 for n in tokens]
    shares = divide_pool(tokens, costs, ranks, most)
    assert sorted(item for share in shares for item in share.items) == [*range(len(tokens))]
    sizes = [len(share.ranks) for share in shares]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) <= set(list_block_sizes(ranks))
    assert all(share.ranks.start % len(share.ranks) == 0 for share in shares)
    assert shares[0].ranks.start == 0
    for share in shares:
        room = len(share.ranks) * most
        assert len(share.ranks) == ranks or all(tokens[item] <= room for item in share.items)
    # Ranks are not idle while one of them has a whole item too much.
    loads = measure(shares, costs, ranks)
    assert max(loads) <= 1.1 * (sum(costs) / ranks + max(costs) / 2) + 1e-6


def test_short_items_stay_on_one_rank_and_long_ones_are_divided() -> None:
    assert divide_pool([100] * 8, [100] * 8, 4, 1000) == [
        Share(range(i, i + 1), [i, i + 4]) for i in range(4)
    ]
    # Too many tokens for one rank, and for two.
    mixed = [40, 40, 150, 40, 40, 350, 40, 40, 40, 40]
    found = divide_pool(mixed, mixed, 4, 100)
    assert found[:2] == [Share(range(4), [5]), Share(range(2), [2])]
    assert all(len(share.ranks) == 1 for share in found[2:])
    assert max(measure(found, mixed, 4)) <= 210  # the mean is 205
    # A single item is divided among all ranks, although it has room on one of them.
    assert divide_pool([64], [64], 4, 1000) == [Share(range(4), [0])]
    # Five equal items on four ranks: one rank would have two of them.
    assert max(measure(divide_pool([8] * 5, [8] * 5, 4, 100), [8] * 5, 4)) == 10
