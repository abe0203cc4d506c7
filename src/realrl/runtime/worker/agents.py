"""Agents in a generate call: programs that talk to the model as to OpenAI's API, and whose conversation is a
trajectory.

Each request of an agent is a turn of its row. The row holds the conversation as its tokens were sampled; a request
that continues the conversation adds only its new tokens.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.turns import TurnReply
from realrl.environments.pool import Answer, Failure
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.worker.leading import Leader, Trajectory, TurnSettings
from realrl.serving.engine import Piece, SamplingOptions
from realrl.serving.refusal import BusyError, RefusedError

_FULL, _MAX_TURNS = "context_length_exceeded", "max_turns"
"""Codes of refusals at a limit. An agent that raises an exception because of them has not failed."""
_ENDED = "the trajectory has ended"
_SHOWN = 12
"""Tokens of a request that a message shows."""


@dataclass(eq=False)
class AgentRequest:
    """A request of an agent, which is a turn of its row."""

    number: int
    prompt: Sequence[int]
    options: SamplingOptions
    receive: Callable[[Piece], None]
    known: int
    """Number of the prompt's tokens that are the conversation so far."""
    cancelled: bool = False


class Conversation:
    """The model as the agent of one trajectory sees it; see `serving.engine.Engine`.

    The agent sends one request after the other. Each continues the conversation, with all of its sampled tokens.
    The threads of the server call the methods, except `take`, `answer` and `close`, which the leader calls.
    """

    problem = None

    def __init__(
        self,
        environments: Environments,
        trajectory: int,
        settings: TurnSettings,
        max_turns: int | None,
        arrive: Callable[[], None],
    ) -> None:
        """`trajectory` is the number of the agent in the pool. `arrive` tells the leader of a request."""
        model = environments.agent_model
        self.name, self.vocab_size = model.name, model.vocab_size
        self.context_tokens = 1 + settings.new_tokens  # the first token of a conversation is the row's prompt
        self.context_setting = f"generation.max_new_tokens={settings.new_tokens}"
        self._settings, self._max_turns = settings, max_turns
        self._pool, self._trajectory = environments.pool, trajectory
        self._model, self._arrive = model, arrive
        self._lock = threading.Lock()
        self._numbers = 0
        self._request: AgentRequest | None = None
        """The request that the leader has not answered."""
        self._answering: AgentRequest | None = None
        """The request that the leader has answered, and whose answer is on its way to the agent."""
        self._ended = False
        self._handled = 0
        """Number of requests that the server handles."""
        self._is_answered = False
        """Whether the agent has got an answer since its clock was stopped."""
        self.tokens: list[int] = []
        """The conversation up to the last answer, as the agent has it."""
        self.turns = 0
        self.finished = False
        """Whether the model itself ended its last turn."""
        self.refused_at = ""
        """Code of the limit at which the last request was refused; empty if it was not."""
        self.first_seconds = self.last_seconds = math.nan
        """When the first request arrived, and when the last response was sent."""
        self.pauses: list[float] = []
        """Seconds between a response and the next request."""

    @contextmanager
    def handle(self) -> Iterator[None]:
        """Handle a request. Meanwhile, the agent waits, and its time limit does not count."""
        now = time.monotonic()
        with self._lock:
            self._handled += 1
            if self._handled == 1:
                self._pool.hold(self._trajectory)
                if math.isnan(self.first_seconds):
                    self.first_seconds = now
                else:
                    self.pauses.append(now - self.last_seconds)
        try:
            yield
        finally:
            with self._lock:
                self._handled -= 1
                self.last_seconds = time.monotonic()
                if not self._handled:
                    self._pool.release(self._trajectory, anew=self._is_answered)
                    self._is_answered = False

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
    ) -> int:
        """See `Engine.submit`. Raises RefusedError if the request does not continue the conversation."""
        self._check_options(options)
        with self._lock:
            if self._ended:
                raise RefusedError(_ENDED, status=404, code="trajectory_ended")
            if self._request is not None and not self._request.cancelled:
                raise BusyError(
                    "a request of this trajectory is in progress; an agent that is trained sends one at a time",
                    code="request_in_progress",
                )
            self._check_prompt(prompt)
            if self.turns == self._max_turns:
                raise RefusedError(
                    f"the trajectory has its maximum of {self.turns} turns (environment.max_turns)",
                    code=_MAX_TURNS,
                )
            self._answering = None
            self._numbers += 1
            self._request = AgentRequest(self._numbers, prompt, options, receive, known=len(self.tokens))
            number = self._numbers
        self._arrive()
        return number

    def cancel(self, request: int) -> None:
        """Forget a request that the agent does not wait for any more. Its row still ends the turn."""
        with self._lock:
            if self._request is not None and self._request.number == request:
                self._request.cancelled = True

    def note_answer(self, prompt: Sequence[int], sampled: Sequence[int], finished: bool) -> None:
        """Note what the agent gets: the tokens up to a stop string, if there is one."""
        with self._lock:
            if self._answering is None or self._ended:
                return  # the agent has sent another request meanwhile, or has ended
            self._answering = None
            self._is_answered = True
            self.tokens = [*prompt, *sampled]
            self.turns += 1
            self.finished, self.refused_at = finished, ""

    def note_refusal(self, error: RefusedError) -> None:
        """Note that a request was refused."""
        self.refused_at = error.code if error.code in (_FULL, _MAX_TURNS) else ""

    def take(self) -> AgentRequest | None:
        """Return the request in progress; None if it was cancelled."""
        with self._lock:
            request = self._request
            return None if request is None or request.cancelled else request

    def answer(self, request: AgentRequest, piece: Piece) -> None:
        """Answer the request in progress. Nothing happens if it was cancelled, or if the conversation has ended."""
        with self._lock:
            if self._request is not request:
                return
            self._request = None
            if request.cancelled:
                return
            self._answering = request
        request.receive(piece)

    def close(self) -> None:
        """Take no more requests, and end the one in progress. What the agent has got by now does not change."""
        with self._lock:
            self._ended = True
            request, self._request = self._request, None
        if request is not None and not request.cancelled:
            request.receive(Piece(error=_ENDED))

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        known = len(self.tokens)
        if list(prompt[:known]) == self.tokens:
            return
        pairs = zip(prompt, self.tokens, strict=False)
        shared = next((i for i, (given, own) in enumerate(pairs) if given != own), min(len(prompt), known))
        raise RefusedError(
            f"this request does not continue the trajectory: after {shared} tokens, it has"
            f" {self._show(prompt[shared:])}, and the trajectory {self._show(self.tokens[shared:])}. An agent that"
            " is trained has one conversation. It sends every message, every answer and the same tools again as"
            " they were, and does not ask twice for the same answer",
            code="another_conversation",
        )

    def _show(self, tokens: Sequence[int]) -> str:
        """Show the beginning of some tokens as text."""
        return repr(self._model.decode(tokens[:_SHOWN])) if tokens else "nothing more"

    def _check_options(self, options: SamplingOptions) -> None:
        """Refuse options that a trained turn cannot have, and note those for which the recipe's values are used."""
        for name in ("min_tokens", "ignore_eos", "stop_token_ids"):
            if getattr(options, name):
                raise RefusedError(
                    f"{name} is not for an agent that is trained", param=name, code="unsupported_parameter"
                )
        sampling, plain = self._settings.sampling, SamplingOptions(max_tokens=1)
        for name in ("temperature", "top_p", "top_k"):
            asked, used = getattr(options, name), getattr(sampling, name)
            if asked not in (getattr(plain, name), used):
                self._model.note(f"an agent asks for {name}={asked:g}; generation.{name}={used:g} is used")
        if options.seed is not None:
            self._model.note("an agent asks for a seed; the seed of the run is used")


