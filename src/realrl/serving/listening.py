"""The server: listening, and a graceful end on SIGINT and SIGTERM. It needs the extra `serve`."""

import socket
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn

from realrl.config.errors import UserError
from realrl.config.files import reason_of

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


def open_socket(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Listen on a port; 0 for any free port. Raises UserError if this is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {reason_of(error)}") from None
    except UnicodeError:
        raise UserError(f"--host {host!r} is not a host name") from None


def is_local(listening: socket.socket) -> bool:
    """Return whether only this machine reaches the socket."""
    return ip_address(listening.getsockname()[0]).is_loopback


def format_url(listening: socket.socket) -> str:
    """Format the base URL for clients of the API."""
    return f"{format_origin(listening)}/v1"


def format_origin(listening: socket.socket) -> str:
    """Format protocol, host and port of the server."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ApiServer(uvicorn.Server):
    """Serves an application on a socket.

    In the main thread, SIGINT and SIGTERM end it: it accepts no more requests, finishes the running ones for up to
    `grace_seconds`, and closes the application. A second signal ends it at once; the
    caller then closes the engine.
    """

    should_exit: bool

    def __init__(self, app: Any, *, grace_seconds: int = 30) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            # Clients keep connections open between the turns of a conversation.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=grace_seconds,
        )
        super().__init__(config)

    def serve_forever(self, listening: socket.socket) -> None:
        """Serve until a signal or `stop`."""
        with listening:
            self.run(sockets=[listening])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at a signal. Unlike uvicorn's own method, this one does not raise the signal again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def stop(self) -> None:
        """End the server gracefully; for a server that runs in another thread."""
        self.should_exit = True
