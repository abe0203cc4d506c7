"""Models as they lie on the hub: what ends their answers, in every command, and what of them is saved."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from realrl.cli.app import run_app
from realrl.huggingface.directory import read_shape
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.inputs import load_shared_tokenizer, load_stop_token_ids, read_stop_token_ids
from tests.conftest import World, read_metrics

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEIGHTS = {"model.safetensors", "config.json"}
NEW = 24
TURN_END = "<pad>"


@pytest.fixture
def opened(world: World, tmp_path: Path) -> Path:
    """A directory with all that tokenizers of several generations have, and more."""
    path = Path(shutil.copytree(world.actor, tmp_path / "model"))
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in vocabulary["merges"]]
    files: dict[str, Any] = {
        "chat_template.jinja": TEMPLATE,
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        "added_tokens.json": {"<s>": 0, "</s>": 1, "<pad>": 2},
        "vocab.json": vocabulary["vocab"],
        "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n",
        "tokenizer.model": "a file of SentencePiece, which is not read where there is a tokenizer.json\n",
    }
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        (path / name).write_text(text, encoding="utf-8")
    # Written otherwise than by us: another indentation, letters as they are, keys that nobody knows.
    settings = {"_from_model_config": True, "eos_token_id": [1, 106], "author": "Zoë", "top_k": 64}
    (path / "generation_config.json").write_text(json.dumps(settings, indent=4, ensure_ascii=False))
    return path


@pytest.fixture
def turning(opened: Path) -> Path:
    """A model whose template ends turns as Gemma's does, with a token that is not the end of sequence."""
    tokenizer = AutoTokenizer.from_pretrained(opened)
    tokenizer.chat_template = TEMPLATE.replace("</s>\n", f"{TURN_END}\n").replace(
        "{% endif %}", "{% else %}</s>{% endif %}"
    )
    tokenizer.save_pretrained(opened)
    set_ends(opened, [1])
    return opened


