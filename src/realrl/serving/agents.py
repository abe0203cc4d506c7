"""Server for agents in training: each trajectory has an address of its own. It needs the extra `serve`."""

import secrets
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.routing import Mount

from realrl.config.open_files import raise_limit_of_open_files
from realrl.environments.objects import API_KEY, BASE_URL, MODEL
from realrl.serving.endpoint import Endpoint, EndpointLimits, Served, assemble_app
from realrl.serving.listening import ApiServer, format_origin, open_socket
from realrl.serving.refusal import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LIMITS = EndpointLimits(samples=1 << 16, samples_per_prompt=1)


class AgentServer:
    """Serves a model to the agents of this machine. It runs in a thread of its own."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Listen on a free port, and start the thread."""
        raise_limit_of_open_files()  # every agent has a connection
        self._token = secrets.token_urlsafe(24)
        self._served: dict[int, Served] = {}
        """What answers the requests of each trajectory."""
        self._endpoint = Endpoint(self._find, tokenizer, _LIMITS)
        routes = self._endpoint.list_routes(self._token)
        app = assemble_app([Mount("/{trajectory:int}", routes=routes)], self._endpoint.close)
        listening = open_socket()
        self._origin = format_origin(listening)
        self._server = ApiServer(app, grace_seconds=1)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(listening,), name="agents", daemon=True
        )
        self._thread.start()

    def open(self, trajectory: int, served: Served) -> Mapping[str, str]:
        """Answer the requests of a trajectory. Returns the arguments for `run` of its agent."""
        self._served[trajectory] = served
        return {
            BASE_URL: f"{self._origin}/{trajectory}/v1",
            API_KEY: self._token,
            MODEL: served.engine.name,
        }

    def drop(self, trajectory: int) -> None:
        """Answer no more requests of a trajectory."""
        self._served.pop(trajectory, None)

    def close(self) -> None:
        """End the server."""
        self._server.stop()
        self._thread.join()

    def _find(self, request: Request) -> Served:
        served = self._served.get(request.path_params["trajectory"])
        if served is None:
            raise RefusedError("this trajectory has ended", status=404, code="trajectory_ended")
        return served