@dataclass(frozen=True)
class Ended:
    """The end of an agent, with the reward that it gave; None for none."""

    reward: float | None


class AgentRun:
    """An agent with its conversation, from its start to its end."""

    def __init__(
        self,
        environments: Environments,
        record: Mapping[str, Any],
        settings: TurnSettings,
        put: Callable[[int, Answer | None], None],
        *,
        max_turns: int | None,
        alone: bool = False,
    ) -> None:
        """Start an agent for a record, see `Environments.make_record`.

        `put` gets the number of this run, with what its agent returns, or with None for a request. The leader gives
        it to `receive`. `alone` as for `EnvironmentPool.run`.
        """
        self._environments, self._put = environments, put
        self.number = environments.new_number()
        self.conversation = Conversation(
            environments, self.number, settings, max_turns, arrive=lambda: put(self.number, None)
        )
        self._failure: Failure | None = None
        """Why the agent raised an exception after a limit had refused its request."""
        self._end_seconds = math.nan
        environments.run_agent(self.number, record, self.conversation, self._return, alone=alone)

    def _return(self, answer: Answer) -> None:
        if math.isnan(self._end_seconds):
            self._end_seconds = time.monotonic()
        self._put(self.number, answer)

    def receive(self, arrived: Answer | None) -> AgentRequest | Ended | Failure | None:
        """Return what happens next: a request, or the end; None if something else has to arrive first."""
        conversation = self.conversation
        if arrived is None:
            return conversation.take()
        conversation.close()
        if isinstance(arrived, Failure):
            if self._failure is None and arrived.raised and conversation.refused_at and conversation.turns:
                self._failure = arrived
                self._environments.pool.end(self.number, self._return)
                return None
            self.drop()
            return self._failure or arrived
        self.drop(close=False)
        if not conversation.turns:
            return Failure("ended without an answer of the model")
        if self._failure is None:
            self._measure(arrived["seconds"])
        return Ended(arrived["total"])

    @property
    def is_full(self) -> bool:
        """Whether the last request did not fit into the maximum tokens of a trajectory."""
        return self.conversation.refused_at == _FULL

    def drop(self, *, close: bool = True) -> None:
        """Forget the agent. `close`: whether its object has not ended by itself, and is to be closed."""
        self.conversation.close()
        self._environments.agent_model.drop(self.number)
        self._environments.pool.drop(self.number, close=close)

    def _measure(self, seconds: float) -> None:
        """Measure the agent's own time. `seconds`: what `run` took, its waiting for the model included."""
        talk, measures = self.conversation, self._environments.measures
        before = max(0.0, seconds - (self._end_seconds - talk.first_seconds))
        measures.seconds.extend((before, *talk.pauses, max(0.0, self._end_seconds - talk.last_seconds)))


