"""LongRoPE's frequencies for long sequences: a run has them for all of its sequences, or for none."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from realrl.cli.app import run_app
from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import make_unsharded_model
from realrl.families.shape import ModelShape, RopeScaling
from realrl.huggingface.tokenizers import load_tokenizer
from realrl.model.packing import Packing
from realrl.recipe.generation import GenerationConfig
from realrl.testing.shrink import save_model
from tests.conftest import World
from tests.model.small_models import SHAPES, make_twins, pack, padded, random_rows

ORIGINAL = 24
SCALING = RopeScaling(
    kind="longrope",
    factor=4.0,
    original_max_position_embeddings=ORIGINAL,
    short_factor=(1.0, 1.1, 1.3, 1.7, 2.0, 2.2),
    long_factor=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
)
SHAPE = SHAPES["phi3"].model_copy(update={"rope_scaling": SCALING, "max_positions": 4 * ORIGINAL})
ALWAYS_LONG = SHAPE.model_copy(
    update={"rope_scaling": SCALING.model_copy(update={"short_factor": SCALING.long_factor})}
)
"""What transformers computes for long sequences, whatever their length."""


def compute_logits(shape: ModelShape, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Our logits of rows in one batch, with the weights that `make_twins` gives to every such shape."""
    ours, _, _ = make_twins(shape, "lm")
    tokens, lengths = pack(rows)
    with torch.no_grad():
        return list(ours.compute_logits(ours(tokens, Packing.of(lengths, "cpu"))).split(lengths))


def sample(shape: ModelShape, rows: list[torch.Tensor], new: int) -> Batch:
    """Our greedy answers, of so many tokens each; fields `sequences` and `logprobs`."""
    _, buffer, _ = make_twins(shape, "lm")
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    for spec in model.layout.specs:
        model.parameters[spec.name].copy_(buffer[spec.name])
    return generate(
        model,
        Batch(tuple(range(len(rows))), {"prompts": Ragged.of(rows)}),
        "prompts",
        sampling=GenerationConfig(greedy=True, max_new_tokens=new),
        stop_token_ids=(),
        seed=SamplingSeed(1, 1),
        kv_capacity=150,
    )


def sample_theirs(model: PreTrainedModel, rows: list[torch.Tensor], new: int) -> list[list[int]]:
    """Greedy answers of transformers, one by one: in a batch it decides by the longest row."""
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return [
        model.generate(row[None], attention_mask=torch.ones_like(row[None]), **options)[0].tolist()
        for row in rows
    ]


@pytest.mark.parametrize("longest", [ORIGINAL, ORIGINAL + 1])
def test_a_sequence_has_the_frequencies_that_transformers_chooses_by_its_length(longest: int) -> None:
    rows = random_rows(SHAPE.vocab_size, [longest, 4 * ORIGINAL if longest > ORIGINAL else 7])
    _, _, theirs = make_twins(SHAPE, "lm")
    with torch.no_grad():
        expected = [theirs(row[None]).logits[0] for row in rows]
    for logits, wanted in zip(compute_logits(SHAPE.for_lengths(longest), rows), expected, strict=True):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    other = compute_logits(SHAPE.for_lengths(2 * ORIGINAL + 1 - longest), rows)
    assert min(float((a - b).abs().max()) for a, b in zip(other, expected, strict=True)) > 0.1


def test_short_sequences_of_a_long_run_are_those_of_a_batch_with_a_long_one() -> None:
    rows = random_rows(SHAPE.vocab_size, [5, ORIGINAL + 9, ORIGINAL, 1])
    _, _, theirs = make_twins(SHAPE, "lm")
    ids, mask = padded(rows)
    with torch.no_grad():
        together = theirs(ids, attention_mask=mask).logits
    for i, logits in enumerate(compute_logits(SHAPE.for_lengths(ORIGINAL + 9), rows)):
        torch.testing.assert_close(logits, together[i, : len(rows[i])], atol=1e-4, rtol=0)


