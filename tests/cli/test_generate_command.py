"""`realrl generate` from a saved model to text."""

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from realrl.cli.app import run_app
from tests.conftest import World

PROMPTS = ["the film is", "the story", ""]


def completions(world: World, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Records written by the command, for PROMPTS given one by one."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command = [
        "generate",
        world.actor,
        "--max-new-tokens",
        "20",
        "--out",
        str(out),
        "--overwrite",
        *prompts,
        *arguments,
    ]
    assert run_app(command) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_seed_gives_the_same_text_and_another_one_other_text(world: World, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    first = completions(world, out, "--seed", "7")
    assert completions(world, out, "--seed", "7") == first
    assert completions(world, out, "--seed", "8") != first
    assert [file.name for file in out.parent.iterdir()] == ["out.jsonl"]


def test_records_hold_prompt_completion_tokens_and_whether_it_ended(world: World, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.actor)
    rows = completions(world, tmp_path / "out.jsonl")
    assert [row["prompt"] for row in rows] == PROMPTS
    for row in rows:
        assert tokenizer.decode(row["tokens"], skip_special_tokens=True) == row["completion"]
        assert row["finished"] == (row["tokens"][-1] == tokenizer.eos_token_id)
        assert row["finished"] or len(row["tokens"]) == 20


def test_several_samples_of_a_prompt_differ_and_greedy_ones_do_not(world: World, tmp_path: Path) -> None:
    rows = completions(world, tmp_path / "out.jsonl", "--n", "2", "--temperature", "1.5")
    assert [row["prompt"] for row in rows] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert rows[0]["completion"] != rows[1]["completion"]
    rows = completions(world, tmp_path / "out.jsonl", "--n", "2", "--greedy")
    assert rows[0::2] == rows[1::2]


def test_prompts_of_a_file_are_continued_like_those_given_one_by_one(world: World, tmp_path: Path) -> None:
    one_by_one = completions(world, tmp_path / "a.jsonl")
    file, out = tmp_path / "prompts.jsonl", tmp_path / "b.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = ["generate", world.actor, "--max-new-tokens", "20", "--prompts", str(file), "--out", str(out)]
    assert run_app(command) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == one_by_one


def test_generated_text_is_printed_without_an_output_file(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = completions(world, tmp_path / "out.jsonl", "--seed", "3")
    command = ["generate", world.actor, "--max-new-tokens", "20", "--seed", "3"]
    assert run_app([*command, *(f"--prompt={prompt}" for prompt in PROMPTS)]) == 0
    printed = capsys.readouterr().out
    assert printed == "".join(f"{row['prompt']}{row['completion']}\n\n" for row in rows)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED = "<|user|>the film</s>\n<|assistant|>"
TURNS = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "is great"}]


@pytest.fixture(scope="module")
def chat_model(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The actor, with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(world.actor, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


def generated(model: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.jsonl"
    assert (
        run_app(["generate", model, "--max-new-tokens", "6", "--out", str(out), "--overwrite", *arguments])
        == 0
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_chat_prompt_is_a_user_turn_and_the_command_says_so(
    chat_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (chat,) = generated(chat_model, tmp_path, "--chat", "--prompt", "the film", "--greedy")
    error = capsys.readouterr().err
    assert "note: prompts of plain text are written with the tokenizer's chat template" in error
    (plain,) = generated(chat_model, tmp_path, "--prompt", ASKED, "--greedy")
    assert "note: prompts are plain text and are used as they stand" in capsys.readouterr().err
    assert chat["prompt"] == "the film" and chat["tokens"] == plain["tokens"]


def test_conversations_are_continued_after_their_last_user_turn(
    chat_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": TURNS[:1]}, {"messages": TURNS}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = generated(chat_model, tmp_path, "--prompts", str(file), "--greedy")
    assert "note:" not in capsys.readouterr().err
    assert [row["prompt"] for row in rows] == [TURNS[:1]] * 2
    (asked,) = generated(chat_model, tmp_path, "--chat", "--prompt", "the film", "--greedy")
    assert [row["tokens"] for row in rows] == [asked["tokens"]] * 2


def test_conversations_are_printed_turn_by_turn(
    chat_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n")
    assert run_app(["generate", chat_model, "--max-new-tokens", "3", "--prompts", str(file)]) == 0
    assert capsys.readouterr().out.startswith("user: the film\n")


@pytest.mark.parametrize(
    ("record", "complaint"),
    [({"question": "a"}, "no field 'prompt'"), ({"messages": TURNS[1:]}, "messages has no user turn")],
)
def test_a_record_without_prompt_is_named(
    chat_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, Any],
    complaint: str,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(record) + "\n")
    assert run_app(["generate", chat_model, "--prompts", str(file)]) == 2
    assert f"prompts.jsonl:1: {complaint}" in capsys.readouterr().err


def test_a_chat_needs_a_template(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["generate", world.actor, "--chat", "--prompt", "a"]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "out", "sentence"),
    [
        ("/nowhere/model", "out.jsonl", "/nowhere/model"),
        (None, "out.jsonl/inside", "out.jsonl/inside cannot be written"),
    ],
)
def test_a_mistake_in_generate_is_one_error_message_and_keeps_an_earlier_file(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str | None,
    out: str,
    sentence: str,
) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    command = ["generate", model or world.actor, "--prompt", "a", "--out", str(tmp_path / out)]
    assert run_app(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("realrl: ") and error.count("\n") == 1 and sentence in error
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_ranks_share_the_samples_of_one_prompt(world: World, tmp_path: Path) -> None:
    command = ["generate", world.actor, "--max-new-tokens", "8", "--prompt", "the film", "--n", "4"]
    for cluster in ("1x1", "1x2"):
        assert run_app([*command, "--cluster", cluster, "--out", str(tmp_path / cluster)]) == 0
    alone, together = ((tmp_path / name).read_text().splitlines() for name in ("1x1", "1x2"))
    assert alone == together and len(alone) == 4


def test_the_other_fields_of_a_record_follow_its_answers(chat_model: str, tmp_path: Path) -> None:
    records = [
        {"id": 7, "prompt": "the film", "answer": {"x": [1, 2]}, "finished": "no"},
        {"messages": TURNS[:1], "id": None},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = generated(chat_model, tmp_path, "--data", str(data), "--n", "2")
    assert [list(row) for row in rows[:2]] == [
        ["prompt", "completion", "tokens", "finished", "id", "answer"]
    ] * 2
    assert [(row["id"], row["answer"]) for row in rows[:2]] == [(7, {"x": [1, 2]})] * 2
    assert isinstance(rows[0]["finished"], bool)


def test_dates_of_a_parquet_file_become_text(world: World, tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    table = pyarrow.table({"prompt": ["the film"], "day": [day], "far": [float("inf")]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    (row,) = generated(world.actor, tmp_path, "--data", str(tmp_path / "data.parquet"))
    assert (row["day"], row["far"]) == ("2026-01-02", None)


def test_an_existing_file_is_replaced_only_when_asked(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    command = ["generate", world.actor, "--prompt", "a", "--max-new-tokens", "2", "--out", str(out)]
    assert run_app(command) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert run_app([*command, "--overwrite"]) == 0
    assert json.loads(out.read_text())["prompt"] == "a"
