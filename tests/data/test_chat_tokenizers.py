"""Conversations have the tokens that `apply_chat_template` gives, for tokenizers and templates of every kind."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from realrl.data.chat_template import ChatTemplate, Conversation, Message
from realrl.data.dataset import Dataset
from realrl.data.record_forms import Text
from realrl.data.tokenization import Row, tokenize
from realrl.recipe.data import DataConfig

WORDS = [
    "hello",
    "there",
    "fine",
    "thanks",
    "née",
    "Ωmega",
    "日本",
    "🙂",
    "2+2=4",
    "don't",
    "user",
    "assistant:",
]
UNSEEN = ["漢字", "ß"]
"""Not in the corpus, so unknown, or bytes."""
CORPUS = [" ".join(WORDS), "[INST] hello there [/INST] fine thanks\n\n", "user\nhello\nassistant\nfine"] * 5


def build(
    model: Any,
    trainer: Any,
    special: Iterable[str | AddedToken],
    template: str,
    *,
    around: str | None = None,
    **parts: Any,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer; the second special token begins a sequence and the third one ends it.

    `around` says what it puts around a text, as `<s> $A`.
    """
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    special = list(special)
    names = [str(getattr(token, "content", token)) for token in special]
    tokenizer.train_from_iterator(
        CORPUS, trainer(vocab_size=420, special_tokens=special, show_progress=False)
    )
    if around is not None:
        ids = [(name, tokenizer.token_to_id(name)) for name in names if name in around]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=names[0], bos_token=names[1], eos_token=names[2]
    )
    fast.chat_template = template
    return fast


