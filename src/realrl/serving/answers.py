"""Answers in the form of OpenAI's API, whole or in chunks. Does not import torch."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realrl.serving.decoding import TokenTexts
from realrl.serving.requests import ChatBody, CompletionBody, SamplingBody
from realrl.serving.samples import Delta


@dataclass
class Usage:
    """Numbers of tokens of a request. A prompt counts once, however many samples it has."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the usage in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer:
    """Writes the answer to one request: as a whole, or as the chunks of a stream."""

    whole_object: str
    chunk_object: str
    prefix: str

    def __init__(
        self, body: SamplingBody, model: str, prompts: Sequence[Sequence[int]], texts: TokenTexts
    ) -> None:
        """`prompts`: the tokens of each prompt. Sample number i belongs to prompt number i // n."""
        self._body, self._model, self._prompts, self._texts = body, model, prompts, texts
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._begun: set[int] = set()

    def write_whole(self, samples: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """Write the whole answer."""
        choices = [{**self._choose(i, sample), **self._say(sample)} for i, sample in enumerate(samples)]
        return {**self._open(self.whole_object), "choices": choices, "usage": usage.to_json()}

    def write_chunk(self, sample: int, delta: Delta) -> dict[str, Any]:
        """Write news about a sample."""
        opened = self._open(self.chunk_object)
        choice = {**self._choose(sample, delta), **self._say_news(delta, first=sample not in self._begun)}
        self._begun.add(sample)
        usage = {"usage": None} if self._body.include_usage else {}
        return {**opened, "choices": [choice], **usage}

    def write_usage(self, usage: Usage) -> dict[str, Any]:
        """Write the last chunk of a stream."""
        return {**self._open(self.chunk_object), "choices": [], "usage": usage.to_json()}

    def _open(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choose(self, sample: int, delta: Delta) -> dict[str, Any]:
        """Write the parts of a choice that whole answers and chunks share."""
        logprobs = self._write_logprobs(delta) if self._body.wants_logprobs else None
        choice = {"index": sample, "logprobs": logprobs, "finish_reason": delta.finish}
        return {**choice, "token_ids": delta.tokens} if self._body.return_token_ids else choice

    def _say(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _say_news(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _write_logprobs(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """Answer of /v1/completions."""

    whole_object = chunk_object = "text_completion"
    prefix = "cmpl"

    def _choose(self, sample: int, delta: Delta) -> dict[str, Any]:
        choice = super()._choose(sample, delta)
        # As in vLLM, the first chunk of a choice has the tokens of its prompt.
        if self._body.return_token_ids and sample not in self._begun:
            choice["prompt_token_ids"] = list(self._prompts[sample // self._body.n])
        return choice

    def _say(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def _say_news(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        return {"text": delta.text}

    def _write_logprobs(self, delta: Delta) -> dict[str, Any]:
        return {
            "tokens": [self._texts.name(token)[0] for token in delta.tokens],
            "token_logprobs": delta.logprobs,
            "top_logprobs": None,
            "text_offset": delta.offsets,
        }


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def _open(self, kind: str) -> dict[str, Any]:
        opened = super()._open(kind)
        # As in vLLM, whole answers and the first chunk of a stream have the tokens of the prompt.
        if self._body.return_token_ids and not self._begun:
            opened["prompt_token_ids"] = list(self._prompts[0])
        return opened

    def _say(self, delta: Delta) -> dict[str, Any]:
        return {"message": write_message(delta)}

    def _say_news(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        news: dict[str, Any] = {"role": "assistant"} if first else {}
        if delta.text or (first and not delta.calls):
            news["content"] = delta.text
        if delta.calls:
            news["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta.calls)]
        return {"delta": news}

    def _write_logprobs(self, delta: Delta) -> dict[str, Any]:
        entries = []
        for token, logprob in zip(delta.tokens, delta.logprobs, strict=True):
            text, content = self._texts.name(token)
            entries.append({"token": text, "logprob": logprob, "bytes": content, "top_logprobs": []})
        return {"content": entries, "refusal": None}


def write_message(delta: Delta) -> dict[str, Any]:
    """Write a turn of the model as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.calls:
        message |= {"content": delta.text or None, "tool_calls": delta.calls}
    return message


def make_answer(
    body: SamplingBody, model: str, prompts: Sequence[Sequence[int]], texts: TokenTexts
) -> Answer:
    """Make the writer of the answer to a request."""
    kinds: Mapping[type[SamplingBody], type[Answer]] = {
        ChatBody: ChatAnswer,
        CompletionBody: CompletionAnswer,
    }
    return kinds[type(body)](body, model, prompts, texts)
