"""Common beginnings of rows: found by their tokens, and kept together in micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.data.balance import join_neighbours
from realrl.data.batch import Batch, Ragged
from realrl.data.prefixes import Prefix, count_common_tokens, find_joined, find_prefixes, select_prefixes
from realrl.engine.host_items import HostItems
from realrl.engine.micro_batches import split_items


def find(*rows: str) -> list[tuple[int, int, int]]:
    """First row, number of rows and number of tokens of each common beginning."""
    texts = Ragged.of([torch.tensor([ord(letter) for letter in row]) for row in rows])
    found = find_prefixes(texts.lengths, count_common_tokens(texts.rows()))
    return [(of.rows.start, len(of.rows), of.tokens) for of in found]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["abcx", "abcy", "abcz"], [(0, 3, 3)]),
        (["abcx"], []),
        (["ax", "by"], []),
        # Prompts that begin with the same template are not joined.
        (["<s>abcdefx", "<s>abcdefy", "<s>ghijklx", "<s>ghijkly"], [(0, 2, 9), (2, 2, 9)]),
        # A single sample between two groups has only the template in common with them.
        (["<>abcdefx", "<>abcdefy", "<>longer text", "<>ghijklx", "<>ghijkly"], [(0, 2, 8), (3, 2, 8)]),
        # Every row keeps a token of its own, also if one row is the beginning of another, or equal to it.
        (["abcd", "abcdefgh"], [(0, 2, 3)]),
        (["abcd", "abcd"], [(0, 2, 3)]),
        # One more row is worth a shorter beginning.
        (["abcdef1", "abcdef2", "abcdeX3"], [(0, 3, 5)]),
        # It does not pay.
        (["a" + "b" * 40, "a" + "c" * 40], []),
    ],
)
def test_common_beginnings(rows: list[str], expected: list[tuple[int, int, int]]) -> None:
    assert find(*rows) == expected


@given(st.lists(st.text("ab", min_size=1, max_size=12), max_size=12))
def test_common_beginnings_are_common_and_apart(rows: list[str]) -> None:
    end = 0
    for start, count, tokens in find(*rows):
        assert start >= end and count > 1 and tokens > 0
        end = start + count
        members = rows[start:end]
        assert len({row[:tokens] for row in members}) == 1 and min(map(len, members)) > tokens


def test_a_selection_of_rows_keeps_what_two_of_them_have_in_common() -> None:
    prefixes = [Prefix(range(1, 4), 5), Prefix(range(4, 6), 7), Prefix(range(8, 12), 2)]
    assert select_prefixes(prefixes, [1, 3, 4, 8, 9, 11]) == [Prefix(range(2), 5), Prefix(range(3, 6), 2)]
    # Pairs of rows are items; a beginning joins the items that it reaches.
    assert find_joined(prefixes, 6, lambda row: row // 2) == [False, True, False, False, False, True]


def test_neighbours_are_joined_up_to_a_limit() -> None:
    assert join_neighbours([4, 4, 4, 9, 1], [False, True, True, True, True], 8) == [
        range(2),
        range(2, 3),
        range(3, 4),
        range(4, 5),
    ]


@pytest.mark.parametrize("stages", [1, 2])
def test_micro_batches_keep_samples_of_a_prompt_together(stages: int) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 100, (20,), generator=generator) for _ in range(4)]
    rows = Ragged.of(
        [
            torch.cat((prompts[i // 4], torch.randint(0, 100, (5 + 7 * i % 11,), generator=generator)))
            for i in range(16)
        ]
    )
    items = HostItems.of(rows, Batch(tuple(range(16)), {}), ())

    def split(*, shares: bool) -> list[tuple[int, int]]:
        found = split_items(items, max_tokens=130, stages=stages, shares=shares)
        assert sorted(item for part in found for item in part.items) == [*range(16)]
        for part in found:
            assert sum(rows.lengths[item] for item in part.items) <= 130
            assert part.tokens == sum(rows.lengths[i] for i in part.items) - sum(
                p.saved for p in part.prefixes
            )
        return [(len(part.items), part.tokens) for part in found]

    whole = sum(rows.lengths)
    assert sum(tokens for _, tokens in split(shares=False)) == whole
    parts = split(shares=True)
    # A pipeline has at least four micro-batches of about equal size, so it splits some groups.
    assert sum(tokens for _, tokens in parts) == whole - (12 if stages == 1 else 10) * 20
    assert len(parts) >= 2 * stages


def test_ranks_of_a_pool_do_not_divide_samples_whose_prompt_they_would_compute_more_often() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 100, (60,), generator=generator) for _ in range(3)]
    rows = [
        torch.cat((prompts[i // 8], torch.randint(0, 100, (1 + i % 5,), generator=generator)))
        for i in range(24)
    ]
    items = HostItems.of(Ragged.of(rows), Batch(tuple(range(24)), {}), ())
    found = split_items(items, max_tokens=4000, stages=1, shares=True, ranks=4)
    assert all(len(part.ranks) == 1 for part in found)
    # Units have at most the mean number of tokens, so a prompt is computed twice, or once more.
    assert sum(part.tokens for part in found) < sum(map(len, rows)) / 2
    divided = split_items(items, max_tokens=4000, stages=1, shares=False, ranks=4)
    assert sum(part.tokens for part in divided) == sum(map(len, rows))


def test_whole_groups_do_not_leave_micro_batches_half_empty() -> None:
    """Groups of a little more than half a micro-batch: some are halved to fill what others leave."""
    rows = [torch.cat((torch.full((40,), i // 8), torch.full((60,), 1000 + i))) for i in range(8 * 16)]
    items = HostItems.of(Ragged.of(rows), Batch(tuple(range(len(rows))), {}), ())
    found = split_items(items, max_tokens=1500, stages=1, shares=True)
    assert len(found) <= 10  # 12,800 tokens
    assert sum(part.tokens for part in found) < 0.75 * 12800
