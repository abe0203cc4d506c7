"""Offline generation, with the names that users of vLLM know."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realrl.api.errors import plain_errors
from realrl.api.sampling import Sampling
from realrl.api.session import Prompt, Session
from realrl.checkpoint.saved import find_final_model
from realrl.config.errors import UserError


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """Number of the answer among those to its prompt."""
    text: str
    """Text without special tokens, and without the stop string that ended it."""
    token_ids: list[int]
    """Tokens as sampled, with end-of-sequence or stop string."""
    logprobs: list[float]
    """Log-probability of each token, at the temperature of sampling and over the whole vocabulary."""
    finish_reason: str
    """`stop` if the answer ended by itself, `length` if it reached `max_new_tokens`."""

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities of all tokens."""
        return sum(self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answers."""

    prompt: Prompt
    """The prompt as given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A language model that answers prompts. Its weights stay in memory until `close`, or the end of the script."""

    @plain_errors
    def __init__(self, model: Any, **settings: Any) -> None:
        """Load a model: a path, the directory of a run, a hub name, a `transformers` model, or a section as in
        recipes.

        settings: those of `Session`, such as cluster, device, plan, seed, and micro_batch_tokens: the number of
        tokens that the KV cache holds at a time. Raises UserError for a mistake.
        """
        found = find_final_model(os.fspath(model)) if isinstance(model, str | os.PathLike) else model
        self._session = Session({"actor": found}, **settings)

    @plain_errors
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | None = None, **settings: Any
    ) -> list[RequestOutput]:
        """Answer prompts, in their order. sampling or settings: see `Sampling`.

        A prompt is text, a list of tokens, or a conversation: a list of messages, which goes through the chat
        template. Each call draws other samples; the first call with a seed always draws the same. Raises UserError
        for a mistake.
        """
        if sampling is not None and settings:
            raise UserError("give either a Sampling object or its settings")
        chosen = sampling or Sampling(**settings)
        asked = [prompts] if _is_one(prompts) else list(prompts)
        if not asked:
            return []
        batch = self._session.sample(asked, chosen)  # type: ignore[arg-type]
        texts, ids, finished = batch.completions, batch.completion_ids, batch.finished
        rows = [row[cut:].tolist() for row, cut in zip(batch["logprobs"], batch.prompt_lengths, strict=True)]
        answers = [
            CompletionOutput(i % chosen.n, texts[i], ids[i], rows[i], "stop" if finished[i] else "length")
            for i in range(len(batch))
        ]
        starts = [row[:cut] for row, cut in zip(batch.sequences, batch.prompt_lengths, strict=True)]
        return [
            RequestOutput(prompt, starts[i * chosen.n], answers[i * chosen.n : (i + 1) * chosen.n])  # type: ignore[arg-type]
            for i, prompt in enumerate(asked)
        ]

    def close(self) -> None:
        """Free the model."""
        self._session.close()


def _is_one(prompts: Any) -> bool:
    """Return whether this is a single prompt: text, tokens, or messages."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
