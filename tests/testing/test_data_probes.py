"""The records of a recipe are searched for special tokens, cut answers, and records that teach nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from realrl.recipe.load import load_experiment
from realrl.testing import make_up_records
from realrl.testing.data_probes import probe_data, take_records
from tests.conftest import DATA, FORMS, World, write_jsonl

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
PROMPTING = TEMPLATE + "{% if add_generation_prompt %}assistant: {% endif %}"
ASKED = [{"prompt": [{"role": "user", "content": "how is the film"}]}]


def probe(
    world: World, directory: Path, algorithm: str, records: Sequence[Mapping[str, Any]], **changes: Any
) -> tuple[list[str], list[str]]:
    """Problems and notes about the records."""
    source = write_jsonl(directory / "records.jsonl", records)
    experiment = load_experiment(str(world.recipe(algorithm, directory, data__train=source, **changes)))
    findings = probe_data(experiment, take_records(experiment)).findings
    problems = [finding.problem for finding in findings if finding.problem is not None]
    return problems, [note for finding in findings for note in finding.notes]


def answer(text: str, prompt: str = "the film") -> dict[str, str]:
    return {"prompt": prompt, "answer": text}


@pytest.mark.parametrize(
    ("algorithm", "records", "changes", "message"),
    [
        pytest.param(
            "sft", [answer(" is good", "<s><s>the film")], {}, "have <s> twice in a row", id="begin"
        ),
        pytest.param("ppo", [{"prompt": "the film</s>"}], {}, "end the prompt with </s>", id="ended prompt"),
        pytest.param(
            "sft", [answer(" is good</s> bad")], {}, "continue after </s>", id="end inside an answer"
        ),
        pytest.param("sft", [answer(" is good<pad><pad>")], {}, "have the padding token <pad>", id="padding"),
        pytest.param(
            "ppo",
            ASKED,
            {"data__chat_template": TEMPLATE},
            "end the prompt with </s>",
            id="no generation prompt",
        ),
        pytest.param(
            "ppo",
            ASKED,
            {"data__chat_template": PROMPTING, "generation__stop_token_ids": [0]},
            "the chat template ends a turn with </s>",
            id="a turn that does not end",
        ),
        pytest.param(
            "sft",
            [answer(" is good" * 20)],
            {"data__max_tokens": 12, "data__on_too_long": "keep_start"},
            "never learns to stop",
            id="cut answers",
        ),
        pytest.param(
            "sft", [answer(" is good" * 50)], {"data__max_tokens": 12}, "1 are too long", id="too long"
        ),
        pytest.param(
            "kto",
            [{"prompt": "the film", "completion": f" is good {i}", "label": True} for i in range(4)],
            {},
            "all 4 labels are good",
            id="one label",
        ),
    ],
)
def test_traps_are_problems(
    algorithm: str,
    records: list[dict[str, Any]],
    changes: dict[str, Any],
    message: str,
    world: World,
    tmp_path: Path,
) -> None:
    # One more record can be used in any case.
    usable = [answer(" is short")] if message == "1 are too long" else []
    problems, _ = probe(world, tmp_path, algorithm, [*records, *usable], **changes)
    assert len(problems) == 1 and message in problems[0]


@pytest.mark.parametrize(
    ("algorithm", "records", "changes", "message"),
    [
        pytest.param(
            "sft",
            [answer(" is good" * 20), answer(" is")],
            {"data__max_tokens": 12, "data__on_too_long": "keep_start"},
            "1 of 2 items have an answer that is cut off before its end token",
            id="cut answers",
        ),
        pytest.param(
            "dpo",
            [
                {"prompt": "the film", "chosen": " is so" * 10 + " good", "rejected": " is so" * 10 + " bad"},
                {"prompt": "the film", "chosen": " good", "rejected": " bad"},
            ],
            {"data__max_tokens": 12, "data__on_too_long": "keep_start"},
            "1 pairs have equal answers once they are cut",
            id="pairs",
        ),
        pytest.param(
            "ranked_reward",
            [{"prompt": "", "answers": ["the film is good", "it is good", "the film is good"]}] * 2,
            {"loss__answers": 3},
            "2 of 2 items rank two equal answers",
            id="ranked answers",
        ),
        pytest.param("sft", [answer("")], {}, "nothing but its end token", id="empty answer"),
        pytest.param("sft", [answer(" is <s> good")], {}, "have <s> inside", id="begin inside"),
    ],
)
def test_what_may_be_meant_is_a_note(
    algorithm: str,
    records: list[dict[str, Any]],
    changes: dict[str, Any],
    message: str,
    world: World,
    tmp_path: Path,
) -> None:
    problems, notes = probe(world, tmp_path, algorithm, records, **changes)
    assert not problems
    assert any(message in note for note in notes)


@pytest.mark.parametrize("form", DATA)
def test_right_records_have_no_findings(form: str, world: World, tmp_path: Path) -> None:
    algorithm = next((name for name, data in FORMS.items() if data == DATA[form]), "ppo")
    changes = {"loss__answers": 3} if form == "ranked" else {}
    assert probe(world, tmp_path, algorithm, make_up_records(form), **changes) == ([], [])


def test_sources_are_read_in_turn(world: World, tmp_path: Path) -> None:
    sources = [
        write_jsonl(tmp_path / f"{i}.jsonl", [answer(f" {i} {k}") for k in range(3)]) for i in range(2)
    ]
    experiment = load_experiment(str(world.recipe("sft", tmp_path, data__train=sources)))
    assert [record["answer"] for _, record in take_records(experiment, 4)] == [" 0 0", " 1 0", " 0 1", " 1 1"]
