"""Settings of the data of a run."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.explain import shorten
from realrl.config.files import reason_of
from realrl.config.paths import local_path
from realrl.recipe.sources import SourceList, list_sources

_LONGEST_PATH = 256
"""Maximum characters of text that may be a path. Longer text must be a template, and is shortened in messages."""


class DataConfig(Settings):
    """Records: their sources, their lengths, and how many a step takes."""

    train: SourceList
    """A .jsonl, .json, .csv or .parquet file. Globs and a final .gz or .zst are allowed. Other sources are a
    directory of such files, a Hugging Face data set as `name:split` or `name/config:split`, and a list of sources.
    A mixture is written as `{SOURCE: WEIGHT, ...}`. An epoch takes each record WEIGHT times: 2 takes it twice, 0.5
    takes a different half of the records in each epoch."""
    eval: SourceList | None = None
    """Records for evaluation, written like `train` but without weights; null for no evaluation."""
    columns: dict[str, str] = Field(default={})
    """New names for fields of records: `{question: prompt}`. A dot selects a nested field, which is copied:
    `{reward_model.ground_truth: answer}`."""
    batch: PositiveInt = 64
    """Number of sequences (or preference pairs, or prompts) per training step, over all devices."""
    eval_batch: PositiveInt | None = None
    """Number of records per evaluation step; by default `batch`."""
    max_tokens: PositiveInt = 1024
    """Maximum length of prompt and answer together, in tokens."""
    max_prompt_tokens: PositiveInt = 512
    """Maximum length of a prompt in tokens. The prompt is everything before the first answer to train on. If
    `max_tokens` is below the default of this setting, the default is `max_tokens`."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do with a malformed record. Skipped records are counted and reported."""
    on_too_long: Literal["fail", "skip", "keep_start", "keep_end"] | None = None
    """What to do with a record longer than `max_tokens`, or a prompt longer than `max_prompt_tokens`; null for the
    same as `on_error`. Skipped records are counted and reported. `keep_start` and `keep_end` cut tokens. Both cut a
    prompt at its beginning. If the record is still too long, `keep_start` cuts the end of the answer, and
    `keep_end` cuts more of the beginning. A record whose answers are cut away completely is skipped."""
    apply_chat_template: bool = False
    """Write plain-text prompts with the tokenizer's chat template, as one user turn, and answers as the assistant
    turn. false uses the text unchanged. Messages always use the template."""
    chat_template: str | None = None
    """Chat template that replaces the tokenizer's: a file, or the text itself. The run stores the text, and saved
    models contain it."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as `{enable_thinking: false}`; a record's arguments take precedence."""
    train_on: Literal["all", "last"] = "all"
    """Assistant turns of a {messages} record that fine-tuning trains on. With `last`, all earlier turns are the
    prompt. If the template writes a turn differently when more turns follow, `all` makes a separate sequence for
    each turn."""
    max_pairs_per_prompt: PositiveInt = 8
    """Maximum number of pairs from one record with `pos_answers` and `neg_answers`."""
    pair_weight: Literal["pair", "prompt"] = "pair"
    """`pair` gives every pair the same weight. `prompt` gives every prompt the same weight, so each of the n pairs
    of a record has weight 1/n."""
    shuffle: bool = True
    """Shuffle records, depending on the seed; false keeps their order."""

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, value: str | None) -> str | None:
        return None if value is None else read_chat_template(value)

    @field_validator("eval")
    @classmethod
    def _unweighted(cls, value: Any) -> Any:
        if value is not None and any(source.weight != 1 for source in list_sources(value)):
            raise ValueError("an evaluation takes every record once; give a list without weights")
        return value

    @model_validator(mode="after")
    def _prompts_fit(self) -> Self:
        if self.max_prompt_tokens > self.max_tokens:
            if "max_prompt_tokens" in self.model_fields_set:
                raise ValueError(
                    f"max_prompt_tokens={self.max_prompt_tokens} is above max_tokens={self.max_tokens}, the most"
                    " that prompt and answer may have together"
                )
            # No other code has seen the object yet, so it still counts as immutable.
            object.__setattr__(self, "max_prompt_tokens", self.max_tokens)
        return self


def read_chat_template(value: str) -> str:
    """Return a chat template, which is either given itself or as the path of its file. Raises ValueError."""
    if "{{" in value or "{%" in value:
        return value
    try:
        return local_path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        named = value if len(value) < _LONGEST_PATH else shorten(value)
        raise ValueError(f"{named} cannot be read as a chat template: {reason}") from None
