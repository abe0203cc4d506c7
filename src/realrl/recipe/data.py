"""Settings of the data of a run, and of the training loop."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.explain import shorten
from realrl.config.files import reason_of
from realrl.config.paths import local_path
from realrl.recipe.sources import SourceList, list_sources

_LONGEST_PATH = 256
"""Characters of what may be a path; longer text is a template that writes no field, and is cut in messages."""


class DataConfig(Settings):
    """Source of records, and how many go into a step."""

    train: SourceList
    """A .jsonl, .json, .csv or .parquet file. Globs and .gz or .zst at its end are allowed; so are a directory of
    such files, a Hugging Face data set as `name:split` or `name/config:split`, and a list of these. In a mixture,
    `{SOURCE: WEIGHT, ...}`, an epoch takes WEIGHT times as many records as the source has: 2 takes each twice, 0.5
    another half in every epoch."""
    eval: SourceList | None = None
    """Records to evaluate on, in the same form; null for no evaluation. They have no weights."""
    columns: dict[str, str] = Field(default={})
    """Fields of records by the names that they are to have: `{question: prompt}`. A dot leads into a nested field,
    which stays where it is: `{reward_model.ground_truth: answer}`."""
    batch: PositiveInt = 64
    """Sequences (or preference pairs, or prompts) per training step, over all devices."""
    eval_batch: PositiveInt | None = None
    """Records per evaluation step; as many as `batch` when not given."""
    max_tokens: PositiveInt = 1024
    """Longest training sequence, in tokens, prompt and answer together."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt, in tokens: all that comes before the first answer to learn. Where it is not given, at most
    `max_tokens`."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do with a record that is malformed. Skipped records are counted and reported."""
    on_too_long: Literal["fail", "skip", "keep_start", "keep_end"] | None = None
    """What to do with a record that is longer than `max_tokens`, or its prompt than `max_prompt_tokens`; null for
    the same as `on_error`. Records that are left out are counted and reported. `keep_start` and `keep_end` cut
    tokens: a prompt always loses its beginning; of prompt and answer together `keep_start` drops the end of the
    answer, and `keep_end` more of the beginning. A record that has nothing to learn then is left out."""
    apply_chat_template: bool = False
    """Write prompts of plain text with the tokenizer's chat template, as one user turn, and answers to them as
    the assistant turn. False uses text as it stands. Messages always take the template."""
    chat_template: str | None = None
    """Chat template instead of the tokenizer's: a file, or the text itself. A run keeps the text, and saved models
    have it."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as `{enable_thinking: false}`; those of a record take precedence."""
    train_on: Literal["all", "last"] = "all"
    """Assistant turns of a {messages} record that are trained on; applies to fine-tuning. `last` has the other
    turns as the prompt. If the template writes a turn differently once others follow, `all` makes a sequence of
    each."""
    max_pairs_per_prompt: PositiveInt = 8
    """Most pairs made out of one record with `pos_answers` and `neg_answers`."""
    pair_weight: Literal["pair", "prompt"] = "pair"
    """What weighs the same among preference pairs: every `pair`, or every `prompt`, each of the n pairs of one
    record weighing 1/n."""
    shuffle: bool = True
    """Draw records in an order that depends on the seed; false keeps the order of the file."""

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, value: str | None) -> str | None:
        if value is None or "{{" in value or "{%" in value:
            return value
        try:
            return local_path(value).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "it is not UTF-8 text"
            named = value if len(value) < _LONGEST_PATH else shorten(value)
            raise ValueError(f"{named} cannot be read as a chat template: {reason}") from None

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
            # Before anyone else sees the object, so it is still as good as immutable.
            object.__setattr__(self, "max_prompt_tokens", self.max_tokens)
        return self


class SpikeConfig(Settings):
    """Spikes of a metric, after which training goes back to a checkpoint and leaves out the records since."""

    metric: str
    """Metric of training steps, `call/name` as in metrics.jsonl, such as `actor.train/loss`."""
    factor: float = Field(default=3.0, gt=1, le=1e6)
    """A value is a spike where it is farther above the median of the values before than so many times their usual
    distance from it (the median distance)."""
    window: int = Field(default=32, ge=4, le=10**5)
    """Values before that are looked at; there must be at least half as many."""
    back: PositiveInt = 1
    """Go back at least so many steps before the spike, to the last checkpoint that is as old as that."""
    most: PositiveInt = 3
    """How often in a run; the next spike ends it."""


class TrainingConfig(Settings):
    """Length of training, and what stops it or sets it back."""

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the training data. Every step has `data.batch` records: the last one fills up with records of the
    next epoch, and a note says so."""
    steps: int | None = Field(default=None, gt=0, le=10**9)
    """Number of training steps; takes precedence over `epochs`."""
    spike: SpikeConfig | None = None
    """Go back where a metric rises far above its usual values; null for never."""
    max_skipped: PositiveInt = 10
    """Stop the run when this many optimizer steps of a call in a row were skipped because their gradient was not
    finite, or some in each of this many training steps in a row. A run whose last training step skipped all of
    them, or every one some, ends with an error, too."""
