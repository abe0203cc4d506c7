"""The model that is trained, as agents reach it: a server on this machine, with an address for each trajectory."""

import copy
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from realrl.config.errors import UserError
from realrl.dataflow.call import Kind
from realrl.huggingface.directory import find_model_shape
from realrl.recipe.experiment import Experiment
from realrl.serving.conversations import ConversationMemory
from realrl.serving.engine import Engine
from realrl.serving.prompts import PromptWriter
from realrl.serving.refusal import RefusedError

if TYPE_CHECKING:
    from realrl.serving.agents import AgentServer


class AgentEngine(Engine, Protocol):
    """The engine of one trajectory."""

    def note_answer(self, prompt: Sequence[int], sampled: Sequence[int], finished: bool) -> None:
        """Note the prompt and the tokens of an answer, before the agent gets it, and whether the model ended it."""

    def note_refusal(self, error: RefusedError) -> None:
        """Note that a request gets no answer."""

    def handle(self) -> AbstractContextManager[None]:
        """Return a context in which the server handles a request."""


class AgentModel:
    """The model of a recipe's generate calls, for its agents. The server starts with the first trajectory."""

    def __init__(
        self, experiment: Experiment, tokenizer: Any, stop_token_ids: Sequence[int], tool_format: str | None
    ) -> None:
        """Raises UserError if the packages of the server are missing."""
        if not all(map(find_spec, ("starlette", "uvicorn"))):
            raise UserError("environment: an agent needs a server; run pip install 'realrl[serve]'")
        assert experiment.environment_config is not None and experiment.spec.generation is not None
        role = next(call.model_role for call in experiment.graph.calls if call.kind is Kind.GENERATE)
        self.name = role
        """Name of the model in requests."""
        self.vocab_size = find_model_shape(experiment.model_configs[role]).vocab_size
        generation = experiment.spec.generation(experiment)
        # The conversation, and the one before its last turn.
        self._stop, self._kept_tokens = generation.stop, 2 * (1 + generation.max_new_tokens)
        # The thread of the server must not share a tokenizer with others.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._writer = PromptWriter(
            self._tokenizer,
            stop_token_ids=stop_token_ids,
            memory=None,
            earlier_turns="keep" if experiment.environment_config.earlier_turns == "keep" else "template",
            tool_format=tool_format,
            options=experiment.data.chat_template_kwargs,
        )
        self._noted: set[str] = set()

    def open(self, trajectory: int, engine: AgentEngine) -> Mapping[str, str]:
        """Answer the requests of a trajectory with an engine of its own. Returns the arguments for `run` of its
        agent."""
        from realrl.serving.endpoint import Served

        served = Served(
            engine,
            self._writer.with_memory(ConversationMemory(self._kept_tokens)),
            self._stop,
            lambda prompt, sampled: engine.note_answer(prompt, sampled.tokens, sampled.finish != "length"),
            engine.note_refusal,
            engine.handle,
        )
        return self._server.open(trajectory, served)

    def drop(self, trajectory: int) -> None:
        """Answer no more requests of a trajectory."""
        self._server.drop(trajectory)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special ones included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def note(self, message: str) -> None:
        """Print a note, once."""
        if message not in self._noted:
            self._noted.add(message)
            print(f"note: {message}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the server."""
        if "_server" in vars(self):
            self._server.close()

    @cached_property
    def _server(self) -> "AgentServer":
        from realrl.serving.agents import AgentServer

        return AgentServer(self._tokenizer)
