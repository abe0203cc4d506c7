"""Scores from a service: one of the user's own, or a judge behind an OpenAI-style endpoint. No torch."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from realrl.algorithms.rewards.http.client import Client, RequestError
from realrl.algorithms.rewards.http.config import HttpConfig
from realrl.algorithms.rewards.scoring.limits import map_in_threads
from realrl.algorithms.rewards.scoring.scores import RewardFailure, Score, check_required
from realrl.config.errors import UserError
from realrl.config.redaction import redact
from realrl.config.user_code import read_number, show
from realrl.config.values import find_last


class HttpScorer:
    """A service that is asked for scores."""

    def __init__(self, setting: str, config: HttpConfig) -> None:
        self.label = f"{setting} ({redact(config.url)})"
        self._setting, self._config = setting, config
        self._client: Client | None = None

    def load(self) -> None:
        """Read the headers; UserError where an environment variable is not set."""
        try:
            self._client = Client(self._config)
        except UserError as error:
            raise UserError(f"{self._setting}.http.{error}") from None

    def wants(self, name: str) -> bool:
        """Tell whether an argument is sent."""
        return name in ("prompts", "completions", *self._config.fields)

    @property
    def required(self) -> Sequence[str]:
        """Fields that are sent."""
        return self._config.fields

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that records have the fields that are sent; else UserError."""
        check_required(self, source, fields)

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        """Ask for all scores, some requests at a time."""
        size = self._config.batch if self._config.kind == "json" else 1
        parts = [
            {name: values[start : start + size] for name, values in arguments.items()}
            for start in range(0, count, size)
        ]
        ask = self._ask_scores if self._config.kind == "json" else self._ask_judge
        return [score for scores in map_in_threads(ask, parts, self._config.concurrency) for score in scores]

    def _ask_scores(self, part: Mapping[str, list[Any]]) -> list[Score]:
        count = len(part["completions"])
        try:
            reply = self._post(part)
        except RequestError as error:
            return [RewardFailure(str(error))] * count
        scores = reply.get("scores") if isinstance(reply, Mapping) else None
        if not isinstance(scores, list) or len(scores) != count:
            found = f"{len(scores)} scores" if isinstance(scores, list) else show(reply)
            return [
                RewardFailure(f'answered {found}; it must answer {{"scores": [...]}}, {count} of them')
            ] * count
        return [self._read(score) for score in scores]

    def _ask_judge(self, part: Mapping[str, list[Any]]) -> list[Score]:
        config = self._config
        names = {"prompts": "prompt", "completions": "completion"}
        values = {names.get(name, name): value for name, (value,) in part.items()}
        message = re.sub(
            r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), config.prompt_template or ""
        )
        request = {
            "model": config.model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        try:
            reply = self._post(request)
        except RequestError as error:
            return [RewardFailure(str(error))]
        try:
            text = reply["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            return [RewardFailure(f"answered {show(reply)}, which is no chat completion")]
        last = find_last(config.score_pattern, text if isinstance(text, str) else "")
        if last is None or last.group(1) is None:
            return [RewardFailure(f"answered {show(text)}, in which score_pattern finds no score")]
        try:
            return [self._read(float(last.group(1)))]
        except ValueError:
            return [RewardFailure(f"answered a score {show(last.group(1))}, which is no number")]

    def _read(self, value: Any) -> Score:
        """Read a score; null where the reward does not apply."""
        if value is None:
            return None
        number = None if isinstance(value, bool) else read_number(value)
        if number is None or abs(number) > 3e38:
            return RewardFailure(
                f"answered {show(value)} for a completion; a score is a finite number or null"
            )
        return number

    def _post(self, request: Mapping[str, Any]) -> Any:
        assert self._client is not None, "loaded before it is asked"
        return self._client.post(json.dumps(request, default=str).encode())
