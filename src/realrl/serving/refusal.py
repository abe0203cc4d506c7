"""Errors of requests, in the form of OpenAI's API. Does not import torch."""

from typing import Any


class RefusedError(Exception):
    """A request that gets no answer. Its text is the message for the client."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        """`status`: HTTP status. `param`: field of the request at fault. `code`: OpenAI's name of the error."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class BusyError(RefusedError):
    """A request that gets no answer now. It may be tried again in a moment."""


def fail(message: str) -> RefusedError:
    """Return the error of a request that failed in the engine."""
    return RefusedError(f"the engine failed: {message}", status=500, code="engine_error")