@dataclass
class AgentTrajectory(Trajectory):
    """A row whose agent sends requests."""

    run: AgentRun | None = None
    """The agent; None if the trajectory has failed."""
    running: AgentRequest | None = None
    """The request that the row works on."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens that were sampled for this request."""
    deferred: list[Answer | None] = field(default_factory=list)
    """What has arrived while the row works."""
    broken: bool = False
    """Whether the model's logits were not finite."""


class AgentLeader(Leader[AgentTrajectory]):
    """Lets agents talk to the model; see the top of this module."""

    def note(self, row: int, token: int, logprob: float) -> None:
        self._rows[row].logprobs.append(logprob)

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """Answer a request with a turn of the model."""
        trajectory = self._rows[row]
        request, run = trajectory.running, trajectory.run
        assert request is not None and run is not None, "a row without a request has no turn"
        trajectory.running = None
        # A stop string may have dropped tokens.
        logprobs, trajectory.logprobs = trajectory.logprobs[: len(tokens)], []
        if all(map(math.isfinite, logprobs)):
            piece = Piece(
                tokens=tuple(tokens),
                logprobs=tuple(logprobs),
                finish="stop" if tokens[-1] in self._settings.stop_token_ids else "length",
            )
            run.conversation.answer(request, piece)
        else:
            trajectory.broken = True
            trajectory.deferred.append(None)
        deferred, trajectory.deferred = trajectory.deferred, []
        for arrived in deferred:
            self._arrived.put((row, trajectory.number, arrived))

    def outputs(self, batch: Batch, numbers: Sequence[int]) -> dict[str, Ragged]:
        """Return the numbers of ended trajectories, by key; see `Leader.outputs`.

        What stands before the first turn is the prompt. For measurements, it is given by the environment, so the
        base counts with the prompt of one token.
        """
        runs = [self._rows[number].run for number in numbers]
        finished = [float(run is not None and run.conversation.finished and not run.is_full) for run in runs]
        prompts = [int(mask.cumsum(0).eq(0).sum()) for mask in batch["action_mask"].rows()]
        return super().outputs(batch, numbers) | {
            "finished": Ragged.scalars(torch.tensor(finished)),
            "prompt_length": Ragged.scalars(torch.tensor(prompts)),
        }

    def _start(self, row: int) -> None:
        trajectory = self._rows[row]
        run = trajectory.run = AgentRun(
            self._environments,
            trajectory.record,
            self._settings,
            lambda number, arrived: self._arrived.put((row, number, arrived)),
            max_turns=self._config.max_turns,
            alone=trajectory.suspect,
        )
        trajectory.begin(run.number)

    def _reply(self, row: int, arrived: Answer | None) -> TurnReply | None:
        trajectory = self._rows[row]
        run = trajectory.run
        assert run is not None, "a row without an agent is done"
        if trajectory.broken:
            run.drop()
            trajectory.number = -1
            return TurnReply(row, done=True)  # its tokens end the run, see `generate`
        if trajectory.running is not None:
            if arrived is not None:
                run.conversation.close()  # nobody waits for this turn
            trajectory.deferred.append(arrived)
            return None
        following = run.receive(arrived)
        if isinstance(following, Failure):
            return self._fail(row, following)
        if isinstance(following, Ended):
            return self._end(row, run, following)
        if following is None:
            return None
        trajectory.running = following
        # The first token of the conversation is the row's prompt.
        start = max(following.known, 1)
        return TurnReply(
            row,
            following.prompt[start:],
            kept=start - 1,
            first=None if following.known else following.prompt[0],
            limit=following.options.max_tokens,
        )

    def _end(self, row: int, run: AgentRun, ended: Ended) -> TurnReply:
        """End a trajectory whose agent has ended."""
        trajectory = self._rows[row]
        trajectory.number = -1  # what still arrives comes too late
        trajectory.turns, trajectory.full = run.conversation.turns, run.is_full
        if ended.reward is not None:
            trajectory.reward = ended.reward
        # The row may have sampled more than the agent has got.
        return TurnReply(row, done=True, kept=len(run.conversation.tokens) - 1)

    def _fail(self, row: int, failure: Failure) -> TurnReply | None:
        self._rows[row].run = None
        return super()._fail(row, failure)
