"""Agents in a generate call: programs that talk to the model as to OpenAI's API, and whose conversation is a
trajectory.

Each request of an agent is a turn of its row. The row holds the conversation as its tokens were sampled; a request
that continues the conversation adds only its new tokens.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.turns import TurnReply
from realrl.environments.pool import Answer, Failure
from realrl.runtime.prepare.agents import AgentModel
from realrl.runtime.worker.leading import Leader, Trajectory, TurnSettings
from realrl.serving.engine import Piece, SamplingOptions
from realrl.serving.refusal import RefusedError

_FULL, _MAX_TURNS = "context_length_exceeded", "max_turns"
"""Codes of refusals at a limit. An agent that ends because of them has not failed."""


@dataclass(eq=False)
class _Request:
    """A request of an agent, which is a turn of its row."""

    number: int
    prompt: Sequence[int]
    options: SamplingOptions
    receive: Callable[[Piece], None]
    kept: int
    """Tokens of the conversation that the request continues."""
    turns: int
    """Turns of the model among them."""
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Conversation:
    """The model as the agent of one trajectory sees it; see `serving.engine.Engine`.

    The agent sends one request after the other. Each continues the conversation, with all of its sampled tokens, or
    repeats the last request. Methods without a leading note belong to the threads of the server.
    """

    def __init__(
        self,
        model: AgentModel,
        settings: TurnSettings,
        max_turns: int | None,
        *,
        arrive: Callable[[], None],
        wait: Callable[[bool], None],
    ) -> None:
        """`arrive` tells the leader that there is a request. `wait` tells the pool whether the agent waits."""
        self.name, self.vocab_size = model.name, model.vocab_size
        self.context_tokens = 1 + settings.new_tokens  # the first token of a conversation is the row's prompt
        self._settings, self._max_turns = settings, max_turns
        self._note, self._arrive, self._wait = model.note, arrive, wait
        self._lock = threading.Lock()
        self._numbers = 0
        self._request: _Request | None = None
        self._ended = False
        self._last_prompt = 0
        """Length of the last prompt that got an answer."""
        self.tokens: list[int] = []
        """The conversation up to the last answer, as the agent has it."""
        self.turns = 0
        self.finished = False
        """Whether the model itself ended its last turn."""
        self.limit = ""
        """Code of the limit at which a request was refused; empty if there was none."""
        self.problem = None
        self.first_seconds = math.nan
        """When the first request arrived."""
        self.seconds: list[float] = []
        """Seconds between an answer and the next request."""
        self._answered_seconds = math.nan

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
    ) -> int:
        """See `Engine.submit`. Raises RefusedError if the request does not continue the conversation."""
        self._check_options(options)
        with self._lock:
            if self._ended:
                raise RefusedError("this trajectory has ended", status=404, code="trajectory_ended")
            if self._request is not None and not self._request.cancelled:
                raise RefusedError(
                    "a request of this trajectory is in progress; an agent that is trained sends one at a time",
                    status=409, code="request_in_progress",
                )  # fmt: skip
            kept, turns = self._find_place(prompt)
            if turns == self._max_turns:
                raise RefusedError(
                    f"the trajectory has its maximum of {turns} turns (environment.max_turns)",
                    code=_MAX_TURNS,
                )
            self._numbers += 1
            self._request = _Request(self._numbers, prompt, options, receive, kept, turns)
            now = time.monotonic()
            if math.isnan(self.first_seconds):
                self.first_seconds = now
            else:
                self.seconds.append(now - self._answered_seconds)
            number = self._numbers
        self._wait(True)
        self._arrive()
        return number

    def cancel(self, request: int) -> None:
        """Forget a request that the agent does not wait for any more. Its row still ends the turn."""
        with self._lock:
            if self._request is None or self._request.number != request:
                return
            self._request.cancelled = True
            self._answered_seconds = time.monotonic()
        self._wait(False)

    def close(self) -> None:
        """Take no more requests, and end the one in progress. The leader calls this."""
        with self._lock:
            self._ended = True
            request, self._request = self._request, None
        if request is not None and not request.cancelled:
            request.receive(Piece(error="the trajectory has ended"))

    def take(self) -> _Request | None:
        """Return the request in progress; None if it was cancelled. The leader calls this."""
        with self._lock:
            request = self._request
            return None if request is None or request.cancelled else request

    def answer(self, request: _Request, piece: Piece) -> None:
        """Answer the request in progress. The leader calls this."""
        with self._lock:
            if self._request is not request:
                return
            self._request = None
            if request.cancelled:
                return
            self._answered_seconds = time.monotonic()
            # Until `note_answer`, the conversation ends before this turn.
            self.tokens, self.turns = list(request.prompt[: request.kept]), request.turns
        self._wait(False)
        request.receive(piece)

    def note_answer(self, prompt: Sequence[int], sampled: Sequence[int], finished: bool) -> None:
        """Note what the agent gets: the tokens up to a stop string, if there is one."""
        with self._lock:
            self.tokens, self._last_prompt = [*prompt, *sampled], len(prompt)
            self.turns += 1
            self.finished = finished

    def note_refusal(self, error: RefusedError) -> None:
        """Note that a request was refused."""
        if error.code in (_FULL, _MAX_TURNS):
            self.limit = error.code

    def _find_place(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Find how many tokens and turns of the conversation a prompt keeps."""
        known = self.tokens
        given = list(prompt[: len(known)])
        if given == known:
            return len(known), self.turns
        if len(prompt) == self._last_prompt and given == known[: self._last_prompt]:
            return len(prompt), self.turns - 1
        shared = next(
            i for i, pair in enumerate(zip([*given, -1], known, strict=False)) if pair[0] != pair[1]
        )
        raise RefusedError(
            f"this request does not continue the trajectory: of its {len(known)} tokens, only {shared} are those of"
            " the prompt. An agent that is trained has one conversation, and keeps every turn of the model in it as"
            " it was; environment.earlier_turns=keep is for chat templates that rewrite earlier turns",
            code="another_conversation",
        )

    def _check_options(self, options: SamplingOptions) -> None:
        """Refuse options that a trained turn cannot have. Others have the values of the recipe."""
        for name, value in (
            ("min_tokens", options.min_tokens),
            ("ignore_eos", options.ignore_eos),
            ("stop_token_ids", options.stop_token_ids),
        ):
            if value:
                raise RefusedError(
                    f"{name} is not for an agent that is trained", param=name, code="unsupported_parameter"
                )
        sampling, plain = self._settings.sampling, SamplingOptions(max_tokens=1)
        for name in ("temperature", "top_p", "top_k"):
            asked, used = getattr(options, name), getattr(sampling, name)
            if asked not in (getattr(plain, name), used):
                self._note(f"an agent asks for {name}={asked:g}; generation.{name}={used:g} is used")
        if options.seed is not None:
            self._note("an agent asks for a seed; the seed of the run is used")