def set_ends(path: Path, ends: list[int]) -> None:
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def answer(path: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    command = ["generate", str(path), "--prompt", "the film", "--prompt", "a plot", "--out", str(out)]
    assert run_app([*command, "--max-new-tokens", str(NEW), *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def check_ended(row: dict[str, Any], ends: set[int]) -> None:
    """An answer keeps the token that ends it, and has none before."""
    assert row["finished"] == (row["tokens"][-1] in ends)
    assert not ends & set(row["tokens"][:-1])
    assert row["finished"] or len(row["tokens"]) == NEW


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_files_of_the_hub_are_saved_and_exported_byte_by_byte(
    algorithm: str, world: World, opened: Path, tmp_path: Path
) -> None:
    recipe = world.recipe(
        algorithm,
        tmp_path,
        models__actor={"path": str(opened)},
        training__steps=1,
        checkpoint={"export": True},
    )
    assert run_app(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    assert run_app(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    names = {file.name for file in opened.iterdir()} - WEIGHTS
    assert len(names) == 9
    (exported,) = (run / "checkpoints").glob("step-*/actor")
    for saved in (run / "final", tmp_path / "out" / "actor", exported):
        assert {file.name for file in saved.iterdir()} == names | WEIGHTS
        for name in names:
            assert (saved / name).read_bytes() == (opened / name).read_bytes(), name
        before, after = load_file(opened / "model.safetensors"), load_file(saved / "model.safetensors")
        assert before.keys() == after.keys() and read_shape(saved) == read_shape(opened)


def test_each_of_several_end_tokens_ends_answers_greedy_and_sampled(opened: Path, tmp_path: Path) -> None:
    set_ends(opened, [1, 319])
    free = answer(opened, tmp_path / "free.jsonl", "--greedy")
    assert [len(row["tokens"]) for row in free] == [NEW, NEW]
    # Tokens that greedy answers have somewhere in their middle: each of them ends its own answer there.
    ends = [row["tokens"][NEW // 2] for row in free]
    set_ends(opened, [1, *ends])
    for row, whole in zip(answer(opened, tmp_path / "greedy.jsonl", "--greedy"), free, strict=True):
        place = min(whole["tokens"].index(end) for end in ends if end in whole["tokens"])
        assert row["tokens"] == whole["tokens"][: place + 1] and row["finished"]
    listed = list(range(3, 320, 3))
    set_ends(opened, listed)
    rows = answer(opened, tmp_path / "sampled.jsonl", "--n", "40", "--top-k", "50")
    for row in rows:
        check_ended(row, {1, *listed})
    assert len({row["tokens"][-1] for row in rows if row["finished"]}) > 3


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_answers_end_where_the_template_ends_a_turn(
    algorithm: str, world: World, turning: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question, answers = {"role": "user", "content": "the film"}, {"chosen": "a plot", "rejected": "the end"}
    sides = {key: [question, {"role": "assistant", "content": text}] for key, text in answers.items()}
    record = {"messages": sides["chosen"]} if algorithm == "sft" else sides
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    recipe = world.recipe(
        algorithm,
        tmp_path,
        models__actor={"path": str(turning)},
        data={"train": str(tmp_path / "data.jsonl"), "batch": 1},
        training__steps=1,
    )
    assert run_app(["train", str(recipe)]) == 0
    end = AutoTokenizer.from_pretrained(turning).convert_tokens_to_ids(TURN_END)
    assert f"lacks tokens that end answers here: {end} ({TURN_END})" in capsys.readouterr().err
    assert run_app(["data", str(recipe)]) == 0
    assert f"[[a plot{TURN_END}]]" in capsys.readouterr().out
    ends = read_stop_token_ids(AutoTokenizer.from_pretrained(turning), str(turning), 320)
    assert ends == (1, end)


def test_the_end_of_a_turn_is_that_of_the_recipes_own_template(
    world: World, turning: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(turning)
    written = TEMPLATE.replace("</s>", "{% if marked %}" + TURN_END + "{% endif %}</s>")
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    for marked, expected in ((True, (1, end)), (False, (1,))):
        recipe = world.recipe(
            "sft",
            tmp_path,
            models__actor={"path": str(turning)},
            data__chat_template=written,
            data__chat_template_kwargs={"marked": marked},
        )
        experiment = load_experiment(str(recipe))
        assert load_stop_token_ids(experiment, load_shared_tokenizer(experiment)) == expected


def test_end_tokens_of_a_command_take_the_place_of_the_models_own(
    opened: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_ends(opened, list(range(3, 320)))
    own = {4, 5, 6, 7, *range(30, 60)}
    options = [text for token in own for text in ("--stop-token-id", str(token))]
    rows = answer(opened, tmp_path / "own.jsonl", "--n", "20", *options)
    for row in rows:
        check_ended(row, own)
    assert any(len(row["tokens"]) > 1 for row in rows)  # which the model's own ends would have been
    command = ["generate", str(opened), "--prompt", "the", "--stop-token-id", "320"]
    assert run_app(command) == 2
    expected = "stop_token_ids=320 is outside the model's vocabulary, which ends with 319"
    assert expected in capsys.readouterr().err


def test_end_tokens_of_a_recipe_take_the_place_of_the_models_own(
    world: World, opened: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_ends(opened, list(range(3, 320)))
    changes = {
        "models__actor": {"path": str(opened)},
        "training__steps": 1,
        "generation__max_new_tokens": NEW,
    }
    lengths = []
    for name, own in (("files", None), ("recipe", [2])):
        directory = tmp_path / name
        directory.mkdir()
        recipe = world.recipe("ppo", directory, **changes, generation__stop_token_ids=own)
        assert run_app(["train", str(recipe)]) == 0
        lengths.append(read_metrics(directory / "run")[0]["actor.train/response_tokens"])
        final = directory / "run" / "final"
        assert (final / "generation_config.json").read_bytes() == (
            opened / "generation_config.json"
        ).read_bytes()
    assert lengths[0] < 2 and lengths[1] > NEW / 2
    recipe = world.recipe("ppo", tmp_path, **changes, generation__stop_token_ids=[2, 320])
    assert run_app(["train", str(recipe)]) == 2
    assert "generation.stop_token_ids=320 is outside the model's vocabulary" in capsys.readouterr().err
    recipe = world.recipe("ppo", tmp_path, **changes, generation__stop_token_ids=[])
    assert run_app(["train", str(recipe)]) == 2
    assert "generation.stop_token_ids" in capsys.readouterr().err
