"""A trajectory has the tokens that the chat template gives the whole conversation; no turn is written twice."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tokenizers import processors

from realrl.config.errors import UserError
from realrl.data.chat_template import Message
from realrl.data.rejects import BadRecordError
from realrl.data.turn_template import Observation, TurnTemplate
from realrl.huggingface.tokenizers import train_bpe
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function.name }}"
    " {{ call.function.arguments | tojson }}\n</tool_call>{% endfor %}"
)
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    # Like Qwen's: neighbouring tool results share one turn of the user.
    "qwen": "{{ bos_token }}" + TOOLS + "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + OPEN,
    # Like Llama's: a line break belongs to the beginning of a turn, and none follows its end.
    "llama": TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}"
    + CALLS
    + "<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    # Like Mistral's: no beginning of the model's turn.
    "mistral": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL] {{ m.content }} [/TOOL]{% else %} {{ m.content }}"
    + CALLS
    + "<|im_end|>"
    "{% endif %}{% endfor %}",
}
DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
) + OPEN
"""Like Qwen3's: earlier turns lose their reasoning."""


@pytest.fixture
def tokenizer() -> Any:
    trained = train_bpe(["the cat sat on the mat", "a dog ate the cat"] * 4, 300)
    trained.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": "<s>"}
    )
    trained.eos_token = "<|im_end|>"
    bos = trained.bos_token_id
    trained.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return trained


def make(tokenizer: Any, template: str | None, *, tools: bool = False, **changes: Any) -> TurnTemplate:
    tokenizer.chat_template = template
    settings = {"longest": 1000, "earlier_turns": "refuse", **changes}
    return TurnTemplate(
        tokenizer, {}, tools=[TOOL] if tools else None, stop_token_ids=[tokenizer.eos_token_id], **settings
    )


def play(
    turns: TurnTemplate,
    tokenizer: Any,
    asked: Sequence[Message],
    first: Observation,
    texts: Mapping[str, Any],
) -> Any:
    """Tokens of a conversation in which the model writes each of `texts`, and gets its observation."""
    assert turns.template is not None
    prompt = turns.template.write_prompt(list(asked))
    ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"] + turns.open(first)
    for text, observation in texts.items():
        said = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids = [*ids, *said, *turns.observe(observation, said[-1])]
    return ids


def whole(tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[int]:
    """The tokens that transformers gives a whole conversation, with the beginning of the next turn."""
    found: list[int] = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False, **options
    )
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_turns_of_the_user_are_written_as_in_the_whole_conversation(tokenizer: Any, template: str) -> None:
    turns = make(tokenizer, TEMPLATES[template])
    between = " " if template == "mistral" else ""
    said = {f"{between}the cat": "a dog", f"{between}sat": [{"role": "user", "content": "the mat"}]}
    ids = play(turns, tokenizer, [{"role": "user", "content": "ate"}], " the cat", said)
    conversation = [
        ("user", "ate the cat"),
        ("assistant", "the cat"),
        ("user", "a dog"),
        ("assistant", "sat"),
    ]
    messages = [{"role": role, "content": text} for role, text in (*conversation, ("user", "the mat"))]
    assert tokenizer.decode(ids) == tokenizer.decode(whole(tokenizer, messages))
    if template != "mistral":  # the blank before an answer is a token of the model
        assert ids[-20:] == whole(tokenizer, messages)[-20:]
    assert ids.count(tokenizer.bos_token_id) == (template == "qwen")


@pytest.mark.parametrize("template", TEMPLATES)
def test_two_results_of_tools_are_written_as_in_the_whole_conversation(tokenizer: Any, template: str) -> None:
    turns = make(tokenizer, TEMPLATES[template], tools=True)
    results = [{"role": "tool", "name": "add", "content": text} for text in ("the cat", "a dog")]
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "ate"},
        {"role": "assistant", "content": "sat", "tool_calls": [call]},
    ]
    tokenizer.chat_template = TEMPLATES[template]
    opened = whole(tokenizer, messages[:1], tools=[TOOL])
    text = tokenizer.decode(whole(tokenizer, messages, tools=[TOOL]))
    said = text.removeprefix(tokenizer.decode(opened)).partition("<|im_end|>")[0]
    ids = play(turns, tokenizer, messages[:1], None, {said: results})
    expected = whole(tokenizer, [*messages, *results], tools=[TOOL])
    assert tokenizer.decode(ids) == tokenizer.decode(expected)
    assert tokenizer.decode(ids).count("<|im_start|>user") == (
        2 if template == "qwen" else template == "llama"
    )


