"""Server of a run's page: read-only, with a fixed list of addresses, none of which names a file."""

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from math import isfinite
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Query = Mapping[str, str]
_THREADS = 32
"""Maximum requests at a time; others wait."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Reply:
    """Content of a response, its type, and the file name under which it is saved, if it is to be."""

    content: bytes
    type: str
    file: str = ""
    policy: str = "default-src 'none'"
    """Content security policy."""

    @classmethod
    def of_json(cls, value: Any) -> "Reply":
        """Make an answer of JSON values."""
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:  # somebody else's file
            text = json.dumps(_finite(value))
        return cls(text.encode(), "application/json")


Route = Callable[[Query], Reply | None]


class PageServer(ThreadingHTTPServer):
    """Server of routes on one address.

    Every request carries the server's token, so that other users of the machine see nothing. One that is bound to
    loopback answers only to loopback names: a page elsewhere whose name is made to point here is refused.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        """Listen at once; OSError where that is not possible, UnicodeError for a host with an impossible name."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.address_family = family
        self.routes = routes
        self.token = secrets.token_urlsafe(16)
        self.local = is_loopback(host)
        self._host = host
        self._free = threading.BoundedSemaphore(_THREADS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking for the name of the address, which can take long."""
        TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        # All addresses are none that a browser can open.
        anywhere = self._host in ("0.0.0.0", "::")
        host = socket.gethostname() if anywhere else f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_address[1]}/?token={self.token}"

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request once there are few enough."""
        with self._free:
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone."""


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by null."""
    match value:
        case dict():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case float() if not isfinite(value):
            return None
    return value


def is_loopback(host: str) -> bool:
    """Tell whether a host's name or address is this machine's own loopback."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10
    server_version, sys_version = "realrl", ""

    def do_GET(self) -> None:
        """Reply from the routes."""
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        if self.server.local and not is_loopback(_hostname(self.headers.get("Host", ""))):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is not served under this host name")
        elif not secrets.compare_digest(query.get("token", "").encode(), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN, "open the address that realrl watch has printed, with its token"
            )
        elif address.path not in self.server.routes:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            self._answer(self.server.routes[address.path], query)

    def _answer(self, route: Route, query: Query) -> None:
        try:
            answer = route(query)
        except Exception as error:  # a damaged file must not end the page
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
            return
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "the run has no such file, or not yet")
        else:
            self._send(HTTPStatus.OK, answer)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, Reply(f"{text}\n".encode(), "text/plain; charset=utf-8"))

    def _send(self, status: HTTPStatus, answer: Reply) -> None:
        self.send_response(status)
        self.send_header("Content-Type", answer.type)
        self.send_header("Content-Length", str(len(answer.content)))
        self.send_header("Content-Security-Policy", answer.policy)
        if answer.file:
            self.send_header("Content-Disposition", f'attachment; filename="{answer.file}"')
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: addresses have the token."""


def _hostname(header: str) -> str:
    """Find the name in a Host header, without its port; empty where there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
