"""Environments are probed without a model: answers that differ, failures, room for turns, and what is learnt."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.recipe.load import load_experiment
from realrl.testing.data_probes import open_environment, probe_data, take_records
from realrl.testing.environment_probes import ProbedEnvironment, probe_environment
from tests.conftest import World, write_jsonl
from tests.environments.test_turn_template import TEMPLATES

STEPS = """
import itertools
import random

COUNT = itertools.count()


class Game:
    def reset(self, level, seed=0):
        {reset}
        self.turns = 0
        return f" level {level}"

    def step(self, text):
        self.turns += 1
        {step}
        return f"turn {self.turns}", 0.5, self.turns == 5
"""
TOOLS = """
class Shop:
    def reset(self, level):
        self.reward = 1.0

    def buy(self, name: str, count: int, quick: bool = False) -> str:
        '''Buys something.

        Args:
            name: What to buy.
            count: How many.
            quick: Whether it is urgent.
        '''
        return {"bought": [name] * count}

    def leave(self) -> None:
        '''Leaves the shop.'''
        raise ValueError("locked")
"""
SHOWS = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
CALLS = "{% for call in m.tool_calls or [] %}<tool_call>" + CALL + "</tool_call>{% endfor %}"
NUMBERED = "{% if m.role == 'user' %}{{ loop.index }} {% endif %}{{ m.role }}"
OPEN = "{% if add_generation_prompt %}assistant: {% endif %}"
MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "</s>{% endfor %}"
TEMPLATE = SHOWS + MESSAGES + OPEN


def probe(world: World, directory: Path, code: str, **changes: Any) -> ProbedEnvironment:
    """Probe an environment with six records of levels 0 to 5."""
    (directory / "game.py").write_text(code)
    records = [{"prompt": "the film", "level": level} for level in range(6)]
    name = "Shop" if "class Shop" in code else "Game"
    settings = {
        "data__train": write_jsonl(directory / "records.jsonl", records),
        "data__chat_template": TEMPLATE,
        "generation__max_new_tokens": 400,
        "environment": {"factory": f"{directory / 'game.py'}:{name}", "workers": 1},
        **{name: value for name, value in changes.items() if not name.startswith("environment__")},
    }
    settings |= {name: value for name, value in changes.items() if name.startswith("environment__")}
    file = world.recipe("grpo", directory, **settings)
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    experiment = load_experiment(str(file))
    environments = open_environment(experiment)
    assert environments is not None
    try:
        data = probe_data(experiment, take_records(experiment), environments)
        assert [finding.problem for finding in data.findings] == [None, None]
        return probe_environment(experiment, environments, data)
    finally:
        environments.close()


def write_game(reset: str = "pass", step: str = "pass") -> str:
    return STEPS.replace("{reset}", reset).replace("{step}", step)


def list_problems(found: ProbedEnvironment) -> list[str]:
    return [finding.problem for finding in found.findings if finding.problem is not None]


def list_notes(found: ProbedEnvironment) -> list[str]:
    return [note for finding in found.findings for note in finding.notes]


def test_an_environment_without_mistakes_has_no_findings_but_numbers(world: World, tmp_path: Path) -> None:
    found = probe(world, tmp_path, write_game())
    assert list_problems(found) == [] and list_notes(found) == []
    checks = [finding.check for finding in found.findings]
    assert "environment: step gets the turns, reset gets level, seed" in checks
    assert "environment: the same answers again (6 resets, 3 trajectories)" in checks
    assert "environment: answers to 9 made-up turns" in checks
    learnt = sum(sum(row.loss_mask) for _, (row,) in found.shown)
    total = sum(len(row.ids) for _, (row,) in found.shown)
    assert f"environment: {learnt} of {total} tokens are in turns of the model" in checks


def test_made_up_trajectories_have_the_tokens_of_the_whole_conversation(world: World, tmp_path: Path) -> None:
    from realrl.huggingface.tokenizers import load_tokenizer

    found, tokenizer = probe(world, tmp_path, write_game()), load_tokenizer(world.tokenizer)
    texts = [tokenizer.decode(row.ids) for _, (row,) in found.shown]
    whole = (
        "user: the film level {}</s>assistant: It is so.</s>user: turn 1</s>assistant: 7</s>user: turn 2</s>"
        "assistant: </s>"
    )
    assert texts[0].removeprefix("<s>") == whole.format(0)
    for _, (row,) in found.shown:
        turns = [tokenizer.decode(row.ids[first:stop]) for first, stop in row.answers]
        assert sorted(turns) == ["7</s>", "</s>", "It is so.</s>"]


@pytest.mark.parametrize(
    ("code", "changes", "message"),
    [
        pytest.param(
            write_game("level = random.random()"),
            {},
            "another first observation for 6 of 6",
            id="random reset",
        ),
        pytest.param(
            write_game(step="return str(next(COUNT))"),
            {},
            "has another observation, reward",
            id="random step",
        ),
        pytest.param(
            write_game("assert level < 4"),
            {},
            "2 of 6 fail, first {file}:5: reset raised Assertion",
            id="reset",
        ),
        pytest.param(
            write_game(step="int(text)"), {}, "after the turn 'It is so.' of a trajectory", id="odd turns"
        ),
        pytest.param(
            write_game("level = 'film ' * 900"), {}, "6 of 6 records leave no token for a turn", id="room"
        ),
        pytest.param(write_game(step="return '<s>'"), {}, "has <s> inside a turn", id="begin"),
        pytest.param(
            TOOLS, {"data__chat_template": MESSAGES + OPEN}, "does not write buy, leave", id="hidden tools"
        ),
        pytest.param(
            TOOLS, {"environment__tool_format": "mistral"}, "is not read as this call", id="format of calls"
        ),
        pytest.param(
            write_game(),
            {"data__chat_template": MESSAGES.replace("{{ m.role }}", NUMBERED) + OPEN},
            "has '3 user: turn 2</s>assistant: ', where a whole conversation has '5 user: turn 2</s>assistant: '",
            id="numbered turns",
        ),
        pytest.param(
            write_game(),
            {
                "data__chat_template": MESSAGES.replace(
                    "{{ m.content }}",
                    "{% if messages | length < 5 or loop.index > 2 %}{{ m.content }}{% endif %}",
                )
                + OPEN
            },
            "the chat template writes earlier turns of a trajectory from {file}:1 differently",
            id="forgotten turns",
        ),
    ],
)
def test_mistakes_are_problems(
    world: World, tmp_path: Path, code: str, changes: dict[str, Any], message: str
) -> None:
    problems = list_problems(probe(world, tmp_path, code, **changes))
    message = message.format(file=tmp_path / "records.jsonl")
    assert len(problems) == 1 and message in problems[0], problems


def test_calls_are_made_up_for_each_tool_and_read_by_its_format(world: World, tmp_path: Path) -> None:
    found = probe(world, tmp_path, TOOLS)
    assert list_problems(found) == []
    checks = [finding.check for finding in found.findings]
    assert "environment: 2 tools, reset gets level" in checks
    assert "environment: prompts show buy, leave" in checks
    assert "environment: calls in the format hermes are read" in checks
    # Of nine calls in three trajectories, those of `leave` fail.
    (note,) = list_notes(found)
    failed = sum(text.count('"leave"') for text in decode_shown(world, found))
    assert note.startswith(f"{failed} calls with made-up arguments failed")
    bought = (
        '{"name": "buy", "arguments": {"name": "seven", "count": 7}}</tool_call></s>tool: {"bought": ["seven"'
    )
    assert any(bought in text for text in decode_shown(world, found))


def decode_shown(world: World, found: ProbedEnvironment) -> list[str]:
    from realrl.huggingface.tokenizers import load_tokenizer

    return [load_tokenizer(world.tokenizer).decode(row.ids) for _, (row,) in found.shown]


def test_room_that_is_scarce_and_observations_that_are_cut_are_notes(world: World, tmp_path: Path) -> None:
    code = write_game("level = 'film ' * (30 + level)")
    changes = {"environment__max_observation_tokens": 20, "environment__max_turn_tokens": 30}
    notes = list_notes(probe(world, tmp_path, code, **changes, generation__max_new_tokens=200))
    cut = f"6 of 6 observations at reset, first {tmp_path / 'records.jsonl'}:1: cut at environment."
    assert len(notes) == 1 and notes[0].startswith(cut), notes
    notes = list_notes(probe(world, tmp_path, code, **changes, generation__max_new_tokens=45))
    assert any("6 of 6 records leave less than environment.max_turn_tokens=30" in note for note in notes)
    assert any("3 of 3 made-up trajectories, of at most 3 turns, do not fit" in note for note in notes), notes


def test_failures_that_a_run_leaves_out_are_notes(world: World, tmp_path: Path) -> None:
    found = probe(world, tmp_path, write_game("assert level < 4"), environment__on_error="skip")
    assert list_problems(found) == []
    assert any(note.startswith("2 of 6 fail") for note in list_notes(found))


def test_plain_text_without_a_chat_template_is_probed(world: World, tmp_path: Path) -> None:
    found = probe(world, tmp_path, write_game(), data__chat_template=None)
    assert list_problems(found) == []
    assert decode_shown(world, found)[0] == "<s>the film level 0It is so.</s>turn 17</s>turn 2</s>"


def test_columns_that_reset_needs_and_no_record_has_are_a_problem(world: World, tmp_path: Path) -> None:
    problems = list_problems(probe(world, tmp_path, write_game().replace("level, seed", "size, level, seed")))
    assert len(problems) == 1 and "reset needs 'size', which no record of data.train has" in problems[0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_like_those_of_models_have_no_findings(world: World, tmp_path: Path, template: str) -> None:
    text = TEMPLATES[template].replace("<|im_end|>", "</s>")
    found = probe(world, tmp_path, write_game(), data__chat_template=text)
    assert list_problems(found) == [] and list_notes(found) == []


def test_a_beginning_of_sequence_may_begin_each_turn_as_in_llama_2(world: World, tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    found = probe(world, tmp_path, write_game(), data__chat_template=text)
    assert list_problems(found) == []


def test_a_template_without_ends_of_turns_is_a_note(world: World, tmp_path: Path) -> None:
    text = MESSAGES.replace("</s>", "\n\n") + OPEN
    found = probe(world, tmp_path, write_game(), data__chat_template=text)
    assert list_problems(found) == []
    assert list_notes(found) == [
        "the chat template does not end turns with a token at which generation stops"
    ]
