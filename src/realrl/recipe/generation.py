"""Settings of generation."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from realrl.config.base import Settings

TokenId = Annotated[int, Field(ge=0, strict=True)]
"""Id of a token."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1)]
"""Text that ends an answer."""


class GenerationConfig(Settings):
    """How tokens are sampled."""

    max_new_tokens: int = Field(default=128, gt=0, le=10**7)
    """Maximum tokens of an answer. Generation stops here even without an end-of-sequence token."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum tokens of an answer. Before this number is reached, no end-of-sequence token is sampled."""
    stop_token_ids: tuple[TokenId, ...] | None = Field(
        default=None, min_length=1, strict=False
    )  # YAML has lists
    """Ids of the tokens that end a sequence. null uses the ids of the tokenizer and of the model's
    `generation_config.json` or `config.json`. An answer includes the token that ends it."""
    ignore_eos: bool = False
    """Whether no token ends a sequence. A sequence then continues to `max_new_tokens` or a stop string."""
    stop: Annotated[tuple[StopString, ...], BeforeValidator(_listed)] = Field(default=(), strict=False)
    """Texts that end an answer when they appear in it, such as ["\\n\\n", "Question:"]. The answer's text ends
    before the stop string. Its sampled tokens are kept up to the token that completes the stop string."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Number that logits are divided by. Sampler and trainer compute log-probabilities at the same temperature,
    over the whole vocabulary. Below 0.01, only the most likely token would be sampled, and gradients would explode;
    set `greedy` instead."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 for all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the most likely tokens whose probabilities add up to this number."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""

    @property
    def restricted(self) -> bool:
        """Whether some tokens are never sampled although their probability is positive."""
        return self.greedy or self.top_k > 0 or self.top_p < 1 or self.min_new_tokens > 0

    @property
    def certain(self) -> str | None:
        """The setting that always selects the likeliest token, with its value; None if tokens are sampled."""
        if self.greedy:
            return "greedy=true"
        return "top_k=1" if self.top_k == 1 else None

    def skews(self, temperature: float) -> bool:
        """Return whether the sampling distribution differs from the model's distribution at this temperature."""
        return self.restricted or self.temperature != temperature

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ignore_eos and self.stop_token_ids is not None:
            raise ValueError(
                "ignore_eos=true and stop_token_ids contradict each other; with stop_token_ids the model's own"
                " end of sequence ends nothing already"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}"
            )
        return self
