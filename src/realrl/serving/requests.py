"""Bodies of requests: their fields, and checks of them. Does not import torch.

No field is ignored in silence. A field is used, or it may only have the value that changes nothing
(`_WITHOUT_EFFECT`), or it is documented as having no effect (`IGNORED`). All others are refused. A null is the same
as no field.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from realrl.config.explain import brief, nearest
from realrl.data.record_forms import read_messages
from realrl.data.rejects import BadRecordError
from realrl.data.tools import read_tools
from realrl.serving.engine import Engine, SamplingOptions
from realrl.serving.refusal import RefusedError

IGNORED = ("metadata", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
"""Fields without any effect here. They concern accounts, prices and logs of a provider."""

_ONLY_SAMPLED = "the engine gives the log-probabilities of sampled tokens alone"
_WITHOUT_EFFECT: Mapping[str, tuple[Any, str]] = {
    "audio": ({}, "answers are text"),
    "best_of": (1, "use n"),
    "echo": (False, "the prompt is not part of the answer; return_token_ids=true returns its tokens"),
    "frequency_penalty": (0, "penalties are not supported"),
    "function_call": ("auto", "use tools and tool_choice"),
    "functions": ([], "use tools"),
    "include_stop_str_in_output": (False, "text ends before a stop string"),
    "length_penalty": (1, "penalties are not supported"),
    "logit_bias": ({}, "logits are not changed"),
    "min_p": (0, "use top_p or top_k"),
    "modalities": (["text"], "answers are text"),
    "parallel_tool_calls": (True, "the model decides how many tools it calls"),
    "presence_penalty": (0, "penalties are not supported"),
    "repetition_penalty": (1, "penalties are not supported"),
    "response_format": ({"type": "text"}, "answers are not constrained to a grammar"),
    "spaces_between_special_tokens": (True, "text is decoded as the tokenizer does it"),
    "suffix": ("", "text is only written after a prompt"),
    "top_logprobs": (0, _ONLY_SAMPLED),
    "use_beam_search": (False, "answers are sampled"),
}
"""Field -> the only accepted value, and the reason."""

_LONGEST_STOP = 1000
"""Maximum characters of a stop string."""

TokenId = Annotated[int, Field(ge=0)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _StreamOptions(_Body):
    include_usage: bool = False


class SamplingBody(_Body):
    """Fields that both kinds of requests share. See docs/serving.md."""

    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]], BeforeValidator(_listed)
    ] = []
    stop_token_ids: list[TokenId] = []
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read the body of a request. Raises RefusedError if it is not valid."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError("the body is not valid JSON") from None
        if not isinstance(fields, dict):
            raise RefusedError("the body must be a JSON object")
        try:
            made = cls.model_validate(_select_fields(cls, fields))
        except ValidationError as error:
            raise _explain(error, cls) from None
        if made.stream_options is not None and not made.stream:
            raise RefusedError("stream_options needs stream=true", param="stream_options")
        if 0 < made.temperature < 0.01:
            raise RefusedError("temperature must be 0 or at least 0.01", param="temperature")
        return made

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        raise NotImplementedError

    def limit_tokens(self, free: int) -> int:
        """Choose the maximum tokens of an answer if `free` tokens fit into the context."""
        raise NotImplementedError

    def make_options(self, prompt: Sequence[int], engine: Engine) -> SamplingOptions:
        """Make the options for a prompt. Raises RefusedError if they do not fit the prompt and the engine."""
        free = engine.context_tokens - len(prompt)
        limit = self.limit_tokens(free)
        if not prompt:
            raise RefusedError("the prompt is empty", param="prompt")
        most = max(limit, 1)
        if free < most:
            raise RefusedError(
                f"{engine.context_setting or 'the model'} allows {engine.context_tokens} tokens of prompt and"
                f" answer; the prompt has {len(prompt)} tokens, and the answer may have {most}, together"
                f" {len(prompt) + most}",
                param="messages" if isinstance(self, ChatBody) else "prompt",
                code="context_length_exceeded",
            )
        if self.min_tokens > limit:
            raise RefusedError(
                f"min_tokens={self.min_tokens} is above the limit of {limit} tokens", param="min_tokens"
            )
        check_tokens(self.stop_token_ids, engine.vocab_size, "stop_token_ids")
        return SamplingOptions(
            max_tokens=limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
        )


class CompletionBody(SamplingBody):
    """Body of a request to /v1/completions."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or as tokens. Raises RefusedError if the field has another form."""
        value = self.prompt
        if isinstance(value, str) or _is_tokens(value):
            return [value]
        if (
            isinstance(value, list)
            and value
            and all(isinstance(one, str) or _is_tokens(one) for one in value)
        ):
            return value
        raise RefusedError(
            "prompt must be a text, a list of texts, a list of token ids, or a list of such lists, and not empty",
            param="prompt",
        )

    def limit_tokens(self, free: int) -> int:
        return self.max_tokens or 16  # OpenAI's default

    @classmethod
    def read(cls, body: bytes) -> Self:
        made = super().read(body)
        if (made.logprobs or 0) > 1:
            raise RefusedError(f"logprobs must be 0 or 1: {_ONLY_SAMPLED}", param="logprobs")
        return made


