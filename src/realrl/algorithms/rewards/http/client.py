"""Requests that are repeated within bounds. No torch."""

import json
import random
import threading
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from time import monotonic, sleep, time
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from realrl.algorithms.rewards.http.config import HttpConfig

REPEATED = (408, 425, 429, 500, 502, 503, 504)
"""Answers that say to come again."""
LONGEST_WAIT = 60.0
"""Seconds between two tries, whatever the service says."""
LARGEST_ANSWER = 16 << 20
TRIPPED_AFTER = 5
"""Requests in a row that must fail, all repetitions included, until no more are sent for a while."""
PAUSE = 30.0
"""Length of that while, in seconds."""


class RequestError(Exception):
    """A request without a usable answer. Its text follows the name of the service."""


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects, which would send the request, and its keys, elsewhere."""

    def redirect_request(self, *arguments: Any) -> None:
        """Send nothing."""


class CircuitBreaker:
    """Stops requests to a service that answers none, so that every further sample does not wait in vain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_until = 0.0

    def check(self) -> None:
        """RequestError while no requests are sent; after that, the next one decides."""
        with self._lock:
            if monotonic() < self._closed_until:
                raise RequestError(
                    f"was not asked: its last {self._failures} requests failed, so none is sent for {PAUSE:g} s"
                )

    def report(self, *, success: bool) -> None:
        """Count a request that has got its answer, or will get none."""
        with self._lock:
            self._failures = 0 if success else self._failures + 1
            if self._failures >= TRIPPED_AFTER:
                self._closed_until = monotonic() + PAUSE


class Client:
    """Client of one service."""

    def __init__(self, config: HttpConfig) -> None:
        """UserError where a header's environment variable is not set."""
        self._config = config
        self._headers = {"Content-Type": "application/json", **config.read_headers()}
        self._opener = build_opener(_NoRedirects())
        self._breaker = CircuitBreaker()

    def post(self, body: bytes) -> Any:
        """Post JSON: the JSON of the answer. RequestError where there is none, after the retries."""
        for attempt in range(self._config.retries + 1):
            self._breaker.check()
            try:
                answer = self._try(body)
            except _Unavailable as error:
                if attempt == self._config.retries:
                    self._breaker.report(success=False)
                    raise RequestError(f"{error} ({attempt + 1} tries)") from None
                sleep(self._wait(attempt, error.retry_after))
            else:
                self._breaker.report(success=True)
                return answer
        raise AssertionError("the last attempt returns or raises")

    def _try(self, body: bytes) -> Any:
        request = Request(self._config.url, body, self._headers)
        end = monotonic() + self._config.request_timeout
        try:
            with self._opener.open(request, timeout=self._config.request_timeout) as response:
                content = _read(response, end)
        except HTTPError as error:
            message = f"answered {error.code} {error.reason}"
            if error.code in REPEATED:
                raise _Unavailable(message, _read_retry_after(error.headers.get("Retry-After"))) from None
            self._breaker.report(success=True)  # it is there, and refuses this request
            raise RequestError(message) from None
        except TimeoutError:
            raise _Unavailable(f"did not answer within {self._config.request_timeout:g} s") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise _Unavailable(f"cannot be reached: {reason}") from None
        if len(content) > LARGEST_ANSWER:
            raise RequestError(f"answered more than {LARGEST_ANSWER >> 20} MiB")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise RequestError(f"answered {content[:40]!r}, which is no JSON") from None

    def _wait(self, attempt: int, retry_after: float | None) -> float:
        """Choose the seconds before the next try: what the service says, else doubled each time, with jitter."""
        if retry_after is not None:
            return min(retry_after, LONGEST_WAIT)
        return min(self._config.backoff * 2**attempt, LONGEST_WAIT) * random.uniform(0.5, 1)


def _read(response: Any, end: float) -> bytes:
    """Read an answer up to `LARGEST_ANSWER` and one byte; TimeoutError where it is not complete at time `end`.

    The timeout of a connection is that of each of its parts, of which an answer may have any number.
    """
    parts, size = [], 0
    while size <= LARGEST_ANSWER and (part := response.read1(1 << 16)):
        parts.append(part)
        size += len(part)
        if monotonic() > end:
            raise TimeoutError
    return b"".join(parts)


class _Unavailable(Exception):
    """No answer, or one that says to come again."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def _read_retry_after(value: str | None) -> float | None:
    """Read the seconds that a header gives, as a number or a date; None where it gives none."""
    if not value:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time(), 0.0)
    except ValueError:
        return None
