"""Settings of rewards from a service. No torch."""

import os
import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.redaction import redact
from realrl.config.values import Pattern

NUMBER = r"([-+]?\d+(?:\.\d+)?)"


class HttpConfig(Settings):
    """A service that scores samples: one of your own, or a judge behind an OpenAI-style chat endpoint."""

    url: str
    """Address that is posted to, http or https; for `chat` such as https://HOST/v1/chat/completions."""
    kind: Literal["json", "chat"] = "json"
    """`json`: the request is {"prompts": [...], "completions": [...], FIELD: [...]}, the reply {"scores": [...]}.
    `chat`: one message per sample, made of `prompt_template`, and the score is read from the reply by
    `score_pattern`."""
    fields: list[str] = Field(default_factory=list)
    """Fields of records that are sent along, or that the template names."""
    model: str | None = None
    """Name of the judge, for `chat`."""
    prompt_template: str | None = None
    """Message to the judge, in which {prompt}, {completion} and {FIELD} are replaced."""
    score_pattern: Pattern = NUMBER
    """Regular expression of the score in the judge's reply: group 1 of its last match."""
    max_tokens: PositiveInt = 512
    """Bound on the tokens of the judge's reply."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Header -> the environment variable that holds its value, so that keys stay out of recipes; `Authorization` of
    a value without a scheme is sent as a bearer token."""
    batch: PositiveInt = 64
    """Samples per request of `json`."""
    concurrency: PositiveInt = 8
    """Requests that a rank has under way at a time."""
    request_timeout: PositiveFloat = 60.0
    """Seconds within which a request must be answered."""
    retries: NonNegativeInt = 3
    """Times that a request is repeated which got no answer, or one that says to come later (429, 5xx)."""
    backoff: PositiveFloat = 1.0
    """Seconds before the first repetition, doubled for each further one, with jitter; `Retry-After` of the service
    takes precedence."""

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
        else:
            given = [f for f in ("model", "prompt_template") if getattr(self, f) is not None]
            if given:
                raise ValueError(f"{given[0]} is for kind=chat")
        return self

    def read_headers(self) -> dict[str, str]:
        """Read the values of headers; UserError where a variable is not set."""
        found = {}
        for header, variable in self.headers.items():
            value = os.environ.get(variable)
            if not value:
                # A key that was written in place of a name may look like one.
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
