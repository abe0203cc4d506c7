"""Records that cannot be used are named, or counted; what remains is exact."""

import pytest
import torch

from realrl.config.errors import UserError
from realrl.data import items
from realrl.data.chat_template import ChatTemplate
from realrl.data.dataset import Dataset
from realrl.data.record_forms import READERS, Reader, further_fields
from realrl.data.rejects import BadRecordError
from realrl.recipe.forms import FORMS
from realrl.runtime.prepare.inputs import read_stop_token_ids

PROMPTS = ("prompts",)
PAIRS = ("chosen", "rejected", "pairs_of_prompt")
ENDS = (1,)


def test_a_batch_holds_the_items_asked_for_as_int64(load, tokenizer):
    data = load([{"prompt": p} for p in ("a", "b", "c")], "prompt", PROMPTS)
    batch = data.batch([2, 0])
    assert batch.ids == (0, 1)
    assert batch["prompts"].values.dtype == torch.int64
    assert [tokenizer.decode(row) for row in batch["prompts"].rows()] == ["<s>c", "<s>a"]


def test_items_keep_the_order_of_the_file_across_chunks(load, write, monkeypatch):
    records = [{"prompt": "", "chosen": str(i), "rejected": "x" * (1 + i % 3)} for i in range(10)]
    source = write(records)
    whole = load(source, "pair", ("chosen", "rejected")).batch(range(10))
    monkeypatch.setattr(items, "CHUNK", 3)
    chunked = load(source, "pair", ("chosen", "rejected")).batch(range(10))
    for key in ("chosen", "rejected"):
        assert whole[key].lengths == chunked[key].lengths
        assert torch.equal(whole[key].values, chunked[key].values)


@pytest.mark.parametrize(
    ("limit", "complaint"),
    [
        ({"max_prompt_tokens": 4}, r"the prompt has 5 tokens, more than data\.max_prompt_tokens=4"),
        ({"max_tokens": 8}, r"prompt and answer have 9 tokens, more than data\.max_tokens=8"),
    ],
)
def test_a_record_over_a_limit_is_named(load, write, limit, complaint):
    source = write([{"prompt": "q", "answer": "q"}, {"prompt": "qzqz", "answer": "zqz"}])
    with pytest.raises(UserError, match=rf"data\.jsonl:2: {complaint}"):
        load(source, "answer", ("tokens", "loss_mask"), **limit)


def test_a_record_at_the_limits_is_kept(tokenizer, write, settings):
    source = write([{"prompt": "qzqz", "answer": "zqz"}])
    limits = settings(max_prompt_tokens=5, max_tokens=9)
    assert len(Dataset.load(source, "answer", ("tokens", "loss_mask"), tokenizer, limits, 1, ENDS)) == 1


def test_skipped_records_are_counted_with_reasons(load, write):
    source = write(
        [{"prompt": "a"}, "{not json", {"prompt": 1}, "[]", "", {"prompt": "qzqzqz"}, {"prompt": "b"}]
    )
    data = load(source, "prompt", PROMPTS, on_error="skip", max_prompt_tokens=6)
    assert (len(data), data.skipped) == (2, 4)
    assert sorted(reason.split(":")[1] for reason in data.reasons) == ["2", "3", "4", "6"]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([], r"no usable records in .*data\.jsonl: it is empty"),
        ([{"prompt": 1}] * 2, r"none of the 2 records of .*data\.jsonl can be used; first .*data\.jsonl:1"),
    ],
)
def test_a_source_without_usable_records_is_a_user_error(load, records, why):
    with pytest.raises(UserError, match=why):
        load(records, "prompt", PROMPTS, on_error="skip")


