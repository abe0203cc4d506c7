"""What `realrl data` says of the records of a recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.cli.data import format_lengths
from tests.conftest import World, write_jsonl


def run(capsys: pytest.CaptureFixture[str], recipe: Path, *arguments: str) -> tuple[int, str, str]:
    status = run_app(["data", str(recipe), *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def recipe(world: World, tmp_path: Path) -> Path:
    return world.recipe("sft", tmp_path)


def test_records_are_counted_measured_and_shown_with_what_is_learnt(recipe, tmp_path, capsys):
    first = write_jsonl(
        tmp_path / "first.jsonl", [{"prompt": "the film", "completion": " is great", "level": 1}]
    )
    second = write_jsonl(tmp_path / "second.jsonl", [{"text": "the cast"}] * 4)
    sources = json.dumps({first: 2, second: 0.5})
    status, out, err = run(capsys, recipe, f"data.train={sources}", "data.batch=2", "--samples", "1")
    assert (status, err) == (0, "")
    words = [line.split() for line in out.splitlines()]
    assert [first, "1", "0", "0", "2", "2"] in words
    assert [second, "4", "0", "0", "0.5", "2"] in words
    assert "an epoch takes 4 items, in 2 steps of data.batch=2" in out
    assert f"{first}:1 (" in out and f"{second}:1 (" in out and f"{second}:2 (" not in out
    assert "<s>the film[[ is great</s>]]" in out and "<s>[[the cast</s>]]" in out
    assert "extra columns: level (1 records)\nno function sees them" in out
    assert {"prompt", "answers", "whole"} <= {line[0] for line in words if line}


BAD = ['{"prompt": "a"}', "nonsense", json.dumps({"text": "the film " * 600})]


def test_records_that_a_run_would_refuse_are_listed_and_the_status_is_2(recipe, tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(['{"text": "the film"}', *BAD]))
    arguments = (f"data.train={file}", "data.batch=1")
    status, out, err = run(capsys, recipe, *arguments)
    assert status == 2 and "Traceback" not in err
    assert [str(file), "1", "2", "1", "1", "1"] in [line.split() for line in out.splitlines()]
    for line, reason in ((2, "no field 'answer'"), (3, "not valid JSON"), (4, "more than data.max_tokens")):
        assert f"skipped {file}:{line}: " in out and reason in out
    assert "data.train has 2 that are malformed, where a run ends; data.on_error=skip leaves them out" in err
    assert "data.train has 1 that is too long, where a run ends; data.on_too_long=skip leaves it out" in err
    assert run(capsys, recipe, *arguments, "data.on_error=skip")[0] == 0
    status, _, err = run(capsys, recipe, *arguments, "data.on_too_long=skip")
    assert status == 2 and "too long" not in err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=gone.jsonl", "gone.jsonl does not exist"),
        ("data.batch=1000", "data.batch=1000 is more than the 80 records"),
        ("data.columns={answer: reply}", "no field 'answer' (fields: prompt, reply)"),
    ],
)
def test_data_that_cannot_be_used_is_one_error_message(recipe, capsys, override, message):
    status, _, err = run(capsys, recipe, override)
    assert status == 2 and message in err and err.startswith("realrl: ") and err.count("\n") == 1


def test_functions_are_listed_with_the_fields_that_they_see(world, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("def score(completions, answer): return [0.0] * len(completions)\n")
    train = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "the film", "answer": {"a": [1]}, "\ud800": 2}] * 2)
    recipe = world.recipe("ppo", tmp_path, reward=f"{tmp_path}/rewards.py:score", data__batch=2)
    text = recipe.read_text().replace("  reward:\n", "  unused:\n")
    lines = [line for line in text.splitlines() if "unused" not in line and str(world.reward) not in line]
    recipe.write_text("\n".join(lines))
    status, out, err = run(capsys, recipe, f"data.train={train}", f"data.eval={train}")
    assert (status, err) == (0, "")
    assert "── data.train " in out and "── data.eval " in out
    assert r"extra columns: answer (2 records), \ud800 (2 records)" in out
    assert "reward.function sees answer\n" in out
    status, _, err = run(capsys, recipe, f"data.train={world.root / 'ppo.jsonl'}")
    assert status == 2 and "needs 'answer', which no record of" in err


@pytest.mark.parametrize("lengths", [[5], [1, 1, 9], [3, *range(20, 47)], [0, 100_000]])
def test_every_length_is_in_the_histogram_once(lengths):
    lines = format_lengths({"prompt": [1], "whole": lengths}).split("\n\n")[1].splitlines()
    assert len(lines) <= 10 and all(line.startswith("whole ") for line in lines)
    assert sum(int(line.split()[-1]) for line in lines) == len(lengths)


GAME = """
class Game:
    def reset(self, level, seed):
        if level == 2:
            raise ValueError("no such level")
        return f" begin {level}"

    def step(self, text):
        return " go on"


class Shop(Game):
    step = None

    def buy(self, name: str, count: int = 1) -> str:
        '''Buys something.

        Args:
            name: What to buy.
            count: How many.
        '''
        return "bought"
"""
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_environment_recipe(world: World, directory: Path, kind: str, **changes: Any) -> Path:
    (directory / "game.py").write_text(GAME)
    records = [{"prompt": "the film", "level": level} for level in (1, 2, 3)]
    settings = {
        "data__train": write_jsonl(directory / "levels.jsonl", records),
        "data__batch": 2,
        "environment": f"{directory / 'game.py'}:{kind}",
        **changes,
    }
    file = world.recipe("grpo", directory, **settings)
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    return file


def test_an_environment_continues_the_prompts_that_are_shown(world, tmp_path, capsys):
    recipe = write_environment_recipe(world, tmp_path, "Game")
    status, out, err = run(capsys, recipe, "--samples", "3")
    assert (status, err) == (0, "")
    assert "<s>the film begin 1\n" in out and "<s>the film begin 3\n" in out
    assert out.count(" more from the environment)") == 2
    assert f"<s>the film\nenvironment={tmp_path / 'game.py'}:Game raised ValueError: no such level" in out
    assert "no tools: step gets each turn of the model" in out and "environment sees level\n" in out
    assert "[[a turn of the model</s>]]what the environment answers[[the next turn</s>]]\n" in out


def test_tools_and_what_the_chat_template_writes_between_turns_are_shown(world, tmp_path, capsys):
    recipe = write_environment_recipe(world, tmp_path, "Shop", data__chat_template=TEMPLATE)
    status, out, err = run(capsys, recipe, "--samples", "1")
    assert (status, err) == (0, "")
    assert "tools:\n  buy(name: string, count?: integer): Buys something.\n" in out
    assert "<buy>user: the film begin 1</s>assistant: \n" in out
    between = "tool: what the environment answers</s>assistant: "
    assert f"[[a turn of the model</s>]]{between}[[the next turn</s>]]\n" in out
