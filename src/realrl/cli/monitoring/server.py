"""HTTP server for the page of a run. It is read-only, and its fixed list of addresses contains no file paths."""

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
"""Maximum number of requests at a time. Further requests wait."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Reply:
    """Content of a response, and its type."""

    content: bytes
    type: str
    file: str = ""
    """File name under which a browser saves the content; empty if the browser shows the content."""
    policy: str = "default-src 'none'"
    """Content security policy."""

    @classmethod
    def of_json(cls, value: Any) -> "Reply":
        """Reply with JSON. Numbers that JSON does not have, such as NaN, become null."""
        return cls(json.dumps(_finite(value), allow_nan=False).encode(), "application/json")


Route = Callable[[Query], Reply | None]


class PageServer(ThreadingHTTPServer):
    """Server of routes on one address.

    Every request needs the server's token, so that other users of the machine see nothing. On a loopback address,
    the server also checks the host name of a request: otherwise another web site could point its own name to this
    address and read the page (DNS rebinding).
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        """Start to listen. Raises OSError, or UnicodeError for an impossible host name."""
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.routes = routes
        self.token = secrets.token_urlsafe(16)
        self.local = is_loopback(host)
        self._host = host
        self._free = threading.BoundedSemaphore(_THREADS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, because the look-up can take long."""
        TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        # A browser cannot open the address that stands for all addresses.
        anywhere = self._host in ("0.0.0.0", "::")
        host = socket.gethostname() if anywhere else f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_address[1]}/?token={self.token}"

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request as soon as fewer than `_THREADS` are running."""
        with self._free:
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that closed its connection."""


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have with null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address of this machine."""
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
        """Answer a request with the reply of its route, or with an error."""
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        if self.server.local and not is_loopback(_hostname(self.headers.get("Host", ""))):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is not served under this host name")
        elif not secrets.compare_digest(query.get("token", "").encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that realrl watch printed, with its token")
        elif address.path not in self.server.routes:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            try:
                reply = self.server.routes[address.path](query)
            except Exception as error:  # a damaged file must not end the page
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
                return
            if reply is None:
                self._refuse(HTTPStatus.NOT_FOUND, "the run does not have this file, or does not have it yet")
            else:
                self._send(HTTPStatus.OK, reply)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, Reply(f"{text}\n".encode(), "text/plain; charset=utf-8"))

    def _send(self, status: HTTPStatus, reply: Reply) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": reply.type,
            "Content-Length": str(len(reply.content)),
            "Content-Security-Policy": reply.policy,
            **({"Content-Disposition": f'attachment; filename="{reply.file}"'} if reply.file else {}),
            **_HEADERS,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because addresses contain the token."""


def _hostname(header: str) -> str:
    """Find the name in a Host header, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
