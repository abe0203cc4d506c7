"""Records that cannot be used are named, or counted; what remains is exact."""

import pytest
import torch

from realrl.config.errors import UserError
from realrl.data import dataset
from realrl.data.dataset import Dataset

PROMPTS = ("prompts",)


def test_a_batch_holds_the_items_asked_for_as_int64(tokenizer, write, settings):
    data = Dataset.load(write([{"prompt": p} for p in ("a", "b", "c")]), PROMPTS, tokenizer, settings(), 1)
    batch = data.batch([2, 0])
    assert batch.ids == (0, 1)
    assert batch["prompts"].values.dtype == torch.int64
    assert [tokenizer.decode(row) for row in batch["prompts"].rows()] == ["<s>c", "<s>a"]


def test_items_keep_the_order_of_the_file_across_chunks(tokenizer, write, settings, monkeypatch):
    records = [{"prompt": "", "chosen": str(i), "rejected": "x" * (i % 3)} for i in range(10)]
    source = write(records)
    whole = Dataset.load(source, ("chosen", "rejected"), tokenizer, settings(), 1).batch(range(10))
    monkeypatch.setattr(dataset, "CHUNK", 3)
    chunked = Dataset.load(source, ("chosen", "rejected"), tokenizer, settings(), 1).batch(range(10))
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
def test_a_record_over_a_limit_is_named(tokenizer, write, settings, limit, complaint):
    source = write([{"prompt": "q", "answer": "q"}, {"prompt": "qzqz", "answer": "zqz"}])
    with pytest.raises(UserError, match=rf"data\.jsonl:2: {complaint}"):
        Dataset.load(source, ("tokens", "trained"), tokenizer, settings(**limit), 1)


def test_a_record_at_the_limits_is_kept(tokenizer, write, settings):
    source = write([{"prompt": "qzqz", "answer": "zqz"}])
    limits = settings(max_prompt_tokens=5, max_tokens=9)
    assert len(Dataset.load(source, ("tokens", "trained"), tokenizer, limits, 1)) == 1


def test_skipped_records_are_counted_with_reasons(tokenizer, write, settings):
    source = write(
        [{"prompt": "a"}, "{not json", {"prompt": 1}, "[]", "", {"prompt": "qzqzqz"}, {"prompt": "b"}]
    )
    data = Dataset.load(source, PROMPTS, tokenizer, settings(on_error="skip", max_prompt_tokens=6), 1)
    assert (len(data), data.skipped) == (2, 4)
    assert sorted(reason.split(":")[1] for reason in data.reasons) == ["2", "3", "4", "6"]


def test_only_the_first_reasons_are_kept(tokenizer, write, settings):
    source = write([{"prompt": "a"}, *[{"prompt": 1}] * 20])
    data = Dataset.load(source, PROMPTS, tokenizer, settings(on_error="skip"), 1)
    assert data.skipped == 20
    assert len(data.reasons) == 5


@pytest.mark.parametrize(
    ("records", "why"),
    [([], "it is empty"), ([{"prompt": 1}] * 2, r"all 2 were skipped, first .*data\.jsonl:1")],
)
def test_a_source_without_usable_records_is_the_users_mistake(tokenizer, write, settings, records, why):
    with pytest.raises(UserError, match=rf"no usable records in .*: {why}"):
        Dataset.load(write(records), PROMPTS, tokenizer, settings(on_error="skip"), 1)


def test_an_empty_prompt_without_bos_is_named(tokenizer, write, settings):
    tokenizer.bos_token = None
    source = write([{"prompt": "a", "answer": "b"}, {"prompt": "", "answer": "b"}])
    with pytest.raises(UserError, match=r"data\.jsonl:2: an empty prompt needs .*beginning-of-sequence"):
        Dataset.load(source, ("tokens", "trained"), tokenizer, settings(), 1)


def test_a_tokenizer_must_be_able_to_end_a_sequence(tokenizer, write, settings):
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        Dataset.load(write([{"prompt": "a"}]), PROMPTS, tokenizer, settings(), 1)


def test_keys_no_record_can_yield_are_refused(tokenizer, write, settings):
    with pytest.raises(ValueError, match="no form of record yields the keys tokens, chosen"):
        Dataset.load(write([{"prompt": "a"}]), ("tokens", "chosen"), tokenizer, settings(), 1)