class ChatBody(SamplingBody):
    """Body of a request to /v1/chat/completions."""

    messages: Any = None
    prompt_token_ids: list[TokenId] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: Any = None
    tool_choice: Any = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prompt_cache_key: str = ""

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    def limit_tokens(self, free: int) -> int:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise RefusedError(
                "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens"
            )
        return max((limit for limit in given if limit is not None), default=free)

    def read_chat(self) -> "Chat":
        """Read the conversation. Raises RefusedError if it is not valid."""
        if self.tool_choice not in ("auto", "none"):
            raise RefusedError(
                "tool_choice must be auto or none, because answers are not constrained to a grammar",
                param="tool_choice",
            )
        options = {name: value for name, value in self.chat_template_kwargs.items() if value is not None}
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        messages = []
        if self.messages is not None or self.prompt_token_ids is None:
            messages = _read("messages", lambda: read_messages({"messages": self.messages}, "messages"))
        tools = _read("tools", lambda: read_tools(self.tools))
        if not all(map(_is_function, tools)):
            raise RefusedError(
                "a tool must be {type: function, function: {name, description, parameters}}", param="tools"
            )
        return Chat(
            messages=messages,
            tools=[] if self.tool_choice == "none" else tools,
            options=options,
            ending=self._choose_ending(messages),
            key=self.prompt_cache_key,
        )

    def _choose_ending(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if not self.continue_final_message:
            return "asked" if self.add_generation_prompt else ""
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise RefusedError(
                "continue_final_message and add_generation_prompt contradict each other",
                param="continue_final_message",
            )
        if not messages or messages[-1]["role"] != "assistant":
            raise RefusedError(
                "continue_final_message=true needs an assistant message at the end", param="messages"
            )
        return "continued"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation that the model should answer."""

    messages: list[dict[str, Any]]
    """Messages; arguments of tool calls are objects (`data.tools.Arguments`)."""
    tools: list[dict[str, Any]]
    """Schemas of the tools that the model may call."""
    options: dict[str, Any]
    """Further arguments of the chat template."""
    ending: str = "asked"
    """`asked`: the beginning of an answer follows. `continued`: the last message stays open. Empty: neither."""
    key: str = ""
    """Name that keeps conversations apart which have the same messages, but other tokens."""


def check_tokens(tokens: Sequence[int], vocabulary: int, param: str) -> None:
    """Raise RefusedError if a token is not in the vocabulary."""
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise RefusedError(
            f"{param}: token {wrong} is not in the vocabulary of {vocabulary} tokens", param=param
        )


def _is_function(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return (
        tool.get("type") == "function"
        and isinstance(function, dict)
        and isinstance(function.get("name"), str)
    )


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _select_fields(cls: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that change nothing. Raises RefusedError for other values of fields that are not supported."""
    kept = {}
    for name, value in fields.items():
        if value is None or (name in IGNORED and name not in cls.model_fields):
            continue
        accepted, reason = _WITHOUT_EFFECT.get(name, (None, ""))
        if name in _WITHOUT_EFFECT:
            if value != accepted:
                raise RefusedError(
                    f"{name} may only be {json.dumps(accepted)}, not {brief(value)}: {reason}",
                    param=name,
                    code="unsupported_parameter",
                )
            continue
        kept[name] = value
    return kept


def _explain(error: ValidationError, cls: type[BaseModel]) -> RefusedError:
    mistake = error.errors()[0]
    place, *further = mistake["loc"]
    param = str(place) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in further)
    if mistake["type"] == "missing":
        return RefusedError(f"{param} is missing", param=param, code="missing_required_parameter")
    if mistake["type"] == "extra_forbidden":
        meant = nearest(param, cls.model_fields)
        hint = f"; did you mean {meant}?" if meant else ""
        return RefusedError(f"unknown field {param[:80]!r}{hint}", param=param[:80], code="unknown_parameter")
    message = mistake["msg"][0].lower() + mistake["msg"][1:]
    return RefusedError(f"{param}: {message}, not {brief(mistake['input'])}", param=param)


Value = TypeVar("Value")


def _read(param: str, read: Callable[[], Value]) -> Value:
    try:
        return read()
    except (BadRecordError, RecursionError) as error:
        raise RefusedError(str(error) or f"{param} is nested too deeply", param=param) from None
