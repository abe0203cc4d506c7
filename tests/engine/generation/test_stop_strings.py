"""Answers end at stop strings as if they were decoded after every token and searched."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.engine.generation import decode_batch, decode_memory
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import make_unsharded_model
from realrl.huggingface import model_files
from realrl.layout.kv_blocks import count_steps_per_look
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings
from tests.conftest import World


def pieces_with_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 2's kind: blanks are part of tokens, unknown characters are bytes."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁a", "b", "ab", "▁ba", "\n", "é", "Qu", "▁Question", ":"]
    vocabulary = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def search(tokenizer: Any, tokens: list[int], stop: list[str], least: int = 0) -> tuple[int, str] | None:
    """After how many tokens an answer ends, and its text: decoded after every token."""
    texts = [tokenizer.decode(tokens[:end], skip_special_tokens=True) for end in range(len(tokens) + 1)]
    texts = [text.rstrip("\ufffd") for text in texts]
    for end in range(least + 1, len(tokens) + 1):
        # A stop string within the tokens that must be there is text like any other.
        places = []
        for text in stop:
            start = texts[end].find(text)
            while start >= 0 and start + len(text) <= len(texts[end - 1]):
                start = texts[end].find(text, start + 1)
            places += [start] * (start >= 0)
        if places:
            return end, texts[end][: min(places)]
    return None


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_an_answer_ends_after_the_token_that_completes_a_stop_string(world: World, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer) if kind == "bytes" else pieces_with_bytes()
    draw = random.Random(0)
    phrases = ["a é日本 b", "Question: 🙂\n\n", "ab ab", "日本語🙂", "a\nb"]
    found = across = 0
    for _ in range(300):
        text = "".join(draw.choice(phrases) for _ in range(5))
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        # Bytes that are no character, special tokens, and ids that the model has and the tokenizer has not.
        for other in (draw.randrange(len(tokenizer)), tokenizer.eos_token_id, len(tokenizer) + 3):
            tokens.insert(draw.randrange(len(tokens)), other)
        starts = [draw.randrange(len(text) - 1) for _ in range(2)]
        stop = [text[start : start + draw.randint(1, 7)] for start in starts]
        least = draw.choice([0, 0, 7])
        strings = StopStrings(tokenizer, GenerationConfig(stop=tuple(stop), min_new_tokens=least))
        expected = search(tokenizer, tokens, stop, least)
        for turn in (1, 3, 16, len(tokens)):
            looked, end = 0, None
            while end is None and looked < len(tokens):
                end = strings.find_end(tokens[: looked + turn], looked)
                looked += turn
            assert end == (expected and expected[0])
        if expected is not None:
            end, shown = expected
            assert strings.cut(tokens[:end]) == shown
            found += 1
            across += tokenizer.decode(tokens[end - 1 : end]).find(stop[0]) < 0
    assert found > 150
    assert across > 50


@pytest.mark.parametrize("steps", [1, 16])
@pytest.mark.parametrize("kv_capacity", [40, 100_000])
@pytest.mark.parametrize("least", [0, 9])
def test_generated_answers_are_those_without_stop_strings_cut_off(
    world: World, monkeypatch: pytest.MonkeyPatch, steps: int, kv_capacity: int, least: int
) -> None:
    for module in (decode_batch, decode_memory):
        monkeypatch.setattr(module, "count_steps_per_look", lambda cpu: steps)
    assert count_steps_per_look(cpu=False) == 16
    tokenizer = AutoTokenizer.from_pretrained(world.actor)
    shape = model_files.read_shape(world.actor)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    model_files.load(world.actor, shape, model.layout.specs, model.parameters)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 320, (1 + i * 7 % 20,), generator=generator) for i in range(24)]
    prompts = Batch(tuple(range(24)), {"prompts": Ragged.of(rows)})
    settings = {"max_new_tokens": 30, "min_new_tokens": least}
    run = partial(
        generate, model, prompts, "prompts", stop_token_ids=(tokenizer.eos_token_id,),
        seed=SamplingSeed(1, 2), kv_capacity=kv_capacity,
    )  # fmt: skip
    whole = run(sampling=GenerationConfig(**settings))
    stop = ["e", "th", "\n"]
    sampling = GenerationConfig(**settings, stop=tuple(stop))
    got = run(sampling=sampling, stop=StopStrings(tokenizer, sampling))
    ended = 0
    for i, length in enumerate(prompts["prompts"].lengths):
        tokens = whole["sequences"].row(i).tolist()[length:]
        expected = search(tokenizer, tokens, stop, least)
        end = len(tokens) if expected is None else expected[0]
        assert got["sequences"].row(i).tolist()[length:] == tokens[:end]
        torch.testing.assert_close(got["logprobs"].row(i), whole["logprobs"].row(i)[: length + end])
        assert got["finished"].row(i).item() == (expected is not None or whole["finished"].row(i).item())
        ended += expected is not None
    assert ended > 8


def answers(model: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    prompts = [f"--prompt={text}" for text in ("the film is", "a", "story", "who")]
    command = ["generate", model, *prompts, "--max-new-tokens=24", "--n=3", "--out", str(out), *arguments]
    assert run_app(command) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_generate_leaves_the_stop_string_out_of_the_text_and_keeps_its_tokens(
    world: World, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.actor)
    plain = answers(world.actor, tmp_path / "plain.jsonl")
    rows = answers(world.actor, tmp_path / "out.jsonl", "--stop", "e", "--stop", "th")
    ended = 0
    for row, before in zip(rows, plain, strict=True):
        expected = search(tokenizer, before["tokens"], ["e", "th"])
        if expected is None:
            assert row == before
            continue
        end, text = expected
        assert (row["tokens"], row["completion"]) == (before["tokens"][:end], text)
        assert row["finished"] is True
        ended += 1
    assert ended > 3


@pytest.mark.parametrize("strategy", ["tp: 2", "tp: 1, pp: 2"])
def test_ranks_stop_at_the_same_tokens_as_one_process(world: World, tmp_path: Path, strategy: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"cluster: 1x2\ncalls:\n  actor.generate: {{mesh: 0-1, dp: 1, {strategy}}}\n")
    stop = ["--stop", "e", "--stop", "th"]
    alone = answers(world.actor, tmp_path / "alone.jsonl", *stop)
    ranks = ["--cluster", "1x2", "--plan", str(plan)]
    assert answers(world.actor, tmp_path / "ranks.jsonl", *stop, *ranks) == alone


def test_ignore_eos_goes_on_to_the_last_token(world: World, tmp_path: Path) -> None:
    before = answers(world.actor, tmp_path / "plain.jsonl")
    rows = answers(world.actor, tmp_path / "out.jsonl", "--ignore-eos")
    assert any(row["finished"] for row in before)
    for row, plain in zip(rows, before, strict=True):
        assert len(row["tokens"]) == 24
        assert not row["finished"]
        assert row["tokens"][: len(plain["tokens"])] == plain["tokens"]


def test_rewards_score_the_text_before_a_stop_string_and_training_keeps_the_tokens(
    world: World, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import json\n"
        "def score(completions, completion_ids):\n"
        f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a') as file:\n"
        "        file.writelines(json.dumps(pair) + '\\n' for pair in zip(completions, completion_ids))\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    recipe = world.recipe("grpo", tmp_path, reward=f"{reward}:score", generation__stop=["e"])
    assert run_app(["train", str(recipe), "models.reward=null", "training.steps=1", "policy.samples=2"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(world.actor)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    stopped = 0
    for text, tokens in seen:
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        assert text == whole.split("e")[0]
        stopped += "e" in whole
    assert 0 < stopped < len(seen)


def test_an_empty_stop_string_and_contradicting_ends_are_refused(world: World, tmp_path: Path) -> None:
    from realrl.recipe.load import load_experiment

    recipe = str(world.recipe("grpo", tmp_path))
    with pytest.raises(UserError, match=r"generation\.stop"):
        load_experiment(recipe, ["generation.stop=['']"])
    with pytest.raises(UserError, match="contradict each other"):
        load_experiment(recipe, ["generation={ignore_eos: true, stop_token_ids: [2]}"])
    assert load_experiment(recipe, [r'generation.stop="\n\n"']).model_dump()["generation"]["stop"] == (
        "\n\n",
    )