SAMPLED: dict[str, tuple[ModelShape, list[int], int]] = {
    "short, and stay so": (SHAPE, [1, 9, ORIGINAL - 8, 5], 8),
    "long from the first token": (SHAPE, [ORIGINAL + 1, 2 * ORIGINAL, ORIGINAL + 30], 8),
    "short, and become long": (ALWAYS_LONG, [1, ORIGINAL - 3, ORIGINAL, 12, ORIGINAL + 5], 30),
}
"""Prompts, and the model in which transformers has the frequencies that a run has for all of their tokens."""


@pytest.mark.parametrize("case", SAMPLED)
def test_greedy_answers_are_those_of_transformers_with_one_set_of_frequencies(case: str) -> None:
    reference, lengths, new = SAMPLED[case]
    rows = random_rows(SHAPE.vocab_size, lengths)
    _, _, theirs = make_twins(reference, "lm")
    ours = sample(SHAPE.for_lengths(max(lengths) + new), rows, new)
    assert [row.tolist() for row in ours["sequences"].rows()] == sample_theirs(theirs, rows, new)


def test_log_probabilities_of_a_sampler_that_crosses_the_length_are_those_of_the_trainer() -> None:
    rows = random_rows(SHAPE.vocab_size, [1, ORIGINAL - 3, ORIGINAL, 12, ORIGINAL + 5])
    shape = SHAPE.for_lengths(ORIGINAL + 35)
    found = sample(shape, rows, 30)
    sequences = found["sequences"].rows()
    for logits, row, recorded in zip(
        compute_logits(shape, sequences), sequences, found["logprobs"].rows(), strict=True
    ):
        computed = logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        # Rounding, with weights as large as these; other frequencies change them by more than 4.
        torch.testing.assert_close(recorded[-30:], computed[-30:], rtol=0, atol=5e-5)


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelShape], Path]:
    """Saves a model with the tokenizer of the world; weights are the same for every such shape."""

    def save(shape: ModelShape) -> Path:
        directory = tmp_path_factory.mktemp("phi3")
        sizes = shape.model_copy(update={"vocab_size": 320}).model_dump()
        save_model(directory, "lm", load_tokenizer(world.tokenizer), sizes)
        return directory

    return save


PROMPTS = ["the film", "the film is great and the cast is"]


@pytest.mark.parametrize(
    ("new", "reference"),
    [(8, SHAPE), (ORIGINAL - 1, SHAPE), (ORIGINAL, ALWAYS_LONG)],
    ids=["short", "as many as are short", "long"],
)
def test_generate_has_short_frequencies_unless_answers_may_be_long(
    saved: Callable[[ModelShape], Path], tmp_path: Path, new: int, reference: ModelShape
) -> None:
    model, out = saved(SHAPE), tmp_path / "out.jsonl"
    tokenizer = load_tokenizer(str(model))
    # Of an empty prompt the token that begins a sequence remains.
    prompts = [""] if new == ORIGINAL - 1 else PROMPTS
    asked = [part for prompt in prompts for part in ("--prompt", prompt)]
    options = ["--greedy", "--max-new-tokens", str(new), "--min-new-tokens", str(new), "--out", str(out)]
    assert run_app(["generate", str(model), *asked, *options]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(saved(reference))
    for prompt, line in zip(prompts, out.read_text().splitlines(), strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        expected = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=tokenizer.pad_token_id,
        )
        assert json.loads(line)["tokens"] == expected[0, ids.shape[1] :].tolist()


def test_generate_refuses_a_prompt_that_would_need_the_other_frequencies(
    saved: Callable[[ModelShape], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(saved(SHAPE))
    count = len(load_tokenizer(model)(PROMPTS[1])["input_ids"])
    new = ORIGINAL + 1 - count
    assert run_app(["generate", model, "--prompt", PROMPTS[1], "--max-new-tokens", str(new)]) == 2
    error = capsys.readouterr().err
    assert (
        f"has at least {count} tokens, which with max_new_tokens={new} is more than {ORIGINAL} tokens"
        in error
    )
    assert run_app(["generate", model, "--prompt", PROMPTS[1], "--max-new-tokens", str(new - 1)]) == 0