def test_a_turn_that_was_cut_gets_its_end(tokenizer: Any) -> None:
    turns = make(tokenizer, TEMPLATES["qwen"])
    whole_turn = turns.observe("a dog", tokenizer.eos_token_id)
    assert turns.observe("a dog", 5) == [tokenizer.eos_token_id, *whole_turn]
    assert tokenizer.decode(whole_turn) == "\n<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(turns.observe(None, tokenizer.eos_token_id)) == "\n<|im_start|>assistant\n"


def test_without_a_chat_template_observations_are_plain_text(tokenizer: Any) -> None:
    turns = make(tokenizer, None)
    assert tokenizer.decode(turns.open(" the cat")) == " the cat" and turns.open(None) == []
    assert tokenizer.decode(turns.observe(" a dog", tokenizer.eos_token_id)) == " a dog"
    with pytest.raises(UserError, match="has no chat template, which tools need"):
        make(tokenizer, None, tools=True)


def test_a_template_that_drops_the_reasoning_of_earlier_turns_is_refused_unless_they_are_kept(
    tokenizer: Any,
) -> None:
    with pytest.raises(UserError, match="drops the reasoning of earlier turns"):
        make(tokenizer, DROPS)
    turns = make(tokenizer, DROPS, earlier_turns="keep")
    thought = "<think>\nthe mat\n</think>\n\nthe cat"
    ids = play(turns, tokenizer, [{"role": "user", "content": "ate"}], None, {thought: "a dog"})
    assert "<think>\nthe mat\n</think>\n\nthe cat<|im_end|>\n<|im_start|>user\na dog" in tokenizer.decode(ids)


def test_a_long_observation_loses_its_end_and_keeps_the_turns_around_it(tokenizer: Any) -> None:
    turns = make(tokenizer, TEMPLATES["qwen"], longest=3)
    text = tokenizer.decode(turns.observe("the cat sat on the mat " * 1000, tokenizer.eos_token_id))
    assert text.startswith("\n<|im_start|>user\nthe cat sat") and len(text) < 80
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    messages = [{"role": "user", "content": "the cat " * 9}, {"role": "user", "content": "a dog"}]
    assert "a dog" not in tokenizer.decode(turns.observe(messages, tokenizer.eos_token_id))


@pytest.mark.parametrize("record", [{"chat_template_kwargs": {"a": 1}}, {"tools": [TOOL]}])
def test_arguments_of_single_records_are_refused(tokenizer: Any, record: Mapping[str, Any]) -> None:
    turns = make(tokenizer, TEMPLATES["qwen"], tools=True)
    with pytest.raises(BadRecordError, match="is not for an environment"):
        turns.check_record(record)


def test_a_template_that_changes_the_end_of_a_prompt_is_refused(tokenizer: Any) -> None:
    turns = make(
        tokenizer, "{% for m in messages %}{{ m.content[:10] }}<|im_end|>{% endfor %}", earlier_turns="keep"
    )
    assert turns.template is not None
    with pytest.raises(BadRecordError, match="does not write the end of the last message"):
        turns.template.write_prompt([{"role": "user", "content": "the cat sat on the mat"}])


def test_a_turn_is_read_without_the_token_or_the_stop_string_that_ended_it(tokenizer: Any) -> None:
    turns, end = make(tokenizer, TEMPLATES["qwen"]), tokenizer.eos_token_id
    said = tokenizer("the cat sat", add_special_tokens=False)["input_ids"]
    assert turns.read([*said, end], [end], None) == "the cat sat" == turns.read(said, [end], None)
    stop = StopStrings(tokenizer, GenerationConfig(stop=("sat",)))
    assert turns.read(said, [end], stop) == "the cat "
    assert turns.read(said[:-1], [end], stop) == tokenizer.decode(said[:-1])
    with_tools = make(tokenizer, TEMPLATES["qwen"], tools=True)
    assert with_tools.read([tokenizer.bos_token_id, *said, end], [end], stop) == "<s>the cat sat"
