"""What the sampler computes step by step is what the trainer computes at once."""

from array import array
from collections.abc import Callable

import pytest
import torch
from small_models import pack, random_rows

from realrl.engine.generation.prefill import PrefillPass
from realrl.engine.generation.scheduler import DecodeRow, Prompt, RowPrefill
from realrl.families.shape import ModelShape
from realrl.layout.kv_blocks import BLOCK_TOKENS, CacheSize
from realrl.model.group import make_single_rank_group
from realrl.model.kv_cache import PagedCache
from realrl.model.packing import Packing
from realrl.model.paged_attention import CachedRows, CachePlaces
from realrl.model.prefill import EvenShare, Prefill

BLOCKS = 3
ALONE = make_single_rank_group()
"""Blocks of each segment; segment s has blocks 1 + BLOCKS * s and following."""


def forward_logits(model, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    tokens, lengths = pack(rows)
    return list(model.compute_logits(model(tokens, Packing.of(lengths, "cpu"))).split(lengths))


def table(segment: int) -> list[int]:
    return [1 + BLOCKS * segment + i for i in range(BLOCKS)]


def prefilled(model, prompts: list[torch.Tensor], of_row: list[int]) -> tuple[PagedCache, CachedRows]:
    """A cache with all but the last token of prompts, for rows that continue them."""
    shape = model.shape
    cache = PagedCache(
        CacheSize(BLOCKS * (len(prompts) + len(of_row)), len(of_row)),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tokens, lengths = pack([prompt[:-1] for prompt in prompts])
    positions = torch.cat([torch.arange(n) + BLOCK_TOKENS * table(i)[0] for i, n in enumerate(lengths)])
    places = CachePlaces(positions // BLOCK_TOKENS, positions % BLOCK_TOKENS)
    packing = Packing.of(lengths, "cpu")
    assert (
        model.prefill(tokens, Prefill(packing.positions, places, packing, [], EvenShare(0, ALONE)), cache)
        is None
    )
    starts = [of_row.index(i) for i in range(len(prompts))]
    rows = CachedRows(
        prompt_tables=torch.tensor([table(i) for i in of_row]),
        prompt_lengths=torch.tensor([lengths[i] for i in of_row]),
        own_tables=torch.tensor([table(len(prompts) + i) for i in range(len(of_row))]),
        own_lengths=torch.zeros(len(of_row), dtype=torch.int64),
        prompt_starts=torch.tensor([*starts, len(of_row)]),
        most=max(map(of_row.count, of_row)),
    )
    return cache, rows


@torch.no_grad()
@pytest.mark.parametrize("of_row", [[0, 1, 2, 3], [0, 0, 1, 2, 2, 2, 3]], ids=str)
def test_prefill_and_decode_give_the_logits_of_one_forward_pass(
    of_row: list[int], shape: ModelShape, twins: Callable
) -> None:
    model, _, _ = twins(shape, "lm")
    prompts = random_rows(shape.vocab_size, [4, 11, 2, 18])
    continuations = random_rows(shape.vocab_size, [20] * len(of_row))
    rows = [torch.cat([prompts[i], more]) for i, more in zip(of_row, continuations, strict=True)]
    expected = forward_logits(model, rows)
    cache, cached = prefilled(model, prompts, of_row)
    weights = model.prepare_decoding()
    for step in range(21):
        last = [row[len(prompts[i]) - 1 + step] for i, row in zip(of_row, rows, strict=True)]
        logits = model.compute_logits(model.decode(torch.stack(last), weights, cache, cached), weights)
        cached.own_lengths.add_(1)
        for i, prompt in enumerate(of_row):
            position = len(prompts[prompt]) - 1 + step
            torch.testing.assert_close(logits[i], expected[i][position], atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 5, 40])
def test_parts_of_sequences_follow_what_the_cache_holds(
    length: int, shape: ModelShape, twins: Callable
) -> None:
    model, _, _ = twins(shape, "lm")
    prompts = random_rows(shape.vocab_size, [4, 19])
    given = random_rows(shape.vocab_size, [length, length + 3])
    rows = [torch.cat(both) for both in zip(prompts, given, strict=True)]
    expected = forward_logits(model, rows)
    cache, cached = prefilled(model, prompts, [0, 1])
    parts = []
    for i, (prompt, tokens) in enumerate(zip(prompts, given, strict=True)):
        row = DecodeRow(i, Prompt(i, array("q", prompt.tolist()), table(i)))
        row.tokens, row.blocks = array("q", tokens.tolist()), table(2 + i)
        parts.append(RowPrefill(row, len(prompt) - 1, len(rows[i]) - 1))
    part = PrefillPass.of(parts, torch.device("cpu"), run_rows=3, group=ALONE)
    model.prefill(part.tokens, part.prefill, cache)
    cached.own_lengths.copy_(torch.tensor([len(tokens) for tokens in given]))
    newest = torch.stack([row[-1] for row in rows])
    weights = model.prepare_decoding()
    logits = model.compute_logits(model.decode(newest, weights, cache, cached), weights)
    for found, row in zip(logits, expected, strict=True):
        torch.testing.assert_close(found, row[-1], atol=2e-5, rtol=1e-5)