def test_an_empty_prompt_to_generate_from_is_named_where_nothing_stands_before_a_text(load, bare, write):
    source = write([{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(UserError, match=r"data\.jsonl:2: the prompt is empty.* no beginning of sequence"):
        load(source, "prompt", PROMPTS)


def test_without_beginning_of_sequence_the_first_token_of_an_answer_alone_is_not_learnt(load, bare):
    data = load([{"prompt": "", "answer": "qz"}], "answer", ("tokens", "loss_mask"))
    batch = data.batch([0])
    assert bare.convert_ids_to_tokens(batch["tokens"].values.tolist()) == ["q", "z", "</s>"]
    assert batch["loss_mask"].values.tolist() == [0, 1, 1]


def test_a_record_with_nothing_to_learn_is_named(load, bare, write):
    source = write([{"prompt": "", "answer": ""}])
    with pytest.raises(UserError, match=r"data\.jsonl:1: prompt and answer are empty"):
        load(source, "answer", ("tokens", "loss_mask"))


@pytest.mark.parametrize(
    ("weight", "skip", "pairs"),
    [
        ("pair", [], [1, 1, 1, 1, 1, 1, 1]),
        ("prompt", [], [6, 6, 6, 6, 6, 6, 1]),
        ("prompt", "y", [4, 4, 4, 4, 1]),
    ],
)
def test_pairs_count_the_remaining_pairs_of_their_prompt(tokenizer, write, settings, weight, skip, pairs):
    """Pairs over a limit are skipped one by one, and do not count."""
    bad = ["x", "yyyyyyyyyy" if skip else "y", "z"]
    records = [
        {"prompt": "", "pos_answers": ["a", "b"], "neg_answers": bad},
        {"prompt": "", "chosen": "a", "rejected": "b"},
    ]
    config = settings(pair_weight=weight, max_tokens=8, on_error="skip")
    data = Dataset.load(write(records), "pair", PAIRS, tokenizer, config, 1, ENDS)
    assert data.batch(range(len(data)))["pairs_of_prompt"].values.tolist() == pairs


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": "fine", "rejected": "fine</s>"}, "the chosen and the rejected answer are the same"),
        ({"chosen": "fine", "rejected": ""}, "an answer in 'rejected' is empty"),
        ({"chosen": "\n", "rejected": "fine"}, "an answer in 'chosen' is empty"),
        ({"chosen": "</s>", "rejected": "fine"}, "the chosen answer is empty"),
        (
            {"pos_answers": ["a", "b"], "neg_answers": ["b"]},
            "the chosen and the rejected answer are the same",
        ),
    ],
)
def test_pairs_of_equal_answers_are_named_or_skipped(load, write, record, reason):
    source = write([{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", **record}])
    with pytest.raises(UserError, match=rf"data\.jsonl:2: {reason}"):
        load(source, "pair", PAIRS)
    data = load(source, "pair", PAIRS, on_error="skip")
    assert data.skipped == 1


def test_a_note_explains_plain_prompts_where_a_chat_template_exists(load, chat_tokenizer, write):
    source = write([{"prompt": "a"}])

    def notes(**fields):
        return load(source, "prompt", PROMPTS, **fields).notes

    assert "used as they stand" in notes()[0] and "data.apply_chat_template=true" in notes()[0]
    assert "are written with the tokenizer's chat template" in notes(apply_chat_template=True)[0]
    chat_tokenizer.chat_template = None
    assert notes() == ()


def test_a_tokenizer_must_be_able_to_end_a_sequence(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        read_stop_token_ids(tokenizer, None, len(tokenizer))


@pytest.mark.parametrize("way", ["fields", "other_fields"])
@pytest.mark.parametrize("form", FORMS)
def test_the_reader_of_a_form_needs_its_fields_and_no_others(chat_tokenizer, form, way):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    values = {"messages": turns, "pos_answers": ["a"], "neg_answers": ["b"], "answers": ["a", "b"]}
    values |= {"completions": ["a"], "labels": [True]}
    record = {name: values.get(name, "text") for name in getattr(FORMS[form], way)}
    reader = Reader(ChatTemplate(chat_tokenizer), ranked=2)
    assert READERS[form](reader, record)
    assert further_fields(form, {**record, "level": 1}) == {"level": 1}
    for name in record:
        with pytest.raises(BadRecordError, match="no field"):
            READERS[form](reader, {other: value for other, value in record.items() if other != name})


def test_fields_no_key_is_made_of_are_kept_by_item_for_who_wants_them(load):
    records = [
        {"prompt": "a", "answer": "x", "tests": ["t"]},
        {"prompt": ""},
        {"prompt": "b", "answer": None, "level": 3},
        {"prompt": "c", "level": 0, "note": "left out"},
    ]
    wanted = {"answer", "tests", "level", "prompt"}
    data = load(records, "prompt", PROMPTS, wanted.__contains__)
    assert data.further_fields([3, 0, 2]) == {
        "answer": [None, "x", None],
        "tests": [None, ["t"], None],
        "level": [0, None, 3],
    }
    assert load(records, "prompt", PROMPTS).further == {}


def test_the_items_of_one_record_share_its_further_fields(load, write):
    source = write([{"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c"], "tests": [1]}])
    keys = ("chosen", "rejected")
    data = load(source, "pair", keys, lambda name: True)
    (first, second) = data.further["tests"]
    assert data.further.keys() == {"tests"} and first is second


def test_messages_beside_a_prompt_leave_the_prompt_to_functions(load, chat_tokenizer):
    record = {"messages": [{"role": "user", "content": "a"}], "prompt": "b"}
    data = load([record], "prompt", PROMPTS, lambda name: True)
    assert data.further == {"prompt": ["b"]}


def test_every_form_of_record_has_a_reader():
    assert set(READERS) == set(FORMS)