# As Llama 3 and Qwen cut text: punctuation takes line ends with it, and line ends stay together.
SPLIT = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(special: list[str | AddedToken], template: str, **parts: Any) -> PreTrainedTokenizerFast:
    def trainer(**options: Any) -> trainers.BpeTrainer:
        return trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)

    steps = [
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    parts = {"pre_tokenizer": pre_tokenizers.Sequence(steps), "decoder": decoders.ByteLevel(), **parts}
    return build(models.BPE(), trainer, special, template, **parts)


def metaspace(scheme: str, model: Any, trainer: Any) -> PreTrainedTokenizerFast:
    space: Any = {"prepend_scheme": scheme}
    return build(
        model,
        trainer,
        ["<unk>", "<s>", "</s>"],
        INSTRUCTIONS,
        pre_tokenizer=pre_tokenizers.Metaspace(**space),
        decoder=decoders.Metaspace(**space),
        around="<s> $A",
    )


HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|neck|>\n\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|neck|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %} [INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
BRACKETS = (
    "[CLS]{% for m in messages %} {{ m.role }} : {{ m.content }} [SEP]{% endfor %}"
    "{% if add_generation_prompt %} assistant :{% endif %}"
)
GREEDY = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def wordpiece() -> PreTrainedTokenizerFast:
    return build(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer,
        ["[UNK]", "[CLS]", "[SEP]"],
        BRACKETS,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
        around="[CLS] $A [SEP]",
    )


def prepended() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral's: the normalizer writes the spaces, and nothing is cut into pieces."""
    tokenizer = metaspace("always", models.BPE(unk_token="<unk>"), trainers.BpeTrainer)
    backend = tokenizer.backend_tokenizer
    model = json.loads(backend.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    vocabulary |= {f"<0x{i:02X}>": len(vocabulary) + i for i in range(256)}
    backend.model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    return tokenizer


def unigram() -> PreTrainedTokenizerFast:
    def trainer(**options: Any) -> trainers.UnigramTrainer:
        return trainers.UnigramTrainer(unk_token="<unk>", **options)

    return metaspace("always", models.Unigram(), trainer)


def greedy() -> PreTrainedTokenizerFast:
    roles = [AddedToken(f"<|{role}|>", rstrip=True, special=True) for role in ("system", "user", "assistant")]
    return byte_level(["<unk>", "<s>", AddedToken("<|end|>", rstrip=True, special=True), *roles], GREEDY)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes, template and tokenizer write BOS": lambda: byte_level(
        ["<unk>", "<s>", "<|end|>", "<|head|>", "<|neck|>"], HEADERS, around="<s> $A"
    ),
    "bytes, the template alone writes BOS": lambda: byte_level(
        ["<unk>", "<s>", "<|end|>", "<|head|>", "<|neck|>"], HEADERS
    ),
    "bytes without BOS": lambda: byte_level(["<unk>", "<|start|>", "<|end|>"], CHATML),
    "metaspace before every piece": lambda: metaspace(
        "always", models.BPE(unk_token="<unk>"), trainers.BpeTrainer
    ),
    "metaspace before the first piece": lambda: metaspace(
        "first", models.BPE(unk_token="<unk>"), trainers.BpeTrainer
    ),
    "spaces written by the normalizer, bytes for what is unseen": prepended,
    "metaspace, unigram": unigram,
    "wordpiece": wordpiece,
    "special tokens that swallow white space": greedy,
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()


def turns(*, system: bool, contents: list[str]) -> list[Message]:
    """User and assistant in turn, after a system message perhaps."""
    roles = ["system"] * system + ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def row(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Row:
    (row,) = tokenize([conversation], tokenizer, (tokenizer.eos_token_id,))
    return row


def learnt(row: Row) -> list[int]:
    return [id for id, trained in zip(row.ids, row.loss_mask, strict=True) if trained]


# Contents that a tokenizer cuts the same way alone as inside a template.
sentences = st.lists(st.sampled_from([*WORDS, *UNSEEN]), min_size=1, max_size=4).map(" ".join)
conversations = st.tuples(st.booleans(), st.integers(1, 3)).flatmap(
    lambda form: st.lists(sentences, min_size=2 * form[1] + form[0], max_size=2 * form[1] + form[0]).map(
        lambda contents: turns(system=form[0], contents=contents)
    )
)
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | sentences.map(
    lambda s: f"\n {s} \n"
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(messages=conversations)
def test_conversation_tokens_match_the_template_and_only_answers_are_learnt(
    kind: str, messages: list[Message]
) -> None:
    tokenizer = tokenizer_of(kind)
    made = row(tokenizer, ChatTemplate(tokenizer).write_conversation(messages, "all")[0])
    assert made.ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    apart = [[*tokenizer(a, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for a in answers]
    assert learnt(made) == [*chain.from_iterable(apart)]
    last = row(tokenizer, ChatTemplate(tokenizer).write_conversation(messages, "last")[0])
    assert last.ids == made.ids and learnt(last) == apart[-1]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(messages=conversations)
def test_generation_prompts_equal_the_tokens_before_the_answer(kind: str, messages: list[Message]) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = row(tokenizer, ChatTemplate(tokenizer).write_prompt(messages[:-1]))
    assert prompt.ids == tokenizer.apply_chat_template(
        messages[:-1], tokenize=True, return_dict=False, add_generation_prompt=True
    )
    whole = row(tokenizer, ChatTemplate(tokenizer).write_side(messages, len(messages) - 1))
    assert whole.ids[: whole.prompt_length] == prompt.ids
    assert whole.ids[-1] == tokenizer.eos_token_id and not whole.joined


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(contents=st.lists(anything, min_size=2, max_size=5), system=st.booleans())
def test_any_conversation_has_the_tokens_of_the_template(
    kind: str, contents: list[str], system: bool
) -> None:
    tokenizer, messages = tokenizer_of(kind), turns(system=system, contents=contents)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        return
    made = row(tokenizer, ChatTemplate(tokenizer).write_conversation(messages, "all")[0])
    assert made.ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    answers = [m for m in messages if m["role"] == "assistant"]
    assert learnt(made).count(tokenizer.eos_token_id) == len(answers) == len(made.answers)
    assert all(made.ids[stop - 1] == tokenizer.eos_token_id for _, stop in made.answers)


def test_a_token_that_joins_prompt_and_answer_is_learnt_and_noted(write: Any) -> None:
    tokenizer = tokenizer_of("bytes without BOS")
    records = [{"messages": turns(system=False, contents=["hello", text])} for text in ("fine", "\nfine")]
    data = Dataset.load(
        write(records),
        "answer",
        ("tokens", "loss_mask"),
        tokenizer,
        DataConfig(train="unused"),
        1,
        (tokenizer.eos_token_id,),
    )
    batch = data.batch([1])
    assert tokenizer.decode(batch["tokens"].values[batch["loss_mask"].values.bool()]) == "\n\nfine<|end|>"
    (note,) = data.notes
    assert "in 1 conversations, first " in note and "data.jsonl:2" in note


def test_a_prompt_tokenised_differently_before_an_answer_is_noted() -> None:
    """GPT-2's rule leaves the last white space before a word to the word."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = byte_level(["<unk>", "<s>", "<|end|>", "<|head|>", "<|neck|>"], HEADERS, pre_tokenizer=cut)
    made = row(
        tokenizer,
        ChatTemplate(tokenizer).write_conversation(turns(system=False, contents=["hello", "fine"]), "all")[0],
    )
    assert made.joined
    assert tokenizer.decode(learnt(made)) == "fine<|end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_begins_as_the_tokenizer_begins_it(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    (made,) = tokenize([Text("hello there", None)], tokenizer, (tokenizer.eos_token_id,))
    ids = tokenizer("hello there").input_ids
    assert made.ids == (ids[:-1] if kind == "wordpiece" else ids)
