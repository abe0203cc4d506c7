"""Templates that write a turn differently once others follow: sequences are what inference sees."""

from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.data.dataset import Dataset

KEYS = {
    "answer": ("tokens", "loss_mask"),
    "pair": ("chosen", "rejected", "chosen_prompt_length", "rejected_prompt_length"),
    "label": ("tokens", "prompt_length", "label"),
}
SPEAK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
VISIBLE = "{{ m.content.split('</think>')[-1].strip() }}"
TEMPLATES = {
    # Reasoning only in the last turn, and empty reasoning where that has none.
    "drops": "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
    + VISIBLE
    + "{% elif m.role == 'assistant' and '</think>' not in m.content %}<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}</s>\n{% endfor %}" + SPEAK,
    # Another token ends the last turn.
    "ends": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '</s>' if loop.last else '|' }}{% endfor %}"
    + SPEAK,
    # The prompt opens reasoning, and no turn of the history has it.
    "opens": "{% for m in messages %}<|{{ m.role }}|>"
    + VISIBLE
    + "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    # The last turn of the user carries the system message.
    "moves": "{% for m in messages %}{% if m.role == 'user' %}[{{ 'S ' if loop.last }}{{ m.content }}]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
}
CLOSES = (
    TEMPLATES["drops"].removesuffix(SPEAK)
    + "{% if add_generation_prompt %}<|assistant|><think>\n\n</think>\n\n{% endif %}"
)
TURNS = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nsat"},
    {"role": "user", "content": "a dog"},
    {"role": "assistant", "content": "ate"},
]
LEARNT = {
    "drops": ["<think>\nhm\n</think>\n\nsat</s>", "<think>\n\n</think>\n\nate</s>"],
    "ends": ["<think>\nhm\n</think>\n\nsat</s>", "ate</s>"],
    "opens": ["hm\n</think>\n\nsat</s>", "</think>\n\nate</s>"],
    "moves": [" <think>\nhm\n</think>\n\nsat</s>", " ate</s>"],
}


@pytest.fixture
def load(tokenizer, write, settings):
    def load(template: str, form: str, record: Any, **fields: Any) -> Dataset:
        tokenizer.chat_template = CLOSES if template == "closes" else TEMPLATES[template]
        return Dataset.load(write([record]), form, KEYS[form], tokenizer, settings(**fields), 1, (1,))

    return load


def prompt_ids(tokenizer: Any, turns: list[dict[str, str]]) -> list[int]:
    """Tokens that inference starts from."""
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_answer_follows_the_prompt_that_inference_would_see(load, tokenizer, template):
    data = load(template, "answer", {"messages": TURNS})
    assert len(data) == 2
    batch = data.batch([0, 1])
    for i, end in enumerate((1, 3)):
        ids, mask = (batch[key].row(i).tolist() for key in KEYS["answer"])
        prompt = prompt_ids(tokenizer, TURNS[:end])
        stop = len(ids) - mask[::-1].index(1)
        assert ids[: len(prompt)] == prompt and mask[:stop] == [0] * len(prompt) + [1] * (stop - len(prompt))
        assert tokenizer.decode(ids[len(prompt) : stop]) == LEARNT[template][i]
    assert any("1 conversations became 2 sequences" in note for note in data.notes)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_last_answer_alone_is_one_sequence(load, tokenizer, template):
    data = load(template, "answer", {"messages": TURNS}, train_on="last")
    batch = data.batch(range(len(data)))
    assert len(data) == 1 and not any("sequences" in note for note in data.notes)
    learnt = batch["tokens"].row(0)[batch["loss_mask"].row(0).bool()]
    assert tokenizer.decode(learnt) == LEARNT[template][1]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("form", ["pair", "label"])
