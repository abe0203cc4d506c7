"""Every family samples greedily what transformers' `generate` gives."""

from collections import Counter
from itertools import chain

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import ModelShape
from realrl.recipe.generation import GenerationConfig
from tests.model.small_models import SHAPES, make_twins, random_rows

PROMPTS, NEW_TOKENS = 32, 16
LENGTHS = [1 + 7 * i % 29 for i in range(PROMPTS)]
CACHE = 200
"""Tokens of the KV cache: about a quarter of what all rows need, so that prompts wait for others to end."""


def make_pair(shape: ModelShape) -> tuple[Model, PreTrainedModel]:
    """Our model and that of transformers, with the same weights."""
    _, buffer, theirs = make_twins(shape, "lm")
    ours = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    for spec in ours.layout.specs:
        ours.parameters[spec.name].copy_(buffer[spec.name])
    return ours, theirs


def sample(model: Model, prompts: list[Tensor], ends: tuple[int, ...]) -> list[list[int]]:
    """Sequences of the engine, which joins and leaves prompts as the cache has room."""
    settings = GenerationConfig(greedy=True, max_new_tokens=NEW_TOKENS)
    batch = Batch(tuple(range(len(prompts))), {"prompts": Ragged.of(prompts)})
    found = generate(
        model,
        batch,
        "prompts",
        sampling=settings,
        stop_token_ids=ends,
        seed=SamplingSeed(1, 1),
        kv_capacity=CACHE,
    )
    return [row.tolist() for row in found["sequences"].rows()]


def sample_theirs(model: PreTrainedModel, prompts: list[Tensor]) -> list[list[int]]:
    """Sequences of transformers, whose prompts are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in prompts]).long()
    found = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [[*prompt.tolist(), *row] for prompt, row in zip(prompts, found[:, width:].tolist(), strict=True)]


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_answers_to_32_prompts_are_those_of_transformers(name: str) -> None:
    ours, theirs = make_pair(SHAPES[name])
    prompts = random_rows(SHAPES[name].vocab_size, LENGTHS)
    expected = sample_theirs(theirs, prompts)
    assert sample(ours, prompts, ()) == expected
    answers = [row[-NEW_TOKENS:] for row in expected]
    assert len({*map(tuple, answers)}) > PROMPTS / 2
    # Tokens that end some answers early, some late and some not at all, and let other prompts in.
    ends = tuple(token for token, _ in Counter(chain(*answers)).most_common(2))
    counts = [next((i + 1 for i, token in enumerate(row) if token in ends), NEW_TOKENS) for row in answers]
    assert 0 < sum(count < NEW_TOKENS for count in counts) < PROMPTS
    cut = [row[: len(row) - NEW_TOKENS + count] for row, count in zip(expected, counts, strict=True)]
    assert sample(ours, prompts, ends) == cut
