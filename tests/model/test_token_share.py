"""The tokens of ranks that divide packed sequences, and attention from some tokens to all that they see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.model.attention import attend_to_spans, varlen_attention
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.group import Group
from realrl.model.packing import Packing, TokenShare, count_own_tokens

LENGTHS = [1, 17, 150, 16, 48, 49, 2, 700]
RULES = {
    "plain": CAUSAL,
    "window": AttentionRule(window=33),
    "all": AttentionRule(window=290, cap=1.5, sinks=torch.linspace(3.0, -1.0, 4)),
}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(2, 5))
def test_ranks_divide_all_tokens_and_predictions_among_themselves(lengths: list[int], ranks: int) -> None:
    packing = Packing.of(lengths, "cpu")
    total = len(packing.positions)
    shares = [TokenShare(lengths, "cpu", Group(tuple(range(ranks)), index)) for index in range(ranks)]
    assert {share.count for share in shares} == {count_own_tokens(total, ranks)}
    assert all(torch.equal(share.gathered, torch.cat([s.places for s in shares])) for share in shares)
    assert torch.equal(shares[0].gathered[shares[0].order], torch.arange(ranks * shares[0].count))
    numbers = torch.arange(total)
    real = torch.cat([share.places[share.real] for share in shares])
    assert torch.equal(real.sort().values, numbers)
    assert torch.equal(torch.cat([share.targets for share in shares]).sort().values, packing.target_indices)
    for share in shares:
        own = share.places[share.real]
        assert torch.equal(share.select(numbers, padding=-1)[share.real], own)
        assert torch.equal(share.positions[share.real], packing.positions[own])
        assert torch.equal(share.rows[share.real], packing.rows[own])
        assert (share.rows[share.places >= total] == len(lengths)).all()
        assert torch.equal(share.places[share.predicting] + 1, share.targets)
        for number, piece in enumerate(share.pieces):
            places = share.places[number * share.piece_tokens :][: share.piece_tokens]
            assert (
                sum(piece.spans.queries) == len(places)
                and sum(piece.spans.keys) == piece.stop - piece.first_key
            )
            assert torch.equal(places, torch.arange(piece.stop - len(places), piece.stop))


def test_two_pieces_balance_the_attention_of_one_long_sequence() -> None:
    """Rank by rank, the numbers of keys that queries see add up to nearly the same."""
    for ranks in (2, 4, 8):
        seen = [
            int((share.positions + 1).sum())
            for share in (
                TokenShare([1600], "cpu", Group(tuple(range(ranks)), index)) for index in range(ranks)
            )
        ]
        assert max(seen) == min(seen)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 24), (4, 4, 7)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_attend_and_have_gradients_as_whole_sequences(
    ranks: int, heads: int, kv_heads: int, dim: int, rule: AttentionRule
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), (heads + 2 * kv_heads) * dim)
    upstream = torch.randn(len(qkv), heads * dim)
    whole = qkv.clone().requires_grad_()
    out = varlen_attention(whole, Packing.of(LENGTHS, "cpu"), heads, kv_heads, rule)
    out.backward(upstream)

    parts = qkv.clone().requires_grad_()
    found = torch.zeros_like(out)
    for index in range(ranks):
        share = TokenShare(LENGTHS, "cpu", Group(tuple(range(ranks)), index))
        missing = sum(share.padded_lengths) - len(qkv)
        padded = torch.nn.functional.pad(parts, (0, 0, 0, missing))
        q, kv = padded.split((heads * dim, 2 * kv_heads * dim), 1)
        for piece, places in zip(share.pieces, share.places.split(share.piece_tokens), strict=True):
            keys = kv[piece.first_key : piece.stop]
            attended = attend_to_spans(q[places], keys, piece.spans, heads, kv_heads, rule)
            real = places < len(qkv)
            found = found.index_copy(0, places[real], attended[real])
    found.backward(upstream)
    torch.testing.assert_close(found, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-4, atol=1e-5)
