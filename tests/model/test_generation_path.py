"""What the sampler computes step by step is what the trainer computes at once."""

from collections.abc import Callable

import pytest
import torch
from small_models import pack, random_rows

from realrl.families.shape import ModelShape
from realrl.model.cache import KVCache
from realrl.model.packing import Packing
from realrl.model.shared_prefix_cache import SharedPrefixCache


def forward_logits(model, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    tokens, lengths = pack(rows)
    return list(model.compute_logits(model(tokens, Packing.of(lengths, "cpu"))).split(lengths))


def prefilled(model, prompts: list[torch.Tensor], room: int) -> tuple[KVCache, torch.Tensor]:
    tokens, lengths = pack(prompts)
    shape = model.shape
    cache = KVCache(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rows=len(prompts),
        max_tokens=room,
        dtype=torch.float32,
        device="cpu",
    )
    hidden = model.prefill(tokens, Packing.of(lengths, "cpu"), cache)
    return cache, hidden


@torch.no_grad()
def test_prefill_and_decode_give_the_logits_of_one_forward_pass(shape: ModelShape, twins: Callable) -> None:
    model, _, _ = twins(shape, "lm")
    rows = random_rows(shape.vocab_size, [14, 21, 10, 9])
    prompts = [4, 11, 1, 8]
    expected = forward_logits(model, rows)
    cache, hidden = prefilled(model, [row[:n] for row, n in zip(rows, prompts, strict=True)], room=40)
    last = torch.tensor(prompts).cumsum(0) - 1
    logits = [model.compute_logits(hidden[last])]
    for step in range(6):
        tokens = torch.stack([row[min(n + step, len(row) - 1)] for row, n in zip(rows, prompts, strict=True)])
        logits.append(model.compute_logits(model.decode(tokens, cache)))
    for i, (row, n) in enumerate(zip(rows, prompts, strict=True)):
        for step in range(min(7, len(row) - n + 1)):
            torch.testing.assert_close(logits[step][i], expected[i][n - 1 + step], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kept", [[0, 2], [3, 1], [2], [1, 2, 3, 0]], ids=str)
def test_cached_rows_continue_unchanged_after_others_are_dropped(
    kept: list[int], shape: ModelShape, twins: Callable
) -> None:
    model, _, _ = twins(shape, "lm")
    prompts = random_rows(shape.vocab_size, [3, 9, 5, 7])
    cache, _ = prefilled(model, prompts, room=12)
    model.decode(torch.tensor([1, 2, 3, 4]), cache)
    cache.keep(torch.tensor(kept))
    hidden = model.decode(torch.tensor([5] * len(kept)), cache)
    assert cache.lengths.tolist() == [len(prompts[i]) + 2 for i in kept]
    for row, i in zip(hidden, kept, strict=True):
        whole = torch.cat((prompts[i], torch.tensor([i + 1, 5])))
        expected = model(whole, Packing.of([len(whole)], "cpu"))[-1]
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_prefill_equals_forward(shape: ModelShape, twins: Callable) -> None:
    model, _, _ = twins(shape, "lm")
    prompts = random_rows(shape.vocab_size, [3, 9, 5])
    _, hidden = prefilled(model, prompts, room=9)
    tokens, lengths = pack(prompts)
    assert torch.equal(hidden, model(tokens, Packing.of(lengths, "cpu")))


@torch.no_grad()
@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4], [4, 0], [3, 1, 2], [2]], ids=str)
def test_rows_that_share_prompts_continue_unchanged_after_others_are_dropped(
    kept: list[int], shape: ModelShape, twins: Callable
) -> None:
    model, _, _ = twins(shape, "lm")
    prompts, of_row = random_rows(shape.vocab_size, [3, 9, 5]), (0, 1, 1, 2, 1)
    cache = SharedPrefixCache(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        prompt_of_row=of_row,
        max_prompt=9,
        max_new_tokens=2,
        dtype=torch.float32,
        device="cpu",
    )
    tokens, lengths = pack(prompts)
    model.prefill(tokens, Packing.of(lengths, "cpu"), cache)
    model.decode(torch.tensor([1, 2, 3, 4, 5]), cache)
    cache.keep(torch.tensor(kept))
    hidden = model.decode(torch.tensor([6] * len(kept)), cache)
    assert cache.lengths.tolist() == [lengths[of_row[i]] + 2 for i in kept]
    for row, i in zip(hidden, kept, strict=True):
        whole = torch.cat((prompts[of_row[i]], torch.tensor([i + 1, 6])))
        expected = model(whole, Packing.of([len(whole)], "cpu"))[-1]
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)