def test_sides_and_labelled_answers_follow_it_too(load, tokenizer, template, form):
    prompt, other = TURNS[:3], [{"role": "assistant", "content": "ran"}]
    if form == "pair":
        record = {"prompt": prompt, "chosen": TURNS[3:], "rejected": other}
        rows = (("chosen", "chosen_prompt_length"), ("rejected", "rejected_prompt_length"))
    else:
        record = {"prompt": prompt, "completion": TURNS[3:], "label": True}
        rows = (("tokens", "prompt_length"),)
    batch = load(template, form, record).batch([0])
    ids = prompt_ids(tokenizer, prompt)
    learnt = LEARNT[template][1]
    for (key, length), text in zip(rows, (learnt, learnt.replace("ate", "ran")), strict=False):
        assert batch[length].values.tolist() == [len(ids)]
        row = batch[key].row(0).tolist()
        assert row[: len(ids)] == ids and tokenizer.decode(row[len(ids) :]) == text


def test_two_assistant_turns_in_a_row_are_both_learnt(load, tokenizer):
    turns = [*TURNS[:2], {"role": "assistant", "content": "more"}]
    batch = load("drops", "answer", {"messages": turns}).batch([0])
    learnt = batch["tokens"].row(0)[batch["loss_mask"].row(0).bool()]
    assert tokenizer.decode(learnt) == LEARNT["drops"][0] + "<think>\n\n</think>\n\nmore</s>"


def test_sides_of_several_turns_that_a_template_rewrites_are_refused(load):
    record = {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "no"}]}
    with pytest.raises(
        UserError, match=r"data\.jsonl:1: .*cannot be compared as one answer; give sides of one turn"
    ):
        load("drops", "pair", record)


def test_reasoning_after_a_prompt_that_closes_reasoning_is_refused(load, tokenizer):
    TEMPLATES["closes"] = TEMPLATES["drops"].replace(SPEAK, "") + (
        "{% if add_generation_prompt %}<|assistant|><think>\n\n</think>\n\n{% endif %}"
    )
    with pytest.raises(UserError, match="empty block of reasoning, and the answer has reasoning"):
        load("closes", "answer", {"messages": TURNS})


def test_a_message_of_weight_zero_is_not_learnt(chat_tokenizer, write, settings):
    turns = [
        TURNS[0],
        {"role": "assistant", "content": "bad", "weight": 0},
        TURNS[2],
        {**TURNS[3], "weight": 1},
    ]
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bad", "weight": 0}]
    shared += [{"from": "human", "value": "a"}, {"from": "gpt", "value": "ate"}]
    for record in ({"messages": turns}, {"conversations": shared}):
        source = write([record])
        batch = Dataset.load(source, "answer", KEYS["answer"], chat_tokenizer, settings(), 1, (1,)).batch([0])
        learnt = batch["tokens"].row(0)[batch["loss_mask"].row(0).bool()]
        assert chat_tokenizer.decode(learnt) == "ate</s>"
    for weight, message in ((0, "every answer has weight 0"), (0.5, "must be 0 or 1")):
        source = write([{"messages": [turns[0], {**turns[1], "weight": weight}]}])
        with pytest.raises(UserError, match=message):
            Dataset.load(source, "answer", KEYS["answer"], chat_tokenizer, settings(), 1, (1,))


def test_what_a_template_writes_after_the_first_end_is_not_learnt(tokenizer, write, settings):
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<pad>\n</s>{% endfor %}" + SPEAK
    )
    stops = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    data = Dataset.load(
        write([{"messages": TURNS[2:]}]), "answer", KEYS["answer"], tokenizer, settings(), 1, stops
    )
    batch = data.batch([0])
    learnt = batch["tokens"].row(0)[batch["loss_mask"].row(0).bool()]
    assert tokenizer.decode(learnt) == "ate<pad>"
    pair = {"prompt": "q", "chosen": TURNS[3:], "rejected": [{"role": "assistant", "content": "ran"}]}
    batch = Dataset.load(write([pair]), "pair", KEYS["pair"], tokenizer, settings(), 1, stops).batch([0])
    assert tokenizer.decode(batch["chosen"].row(0)) == "<|user|>q<pad>\n</s><|assistant|>ate<pad>"
