"""Mixtures of sources: an epoch takes of each what its weight says, in an order that the seed decides."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.errors import UserError
from realrl.data.dataset import Dataset
from realrl.data.order import Order, count_drawn
from realrl.recipe.sources import RecordSource, list_sources

SOURCES = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 3.7])), min_size=1, max_size=4
)


def epochs_of(order: Order, count: int) -> list[list[int]]:
    steps = -(-count * order.size // order.batch)
    stream = [item for step in range(steps) for item in order.indices(step)]
    return [stream[epoch * order.size : (epoch + 1) * order.size] for epoch in range(count)]


@given(SOURCES, st.integers(1, 7), st.booleans())
def test_every_epoch_takes_exactly_what_weights_say(sources, batch, shuffle):
    size, drawn = sum(items for items, _ in sources), [count_drawn(source) for source in sources]
    order = Order(size, min(batch, sum(drawn)), 3, shuffle, sources=sources)
    of_item = [number for number, (items, _) in enumerate(sources) for _ in range(items)]
    assert order.size == sum(drawn)
    total: Counter[int] = Counter()
    for epoch in epochs_of(order, 3):
        taken = Counter(of_item[item] for item in epoch)
        assert [taken[number] for number in range(len(sources))] == drawn
        total.update(epoch)
    first = 0
    for items, _ in sources:
        counts = [total[item] for item in range(first, first + items)]
        assert max(counts) - min(counts) <= 1
        first += items


@given(SOURCES, st.integers(0, 40))
def test_the_order_of_a_mixture_does_not_depend_on_earlier_steps(sources, step):
    size = sum(items for items, _ in sources)
    used, fresh = (Order(size, 1, 7, sources=sources) for _ in range(2))
    for earlier in (0, step + 3, step // 2):
        used.indices(earlier)
    assert used.indices(step) == fresh.indices(step)


def test_sources_are_mixed_within_an_epoch():
    (epoch,) = epochs_of(Order(200, 10, 1, sources=[(100, 2.0), (100, 1.0)]), 1)
    thirds = [sum(item < 100 for item in epoch[start : start + 100]) for start in (0, 100, 200)]
    assert sum(thirds) == 200 and min(thirds) > 50


def test_a_batch_larger_than_an_epoch_of_a_mixture_is_a_user_error():
    with pytest.raises(UserError, match="more than the 5 records"):
        Order(10, 6, 1, sources=[(10, 0.5)])


@pytest.mark.parametrize(
    ("written", "sources"),
    [
        ("a.jsonl", [RecordSource("a.jsonl")]),
        (["a", "b:train"], [RecordSource("a"), RecordSource("b:train")]),
        ({"a": 2, "b": 0.5}, [RecordSource("a", 2.0), RecordSource("b", 0.5)]),
        (["a", {"source": "b", "weight": 3}], [RecordSource("a"), RecordSource("b", 3.0)]),
    ],
)
def test_sources_are_written_as_text_list_or_mapping(written, sources):
    assert list(list_sources(written)) == sources


def test_a_data_set_counts_its_sources_in_order(tokenizer, write, settings):
    first = write([{"prompt": "a"}, {"prompt": 1}, {"prompt": "b"}], "first.jsonl")
    second = write([{"prompt": "c"}, {"prompt": "qzqzqzqz"}], "second.jsonl")
    config = settings(on_error="skip", max_prompt_tokens=6)
    data = Dataset.load({second: 2, first: 0.5}, "prompt", ("prompts",), tokenizer, config, 1, (1,))
    texts = [tokenizer.decode(row) for row in data.batch(range(3))["prompts"].rows()]
    assert texts == ["<s>c", "<s>a", "<s>b"]
    counts = [(s.path, s.weight, s.items, s.skipped, s.too_long) for s in data.sources]
    assert counts == [(second, 2, 1, 1, 1), (first, 0.5, 2, 1, 0)]
    assert (data.skipped, data.too_long) == (2, 1)
    assert [reason.split(": ")[0] for reason in data.reasons] == [f"{second}:2", f"{first}:2"]


def test_a_source_of_a_mixture_without_usable_records_is_named(tokenizer, write, settings):
    sources = [write([{"prompt": "a"}]), write([], "empty.jsonl")]
    with pytest.raises(UserError, match=r"no usable records in .*empty\.jsonl: it is empty"):
        Dataset.load(sources, "prompt", ("prompts",), tokenizer, settings(), 1, (1,))


def test_records_that_are_too_long_can_be_left_out_where_malformed_ones_are_errors(
    tokenizer, write, settings
):
    long = {"prompt": "qzqzqzqz"}
    config = settings(on_too_long="skip", max_prompt_tokens=6)
    data = Dataset.load(write([long, {"prompt": "a"}]), "prompt", ("prompts",), tokenizer, config, 1, (1,))
    assert (len(data), data.too_long) == (1, 1)
    with pytest.raises(UserError, match=r"data\.jsonl:2: field 'prompt' must be text"):
        Dataset.load(write([long, {"prompt": 1}]), "prompt", ("prompts",), tokenizer, config, 1, (1,))


def test_pairs_of_different_sources_count_their_own_prompts(tokenizer, write, settings):
    several = {"prompt": "", "pos_answers": ["a", "b"], "neg_answers": ["c"]}
    sources = [write([several], "first.jsonl"), write([several], "second.jsonl")]
    keys = ("chosen", "rejected", "pairs_of_prompt")
    data = Dataset.load(sources, "pair", keys, tokenizer, settings(pair_weight="prompt"), 1, (1,))
    assert data.batch(range(4))["pairs_of_prompt"].values.tolist() == [2, 2, 2, 2]
