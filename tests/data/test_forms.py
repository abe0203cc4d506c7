"""Each form of record becomes the tokens that training and generation expect."""

from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.data.dataset import Dataset

SFT = ("tokens", "loss_mask")
PAIRS = ("chosen", "rejected")
ENDS = (1,)
PROMPTS = ("prompts",)
FORMS = {SFT: "answer", PAIRS: "pair", PROMPTS: "prompt"}

TURNS = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


@pytest.fixture
def rows(tokenizer, write, settings):
    """The decoded rows of every item, by key; of `loss_mask`, the texts of the tokens to learn."""

    def rows(records: list[Any], keys: tuple[str, ...], seed: int = 1, **fields: Any) -> dict[str, list[Any]]:
        data = Dataset.load(write(records), FORMS[keys], keys, tokenizer, settings(**fields), seed, ENDS)
        batch = data.batch(range(len(data)))
        return {
            key: [
                tokenizer.decode(batch["tokens"].row(i)[row.bool()] if key == "loss_mask" else row)
                for i, row in enumerate(batch[key].rows())
            ]
            for key in keys
        }

    return rows


def test_prompt_and_answer_are_tokenised_apart_between_bos_and_eos(load, tokenizer):
    data = load([{"prompt": "the c", "answer": "at sat"}], "answer", SFT)
    prompt, answer = (tokenizer(t, add_special_tokens=False).input_ids for t in ("the c", "at sat"))
    batch = data.batch([0])
    ids = [tokenizer.bos_token_id, *prompt, *answer, tokenizer.eos_token_id]
    assert batch["tokens"].values.tolist() == ids
    learnt = len(answer) + 1
    assert batch["loss_mask"].values.tolist() == [0] * (len(ids) - learnt) + [1] * learnt


def test_an_empty_prompt_is_the_beginning_of_sequence(rows):
    assert rows([{"prompt": "", "answer": "a dog"}], SFT) == {
        "tokens": ["<s>a dog</s>"],
        "loss_mask": ["a dog</s>"],
    }


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "<s>the cat", "answer": " sat</s>"},
        {"prompt": "the cat", "answer": " sat</s>\n"},
        {"prompt": "the cat", "answer": " sat</s></s>"},
    ],
)
def test_beginning_and_end_of_sequence_are_not_doubled(rows, record):
    assert rows([record], SFT) == {"tokens": ["<s>the cat sat</s>"], "loss_mask": [" sat</s>"]}


def test_a_whole_text_as_the_answer_keeps_its_own_beginning(rows):
    record = {"prompt": "", "answer": "<s>the cat</s>"}
    assert rows([record], SFT) == {"tokens": ["<s>the cat</s>"], "loss_mask": ["the cat</s>"]}


def test_an_end_of_sequence_inside_an_answer_does_not_end_it(rows):
    assert rows([{"prompt": "", "answer": "the</s>cat"}], SFT)["loss_mask"] == ["the</s>cat</s>"]


def test_both_sides_of_a_pair_end_alike_whoever_wrote_the_end(rows):
    record = {"prompt": "the cat", "chosen": " sat</s>", "rejected": " ate"}
    assert rows([record], PAIRS) == {"chosen": ["<s>the cat sat</s>"], "rejected": ["<s>the cat ate</s>"]}


def test_a_beginning_of_sequence_that_the_tokenizer_does_not_write_is_not_written(load, bare):
    data = load([{"prompt": "the cat"}], "prompt", PROMPTS)
    assert bare.bos_token == "<s>"
    assert data.batch([0])["prompts"].values.tolist() == bare("the cat").input_ids


def test_an_answer_may_end_with_any_end_of_sequence(tokenizer, write, settings):
    """The first of several is the one that is appended."""
    stop_token_ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    source = write([{"prompt": "", "answer": text} for text in ("a", "a</s>", "a<pad>")])
    data = Dataset.load(source, "answer", SFT, tokenizer, settings(), 1, stop_token_ids)
    texts = [tokenizer.decode(row) for row in data.batch(range(3))["tokens"].rows()]
    assert texts == ["<s>a<pad>", "<s>a</s>", "<s>a<pad>"]


def test_a_preference_pair_shares_its_prompt(rows):
    record = {"prompt": "the cat", "chosen": " sat", "rejected": " ate"}
    assert rows([record], PAIRS) == {"chosen": ["<s>the cat sat</s>"], "rejected": ["<s>the cat ate</s>"]}


