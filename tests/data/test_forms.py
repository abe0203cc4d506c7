"""Each form of record becomes the tokens that training and generation expect."""

from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.data.dataset import Dataset

SFT = ("tokens", "prompt_length")
PAIRS = ("chosen", "rejected")
PROMPTS = ("prompts",)

TURNS = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


@pytest.fixture
def rows(tokenizer, write, settings):
    """The decoded rows of every item, by key; lengths stay numbers."""

    def rows(records: list[Any], keys: tuple[str, ...], seed: int = 1, **fields: Any) -> dict[str, list[Any]]:
        data = Dataset.load(write(records), keys, tokenizer, settings(**fields), seed)
        batch = data.batch(range(len(data)))
        return {
            key: batch[key].values.tolist()
            if key == "prompt_length"
            else [tokenizer.decode(row) for row in batch[key].rows()]
            for key in keys
        }

    return rows


def test_prompt_and_answer_are_tokenised_apart_between_bos_and_eos(tokenizer, write, settings):
    data = Dataset.load(write([{"prompt": "the c", "answer": "at sat"}]), SFT, tokenizer, settings(), 1)
    prompt, answer = (tokenizer(t, add_special_tokens=False).input_ids for t in ("the c", "at sat"))
    batch = data.batch([0])
    ids = [tokenizer.bos_token_id, *prompt, *answer, tokenizer.eos_token_id]
    assert batch["tokens"].values.tolist() == ids
    assert batch["prompt_length"].values.tolist() == [1 + len(prompt)]


def test_an_empty_prompt_is_the_beginning_of_sequence(rows):
    assert rows([{"prompt": "", "answer": "a dog"}], SFT) == {
        "tokens": ["<s>a dog</s>"],
        "prompt_length": [1],
    }


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


def test_a_conversation_teaches_its_last_turn(rows, chat_tokenizer):
    question = [{"role": "system", "content": "a mat"}, *TURNS, {"role": "user", "content": "dog"}]
    out = rows([{"messages": [*question, {"role": "assistant", "content": "ate"}]}], SFT)
    prompt = "<|system|>a mat</s>\n<|user|>the cat</s>\n<|assistant|>sat</s>\n<|user|>dog</s>\n<|assistant|>"
    assert out["tokens"] == [prompt + "ate</s>"]
    assert out["prompt_length"] == [len(chat_tokenizer(prompt, add_special_tokens=False).input_ids)]


def test_eos_is_added_where_the_template_does_not_write_it(rows, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert rows([{"messages": TURNS}], SFT)["tokens"] == ["[user]the cat[assistant]sat</s>"]


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_a_conversation_prompts_with_its_last_user_turn(rows, chat_tokenizer, field):
    assert rows([{field: TURNS}], PROMPTS) == {"prompts": ["<|user|>the cat</s>\n<|assistant|>"]}


REPLIES = [[{"role": "assistant", "content": text}] for text in ("sat", "ate")]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TURNS[:1], "chosen": REPLIES[0], "rejected": REPLIES[1]},
        {"prompt": "the cat", "chosen": REPLIES[0], "rejected": REPLIES[1]},
        {"chosen": TURNS[:1] + REPLIES[0], "rejected": TURNS[:1] + REPLIES[1]},
    ],
    ids=["prompt messages", "prompt text", "whole conversations"],
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
        (SFT, {"messages": TURNS[:1]}, "end with an assistant turn"),
        (PAIRS, {"prompt": "a", "chosen": "b"}, "no field 'rejected'.*{prompt, pos_answers, neg_answers}"),
        (PAIRS, {"prompt": "a", "pos_answers": ["b"]}, "no field 'neg_answers'"),
        (PAIRS, {"prompt": "a", "pos_answers": [], "neg_answers": ["b"]}, "'pos_answers' must be a list"),
        (PAIRS, {"chosen": REPLIES[0], "rejected": REPLIES[1]}, "no field 'prompt'"),
        (PROMPTS, {"question": "a"}, r"no field 'prompt' \(fields: question\).*{prompt} or {messages}"),
        (PROMPTS, {"messages": [TURNS[1]]}, "no user turn"),
    ],
)
def test_a_record_of_the_wrong_form_is_named_with_what_is_accepted(rows, keys, record, complaint):
    good = {SFT: {"prompt": "", "answer": ""}, PAIRS: {"prompt": "", "chosen": "", "rejected": ""}}
    with pytest.raises(UserError, match=rf"data\.jsonl:2: .*({complaint})"):
        rows([good.get(keys, {"prompt": "a"}), record], keys)