@dataclass
class AgentTrajectory(Trajectory):
    """A row whose agent sends requests."""

    conversation: Conversation | None = None
    running: _Request | None = None
    """The request that the row works on."""
    deferred: list[Answer | None] = field(default_factory=list)
    """What has arrived while the row works."""
    ending: bool = False
    """Whether the agent ended at a limit, and is asked for its reward."""

    def begin(self, number: int) -> None:
        super().begin(number)
        self.ending = False


class AgentLeader(Leader[AgentTrajectory]):
    """Lets agents talk to the model; see the top of this module."""

    def note(self, row: int, token: int, logprob: float) -> None:
        request = self._rows[row].running
        assert request is not None, "a row without a request has no turn"
        request.tokens.append(token)
        request.logprobs.append(logprob)

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """Answer a request with a turn of the model."""
        trajectory = self._rows[row]
        request, conversation = trajectory.running, trajectory.conversation
        assert request is not None and conversation is not None, "a row without a request has no turn"
        trajectory.running = None
        # A stop string may have dropped tokens.
        logprobs = request.logprobs[: len(tokens)]
        piece = Piece(
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            finish="stop" if tokens[-1] in self._settings.stop_token_ids else "length",
        )
        if not all(map(math.isfinite, logprobs)):
            piece = Piece(error="the model's logits are not finite")
        conversation.answer(request, piece)
        deferred, trajectory.deferred = trajectory.deferred, []
        for arrived in deferred:
            self._put(row)(arrived)

    def outputs(self, batch: Batch) -> dict[str, Ragged]:
        """Return the numbers of each trajectory, by key; see `Leader.outputs`.

        What stands before the first turn is the prompt.
        """
        finished = [row.conversation is not None and row.conversation.finished for row in self._rows]
        ends = [float(own and not row.full) for own, row in zip(finished, self._rows, strict=True)]
        prompts = [int(mask.cumsum(0).eq(0).sum()) for mask in batch["action_mask"].rows()]
        return super().outputs(batch) | {
            "finished": Ragged.scalars(torch.tensor(ends)),
            "prompt_length": Ragged.scalars(torch.tensor(prompts)),
        }

    def _start(self, row: int) -> None:
        trajectory, environments = self._rows[row], self._environments
        number = environments.new_number()
        trajectory.begin(number)
        model, put = environments.agent_model, self._put(row)
        conversation = trajectory.conversation = Conversation(
            model,
            self._settings,
            self._config.max_turns,
            arrive=lambda: put(None),
            wait=lambda waits: (self._pool.hold if waits else self._pool.release)(number),
        )
        connection = model.open(
            number,
            conversation,
            note_answer=conversation.note_answer,
            note_refusal=conversation.note_refusal,
        )
        self._pool.run(number, trajectory.record, connection, put, alone=trajectory.suspect)

    def _reply(self, row: int, arrived: Answer | None) -> TurnReply | None:
        trajectory = self._rows[row]
        if trajectory.running is not None:
            trajectory.deferred.append(arrived)
            return None
        if arrived is None:
            return self._begin_turn(row)
        if isinstance(arrived, Failure):
            return self._end_at_limit(row, arrived)
        return self._end(row, arrived)

    def _begin_turn(self, row: int) -> TurnReply | None:
        """Let a row work on the request of its agent."""
        trajectory = self._rows[row]
        assert trajectory.conversation is not None, "a request comes from a conversation"
        request = trajectory.running = trajectory.conversation.take()
        if request is None:
            return None
        # The first token of the conversation is the row's prompt.
        start = max(request.kept, 1)
        return TurnReply(
            row,
            request.prompt[start:],
            kept=start - 1,
            first=None if request.kept else request.prompt[0],
            limit=request.options.max_tokens,
        )

    def _end_at_limit(self, row: int, failure: Failure) -> TurnReply | None:
        """Ask an agent for its reward that raised an exception because a limit refused its request."""
        trajectory = self._rows[row]
        assert trajectory.conversation is not None, "an agent has a conversation"
        if trajectory.conversation.limit and trajectory.conversation.turns and not trajectory.ending:
            trajectory.ending = True
            self._pool.end(trajectory.number, self._put(row))
            return None
        return self._fail(row, failure)

    def _end(self, row: int, answer: Mapping[str, Any]) -> TurnReply | None:
        """End a trajectory whose agent has ended."""
        trajectory, measures = self._rows[row], self._environments.measures
        conversation = trajectory.conversation
        assert conversation is not None, "an agent has a conversation"
        if not conversation.turns:
            return self._fail(row, Failure("ended without an answer of the model"))
        self._close(row)
        self._pool.drop(trajectory.number, close=False)
        trajectory.number = -1  # what still arrives comes too late
        measures.seconds.extend(conversation.seconds)
        if not trajectory.ending:
            # `run` has taken this long; the rest is the time before the first request.
            since = time.monotonic() - conversation.first_seconds
            measures.seconds.append(max(0.0, answer["seconds"] - since))
        trajectory.turns = conversation.turns
        trajectory.full = conversation.limit == _FULL
        if answer["total"] is not None:
            trajectory.reward = answer["total"]
        return TurnReply(row, done=True, kept=len(conversation.tokens) - 1)

    def _fail(self, row: int, failure: Failure) -> TurnReply | None:
        self._close(row)
        self._rows[row].conversation = None
        return super()._fail(row, failure)

    def _close(self, row: int) -> None:
        """Take no more requests of a trajectory."""
        trajectory = self._rows[row]
        self._environments.agent_model.drop(trajectory.number)
        if trajectory.conversation is not None:
            trajectory.conversation.close()