def test_a_prompt_is_left_open(rows):
    assert rows([{"prompt": "the cat", "answer": "ignored"}], PROMPTS) == {"prompts": ["<s>the cat"]}


def test_answers_are_paired_each_good_one_with_each_bad_one(rows):
    out = rows([{"prompt": "", "pos_answers": ["a", "b"], "neg_answers": ["x", "y"]}], PAIRS)
    assert list(zip(out["chosen"], out["rejected"], strict=True)) == [
        (f"<s>{good}</s>", f"<s>{bad}</s>") for good in "ab" for bad in "xy"
    ]


def test_pairs_above_the_limit_are_drawn_by_the_seed(rows):
    records = [{"prompt": "", "pos_answers": list("abcdefgh"), "neg_answers": list("stuvwxyz")}]
    drawn = [rows(records, PAIRS, seed=seed, max_pairs_per_prompt=5) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(zip(drawn[0]["chosen"], drawn[0]["rejected"], strict=True))) == 5


LONG = [
    {"role": "system", "content": "a mat"},
    *TURNS,
    {"role": "user", "content": "dog"},
    {"role": "assistant", "content": "ate"},
]


@pytest.mark.parametrize(("train_on", "learnt"), [("all", "sat</s>ate</s>"), ("last", "ate</s>")])
def test_a_conversation_teaches_its_answers(rows, chat_tokenizer, train_on, learnt):
    out = rows([{"messages": LONG}], SFT, train_on=train_on)
    prompt = "<|system|>a mat</s>\n<|user|>the cat</s>\n<|assistant|>sat</s>\n<|user|>dog</s>\n<|assistant|>"
    assert out == {"tokens": [prompt + "ate</s>\n"], "loss_mask": [learnt]}


def test_an_answer_to_messages_is_all_that_is_learnt(rows, chat_tokenizer):
    out = rows([{"prompt": LONG[:-1], "answer": "ate"}], SFT)
    assert out["loss_mask"] == ["ate</s>"]


def test_an_opening_assistant_turn_answers_nothing_and_is_not_learnt(rows, chat_tokenizer):
    assert rows([{"messages": [TURNS[1], *TURNS]}], SFT)["loss_mask"] == ["sat</s>"]


OPEN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_eos_is_added_where_the_template_does_not_write_it(rows, tokenizer):
    tokenizer.chat_template = OPEN_TEMPLATE
    assert rows([{"messages": TURNS}], SFT) == {
        "tokens": ["[user]the cat[assistant]sat</s>"],
        "loss_mask": ["sat</s>"],
    }


def test_an_earlier_turn_without_eos_is_learnt_as_the_template_writes_it(rows, tokenizer):
    tokenizer.chat_template = OPEN_TEMPLATE
    assert rows([{"messages": LONG[1:]}], SFT)["loss_mask"] == ["satate</s>"]


def test_an_end_of_sequence_inside_a_turn_does_not_end_it(rows, tokenizer):
    tokenizer.chat_template = OPEN_TEMPLATE
    messages = [TURNS[0], {"role": "assistant", "content": "the</s>cat"}]
    assert rows([{"messages": messages}], SFT)["loss_mask"] == ["the</s>cat</s>"]


def test_a_content_with_its_own_end_of_sequence_ends_there(rows, chat_tokenizer):
    replies = [[{"role": "assistant", "content": text}] for text in ("sat</s>", "ate")]
    record = {"prompt": TURNS[:1], "chosen": replies[0], "rejected": replies[1]}
    start = "<|user|>the cat</s>\n<|assistant|>"
    assert rows([record], PAIRS) == {"chosen": [start + "sat</s>"], "rejected": [start + "ate</s>"]}


CONVERSED = "<|user|>the cat</s>\n<|assistant|>"


@pytest.mark.parametrize(
    ("keys", "record", "expected"),
    [
        (SFT, {"answer": "sat"}, {"tokens": [CONVERSED + "sat</s>\n"], "loss_mask": ["sat</s>"]}),
        (
            PAIRS,
            {"chosen": "sat", "rejected": "ate"},
            {"chosen": [CONVERSED + "sat</s>"], "rejected": [CONVERSED + "ate</s>"]},
        ),
        (
            PAIRS,
            {"pos_answers": ["sat"], "neg_answers": ["ate"]},
            {"chosen": [CONVERSED + "sat</s>"], "rejected": [CONVERSED + "ate</s>"]},
        ),
        (PROMPTS, {}, {"prompts": [CONVERSED]}),
    ],
)
def test_plain_text_takes_the_template_where_asked(rows, chat_tokenizer, keys, record, expected):
    assert rows([{"prompt": "the cat", **record}], keys, apply_chat_template=True) == expected


