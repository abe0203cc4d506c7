"""From the texts of an item to the rows of tokens that a graph's source keys name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.config.data import DataConfig
from realrl.config.errors import UserError
from realrl.data.forms import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Row:
    """The tokens of one text, of which the first `prompt_length` are its prompt."""

    ids: list[int]
    prompt_length: int


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast") -> None:
    """UserError unless the tokenizer can end a sequence."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {tokenizer.name_or_path} has no end-of-sequence token (eos_token)")


def tokenize(texts: Sequence[Text], tokenizer: "PreTrainedTokenizerFast") -> list[Row]:
    """A row per text: [BOS] prompt answer [EOS].

    Prompt and answer are tokenised apart, so that a prompt has the same tokens in training as in generation.
    BOS is added where the tokenizer has one and no template wrote the prompt. What a template writes after
    the last EOS of an answer is dropped.
    """
    parts = list(dict.fromkeys(part for text in texts for part in (text.prompt, text.answer) if part))
    encoded = (
        tokenizer(parts, add_special_tokens=False, return_attention_mask=False)["input_ids"] if parts else []
    )
    ids: dict[str | None, list[int]] = {"": [], **dict(zip(parts, encoded, strict=True))}
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = []
    for text in texts:
        prompt = ids[text.prompt] if text.templated else bos + ids[text.prompt]
        if text.answer is None:
            rows.append(Row(prompt, len(prompt)))
            continue
        answer = ids[text.answer]
        if text.templated:
            answer = _until_last(tokenizer.eos_token_id, answer)
        rows.append(Row([*prompt, *answer, tokenizer.eos_token_id], len(prompt)))
    return rows


def complaint(rows: Sequence[Row], config: DataConfig) -> str | None:
    """Why an item with these rows cannot be used, or None."""
    for row in rows:
        if not row.prompt_length:
            return "an empty prompt needs a tokenizer with a beginning-of-sequence token (bos_token)"
        if row.prompt_length > config.max_prompt_tokens:
            return (
                f"the prompt has {row.prompt_length} tokens, more than data.max_prompt_tokens="
                f"{config.max_prompt_tokens}"
            )
        if len(row.ids) > config.max_tokens:
            return (
                f"prompt and answer have {len(row.ids)} tokens, more than data.max_tokens={config.max_tokens}"
            )
    return None


def field(key: str, rows: Sequence[Row]) -> list[int]:
    """The row of a source key for an item with these rows."""
    if key == "prompt_length":
        return [rows[0].prompt_length]
    return rows[1].ids if key == "rejected" else rows[0].ids


def _until_last(end: int, ids: list[int]) -> list[int]:
    """The ids before the last `end`; all where there is none."""
    return ids[: len(ids) - 1 - ids[::-1].index(end)] if end in ids else ids
