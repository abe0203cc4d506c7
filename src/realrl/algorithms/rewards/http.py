"""Rewards from a service: the user's own service, or a judge behind an OpenAI-style chat endpoint.

This module does not import torch.
"""

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from realrl.algorithms.base.scoring import RewardFailure, Score, Scorer, map_in_threads
from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.redaction import redact
from realrl.config.user_code import read_number, show
from realrl.config.values import Pattern, find_last

if TYPE_CHECKING:
    from httpx2 import Client, Response
    from tenacity import RetryCallState

RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which a request is retried."""
LONGEST_WAIT = 60.0
"""Maximum seconds between two tries, even if `Retry-After` asks for more."""
LARGEST_ANSWER = 16 << 20
"""Maximum bytes of an answer."""
GIVEN_UP_AFTER = 5
"""After this many requests in a row that failed in spite of retries, no more requests of a batch are sent."""
NUMBER = r"([-+]?\d+(?:\.\d+)?)"


class HttpConfig(Settings):
    """A service that scores samples: your own service, or a judge behind an OpenAI-style chat endpoint."""

    url: str
    """Address (http or https) that requests are posted to. For `chat`, it looks like
    https://HOST/v1/chat/completions."""
    kind: Literal["json", "chat"] = "json"
    """`json`: the request is {"prompts": [...], "completions": [...], FIELD: [...]}, the reply {"scores": [...]}.
    `chat`: each sample is one message, made from `prompt_template`; `score_pattern` finds the score in the
    reply."""
    fields: list[str] = Field(default_factory=list)
    """Columns of records that requests contain (`json`), or that `prompt_template` names (`chat`)."""
    model: str | None = None
    """Name of the judge's model. Only for `chat`."""
    prompt_template: str | None = None
    """Message to the judge, in which the texts of the sample replace {prompt}, {completion} and {FIELD}."""
    score_pattern: Pattern = NUMBER
    """Regular expression of the score in the judge's reply. The score is group 1 of the last match."""
    max_tokens: PositiveInt = 512
    """Maximum tokens of the judge's reply."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Mapping from each header to the environment variable that holds its value, so that keys stay out of recipes.
    An `Authorization` value without a scheme is sent as a bearer token."""
    batch: PositiveInt = 64
    """Samples per request of `json`."""
    concurrency: PositiveInt = 8
    """Requests that a rank sends at the same time."""
    request_timeout: PositiveFloat = 60.0
    """Seconds within which a request must be answered."""
    retries: NonNegativeInt = 3
    """Number of retries of a request that gets no answer, or a status such as 429 or 503."""
    backoff: PositiveFloat = 1.0
    """Seconds before the first retry. This delay doubles with each further retry, and varies randomly. If the
    service sends `Retry-After`, its number takes precedence."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={redact(self.url)}: write http://HOST:PORT/PATH, or https")
        if "@" in parts.netloc:
            raise ValueError(
                "url has a user or password in it; put `Basic BASE64` into an environment variable, and name that"
                " in headers.Authorization"
            )
        for header, variable in self.headers.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", variable):
                raise ValueError(
                    f"headers.{header} must be the name of an environment variable that holds the value, such as"
                    " SCORER_KEY, and not the value"
                )
        if self.kind == "chat":
            missing = [f for f in ("model", "prompt_template") if getattr(self, f) is None]
            if missing:
                raise ValueError(f"kind=chat needs {missing[0]}")
            named = set(re.findall(r"\{(\w+)\}", self.prompt_template or ""))
            if "completion" not in named:
                raise ValueError("prompt_template: {completion} is missing")
            unused = [field for field in self.fields if field not in named]
            if unused:
                raise ValueError(f"fields: prompt_template does not name {{{unused[0]}}}")
            if re.compile(self.score_pattern).groups < 1:
                raise ValueError("score_pattern: group 1, in parentheses, is missing")
        elif given := [f for f in ("model", "prompt_template") if getattr(self, f) is not None]:
            raise ValueError(f"{given[0]} is for kind=chat")
        return self

    def read_headers(self) -> dict[str, str]:
        """Read the values of headers. Raises UserError if a variable is not set."""
        found = {}
        for header, variable in self.headers.items():
            value = os.environ.get(variable)
            if not value:
                # The user may have written a key in place of a name, and messages must not show keys.
                known = f" {variable}" if variable.isupper() else ""
                raise UserError(f"headers.{header}: the environment variable{known} is not set")
            if not value.isascii() or not value.isprintable():
                raise UserError(
                    f"headers.{header}: {variable} holds a line break or another character that"
                    " headers cannot have"
                )
            bare = header.lower() == "authorization" and " " not in value
            found[header] = f"Bearer {value}" if bare else value
        return found


class RequestError(Exception):
    """A request without a usable answer. Its text follows the name of the service in messages."""


class _RetryableError(RequestError):
    """A request without an answer, or with a status in `RETRIED`."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HttpScorer(Scorer):
    """A service that is asked for scores."""

    def __init__(self, setting: str, config: HttpConfig) -> None:
        self.label = f"{setting} ({redact(config.url)})"
        self._setting, self._config = setting, config
        self._client: Client | None = None
        self._failures = 0
        """Number of consecutive failed requests of this batch, up to the latest request."""

    def load(self) -> None:
        """Open the client. Raises UserError if a header's variable is not set, or if the address is invalid."""
        import httpx2

        config = self._config
        headers = httpx2.Headers({"Content-Type": "application/json"})
        try:
            headers.update(config.read_headers())
            httpx2.URL(config.url)
        except UserError as error:
            raise UserError(f"{self._setting}.http.{error}") from None
        except httpx2.InvalidURL as error:
            raise UserError(f"{self._setting}.http.url={redact(config.url)}: {error}") from None
        # Threads of a call that has timed out may still hold connections, so their number is not limited.
        limits = httpx2.Limits(max_connections=None)
        # Redirects would send the request, and its keys, elsewhere.
        self._client = httpx2.Client(
            headers=headers, timeout=config.request_timeout, limits=limits, follow_redirects=False
        )

    def wants(self, name: str) -> bool:
        return name in ("prompts", "completions", *self._config.fields)

    @property
    def required(self) -> Sequence[str]:
        return self._config.fields

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        batched = self._config.kind == "json"
        size = self._config.batch if batched else 1
        parts = [
            {name: values[start : start + size] for name, values in arguments.items()}
            for start in range(0, count, size)
        ]
        self._failures = 0

        def ask(part: Mapping[str, list[Any]]) -> list[Score]:
            try:
                return self._ask_scores(part) if batched else [self._ask_judge(part)]
            except RequestError as error:
                return [RewardFailure(str(error))] * len(part["completions"])

        return [score for scores in map_in_threads(ask, parts, self._config.concurrency) for score in scores]

    def _ask_scores(self, part: Mapping[str, list[Any]]) -> list[Score]:
        count, reply = len(part["completions"]), self._post(part)
        scores = reply.get("scores") if isinstance(reply, Mapping) else None
        if not isinstance(scores, list) or len(scores) != count:
            found = f"{len(scores)} scores" if isinstance(scores, list) else show(reply)
            raise RequestError(f'answered {found}; it must answer {{"scores": [...]}}, {count} of them')
        return [_read_score(score) for score in scores]

    def _ask_judge(self, part: Mapping[str, list[Any]]) -> Score:
        config = self._config
        names = {"prompts": "prompt", "completions": "completion"}
        values = {names.get(name, name): value for name, (value,) in part.items()}
        template = config.prompt_template or ""
        message = re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), template)
        request = {"model": config.model, "messages": [{"role": "user", "content": message}]}
        reply = self._post({**request, "max_tokens": config.max_tokens, "temperature": config.temperature})
        try:
            text = reply["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            raise RequestError(f"answered {show(reply)}, which is no chat completion") from None
        last = find_last(config.score_pattern, text if isinstance(text, str) else "")
        if last is None or last.group(1) is None:
            raise RequestError(f"answered {show(text)}, in which score_pattern finds no score")
        try:
            return _read_score(float(last.group(1)))
        except ValueError:
            raise RequestError(f"answered a score {show(last.group(1))}, which is no number") from None

    def _post(self, request: Mapping[str, Any]) -> Any:
        """Post JSON, with retries, and return the JSON of the answer. Raises RequestError if there is no answer."""
        import tenacity

        if self._failures >= GIVEN_UP_AFTER:
            raise RequestError(f"was not asked: the last {self._failures} requests of the batch failed")
        tries = self._config.retries + 1
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_RetryableError),
            stop=tenacity.stop_after_attempt(tries),
            wait=self._wait,
            sleep=sleep,
            reraise=True,
        )
        try:
            answer = retrying(self._try, json.dumps(request, default=str).encode())
        except _RetryableError as error:
            self._failures += 1
            raise RequestError(f"{error} ({tries} tries)") from None
        except RequestError:
            self._failures = 0  # the service works, and refuses this request
            raise
        self._failures = 0
        return answer

    def _wait(self, state: "RetryCallState") -> float:
        """Choose the seconds before the next try: the service's `Retry-After`, or a doubled backoff with jitter."""
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, _RetryableError) and error.retry_after is not None:
            return min(error.retry_after, LONGEST_WAIT)
        doubled = self._config.backoff * 2 ** (state.attempt_number - 1)
        return min(doubled, LONGEST_WAIT) * random.uniform(0.5, 1)

    def _try(self, body: bytes) -> Any:
        import httpx2

        assert self._client is not None, "loaded before it is asked"
        seconds = self._config.request_timeout
        try:
            with self._client.stream("POST", self._config.url, content=body) as response:
                content = _read_answer(response, monotonic() + seconds)
        except httpx2.TimeoutException:
            raise _RetryableError(f"did not answer within {seconds:g} s") from None
        except httpx2.HTTPError as error:
            raise _RetryableError(f"cannot be reached: {error or type(error).__name__}") from None
        message = f"answered {response.status_code} {response.reason_phrase}"
        if response.status_code in RETRIED:
            after = response.headers.get("Retry-After", "")
            raise _RetryableError(message, float(after) if after.isdecimal() else None)
        if not response.is_success:
            raise RequestError(message)
        if len(content) > LARGEST_ANSWER:
            raise RequestError(f"answered more than {LARGEST_ANSWER >> 20} MiB")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise RequestError(f"answered {content[:40]!r}, which is no JSON") from None


def _read_answer(response: "Response", end: float) -> bytes:
    """Read an answer, but not far beyond `LARGEST_ANSWER`. Raises ReadTimeout at time `end`.

    The client's own timeout applies to each part of an answer, and an answer may have any number of parts.
    """
    import httpx2

    content = bytearray()
    for part in response.iter_bytes():
        content += part
        if monotonic() > end:
            raise httpx2.ReadTimeout("the answer is not complete")
        if len(content) > LARGEST_ANSWER:
            break
    return bytes(content)


def _read_score(value: Any) -> Score:
    """Read a score. None, which is null in JSON, means that the reward does not apply to the sample."""
    if value is None:
        return None
    number = None if isinstance(value, bool) else read_number(value)
    if number is None or abs(number) > 3e38:  # beyond float32
        return RewardFailure(f"answered {show(value)} for a completion; a score is a finite number or null")
    return number