def test_a_template_that_is_asked_for_must_exist(rows):
    with pytest.raises(UserError, match=r"no chat template, which data\.apply_chat_template"):
        rows([{"prompt": "the cat"}], PROMPTS, apply_chat_template=True)


def test_the_text_prompt_of_a_conversation_prompts_as_one(rows, chat_tokenizer):
    record = {"prompt": "the cat", "chosen": REPLIES[0], "rejected": REPLIES[1]}
    assert rows([record], PROMPTS) == {"prompts": [CONVERSED]}


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_a_conversation_prompts_with_its_last_user_turn(rows, chat_tokenizer, field):
    assert rows([{field: TURNS}], PROMPTS) == {"prompts": ["<|user|>the cat</s>\n<|assistant|>"]}


REPLIES = [[{"role": "assistant", "content": text}] for text in ("sat", "ate")]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TURNS[:1], "chosen": REPLIES[0], "rejected": REPLIES[1]},
        {"prompt": "the cat", "chosen": REPLIES[0], "rejected": REPLIES[1]},
        {"prompt": "the cat", "chosen": REPLIES[0], "rejected": "ate"},
        {"prompt": TURNS[:1], "chosen": "sat", "rejected": "ate"},
        {"prompt": TURNS[:1], "pos_answers": ["sat"], "neg_answers": ["ate"]},
        {"chosen": TURNS[:1] + REPLIES[0], "rejected": TURNS[:1] + REPLIES[1]},
    ],
    ids=["all messages", "prompt text", "one side text", "prompt messages", "several", "whole conversations"],
)
def test_preferred_conversations_may_be_written_in_any_usual_way(rows, chat_tokenizer, record):
    start = "<|user|>the cat</s>\n<|assistant|>"
    assert rows([record], PAIRS) == {"chosen": [start + "sat</s>"], "rejected": [start + "ate</s>"]}


@pytest.mark.parametrize("keys", [SFT, PROMPTS])
def test_messages_need_a_chat_template(rows, keys):
    with pytest.raises(UserError, match="no chat template"):
        rows([{"messages": TURNS}], keys, on_error="skip")


def test_a_template_that_refuses_a_conversation_names_the_record(rows, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"data\.jsonl:1: .*roles must alternate"):
        rows([{"messages": TURNS}], SFT)


def test_a_template_that_rewrites_earlier_turns_names_the_record(rows, tokenizer):
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(UserError, match=r"data\.jsonl:1: the chat template writes"):
        rows([{"messages": TURNS}], SFT)


@pytest.mark.parametrize(
    ("keys", "record", "complaint"),
    [
        (SFT, {"prompt": "a"}, "no field 'answer'.*{prompt, answer} or {messages}"),
        (SFT, {"prompt": "a", "answer": None}, "no field 'answer'"),
        (SFT, {"prompt": "a", "answer": 3}, "field 'answer' must be text, not int"),
        (SFT, {"prompt": "a", "answer": "\ud800"}, "'answer' contains half a surrogate pair"),
        (SFT, {"messages": []}, "field 'messages' must be a list of {role, content}"),
        (SFT, {"messages": [{"role": "user"}]}, "field 'messages.content' must be text"),
        (SFT, {"messages": TURNS[:1]}, "must have several turns"),
        (PAIRS, {"prompt": "a", "chosen": "b"}, "no field 'rejected'.*{prompt, pos_answers, neg_answers}"),
        (PAIRS, {"prompt": "a", "pos_answers": ["b"]}, "no field 'neg_answers'"),
        (PAIRS, {"prompt": "a", "pos_answers": [], "neg_answers": ["b"]}, "'pos_answers' must be a list"),
        (PAIRS, {"chosen": REPLIES[0], "rejected": REPLIES[1]}, "no field 'prompt'"),
        (PROMPTS, {"question": "a"}, r"no field 'prompt' \(fields: question\).*{prompt} or {messages}"),
        (PROMPTS, {"messages": [TURNS[1]]}, "no user turn"),
    ],
)
def test_a_record_of_the_wrong_form_is_named_with_what_is_accepted(rows, keys, record, complaint):
    good = {SFT: {"prompt": "", "answer": ""}, PAIRS: {"prompt": "", "chosen": "a", "rejected": "b"}}
    with pytest.raises(UserError, match=rf"data\.jsonl:2: .*({complaint})"):
        rows([good.get(keys, {"prompt": "a"}), record], keys)
