"""Rank that leads a replica of a generate call: it talks to the objects of the environment."""

import math
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from realrl.config.errors import UserCodeError
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.environment import (
    ENVIRONMENT_FAILED,
    ENVIRONMENT_REWARD,
    FAILED_CALLS,
    TURN_REWARDS,
    TURNS,
)
from realrl.engine.generation.turns import TurnReply, take_all
from realrl.environments.pool import Answer, Failure
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.worker.replica import ReplySender


@dataclass(frozen=True)
class TurnSettings:
    """How the turns of a generate call are sampled, and what ends them."""

    sampling: GenerationConfig
    stop_token_ids: Collection[int]
    stop: StopStrings | None
    """None if the recipe has no stop strings."""

    @property
    def new_tokens(self) -> int:
        """Maximum tokens after a prompt."""
        return self.sampling.max_new_tokens


@dataclass
class Trajectory:
    """A row of the call."""

    record: Mapping[str, Any]
    """Fields for `reset` or `run`."""
    origin: str
    """Origin of the record, FILE:LINE; empty if unknown."""
    attempt: int = 0
    """Number of starts that failed by their own fault."""
    number: int = -1
    """Number of the object. Each start has another one."""
    turns: int = 0
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewards of turns, with the number of tokens between the prompt and the end of the turn."""
    failed_calls: int = 0
    reward: float = math.nan
    full: bool = False
    """Whether a limit ended it, so that it counts as not finished."""
    failed: bool = False
    suspect: bool = False
    """Whether it may have ended a process. Its calls then run alone."""

    def begin(self, number: int) -> None:
        """Start, or start again, with the object `number`; -1 for none."""
        self.number, self.turns, self.failed_calls = number, 0, 0
        self.turn_rewards, self.full = [], False


Row = TypeVar("Row", bound=Trajectory)


class Leader(ABC, Generic[Row]):
    """Base of the ranks that lead a replica."""

    def __init__(
        self,
        environments: Environments,
        rows: Sequence[Row],
        others: ReplySender,
        settings: TurnSettings,
        advance: Callable[[], None],
    ) -> None:
        """`others` sends replies to the other ranks. `advance` reports progress to the watchdog."""
        self._environments, self._settings = environments, settings
        self._config, self._pool = environments.config, environments.pool
        self._rows, self._others, self._advance = rows, others, advance
        self._arrived: queue.SimpleQueue[tuple[int, int, Answer | None]] = queue.SimpleQueue()
        """What has arrived: row, number of the object, and its answer; None for a request of an agent."""
        for row in range(len(rows)):
            self._start(row)

    def note(self, row: int, token: int, logprob: float) -> None:
        """Note a sampled token, for leaders that need more than the whole turn."""

    @abstractmethod
    def end(self, row: int, tokens: Sequence[int]) -> None:
        """End a turn of the model."""

    @abstractmethod
    def _start(self, row: int) -> None:
        """Start a trajectory with a new object."""

    @abstractmethod
    def _reply(self, row: int, arrived: Answer | None) -> TurnReply | None:
        """Make the reply to a row; None if something else has to arrive first."""

    def collect(self, seconds: float) -> list[TurnReply]:
        """Return the replies that have arrived, and send them to the other ranks of the replica. Wait for the first
        one for at most `seconds`."""
        replies: list[TurnReply] = []
        try:
            for row, number, arrived in take_all(self._arrived, seconds):
                # An object that was given up may still answer.
                if number == self._rows[row].number:
                    reply = self._reply(row, arrived)
                    replies += [] if reply is None else [reply]
        except UserCodeError as error:
            self._others.send_error(error)
            raise
        self._advance()
        self._others.send(replies)
        return replies

    def outputs(self, batch: Batch, numbers: Sequence[int]) -> dict[str, Ragged]:
        """Return the numbers of ended trajectories, by key. `batch` has their sequences. `numbers`: their rows."""
        rows = [self._rows[number] for number in numbers]
        measures, taken = self._environments.measures, batch["action_mask"].rows()
        for row, actions, prompt in zip(rows, taken, batch["prompt_length"].values.tolist(), strict=True):
            if not row.failed:
                measures.turns.append(row.turns)
                measures.given.append(len(actions) - int(prompt) - int(actions.sum()))
        whole = torch.tensor([not row.full for row in rows])
        turn_rewards = torch.zeros(len(batch["sequences"].values))
        starts = zip(batch["sequences"].offsets, batch["prompt_length"].values.tolist(), strict=False)
        for row, (start, prompt) in zip(rows, starts, strict=True):
            for length, reward in row.turn_rewards:
                turn_rewards[start + prompt + length - 1] = reward
        return {
            "finished": Ragged.scalars(batch["finished"].values * whole),
            TURN_REWARDS: Ragged(turn_rewards, batch["sequences"].lengths),
            ENVIRONMENT_REWARD: Ragged.scalars(
                torch.tensor([row.reward for row in rows], dtype=torch.float64)
            ),
            TURNS: Ragged.scalars(torch.tensor([float(row.turns) for row in rows])),
            FAILED_CALLS: Ragged.scalars(torch.tensor([float(row.failed_calls) for row in rows])),
            ENVIRONMENT_FAILED: Ragged.scalars(torch.tensor([float(row.failed) for row in rows])),
        }

    def _put(self, row: int) -> Callable[[Answer | None], None]:
        """Return the function that takes what arrives for the current object of a row."""
        number = self._rows[row].number
        return lambda arrived: self._arrived.put((row, number, arrived))

    def _fail(self, row: int, failure: Failure) -> TurnReply | None:
        """Start a trajectory again after its object failed, or give it up."""
        trajectory = self._rows[row]
        self._pool.drop(trajectory.number, close=True)
        trajectory.attempt += failure.own
        trajectory.suspect |= failure.suspect
        where = f"; record {trajectory.origin}" if trajectory.origin else ""
        if trajectory.attempt <= self._config.retries:
            if failure.own:
                self._environments.note_retry(f"{self._environments.label} {failure.reason}{where}")
            self._start(row)
            return None
        again = f", {trajectory.attempt} times" if trajectory.attempt > 1 else ""
        message = f"{self._environments.label} {failure.reason}{again}{where}"
        if self._config.on_error == "fail":
            raise UserCodeError(message, failure.trace, alone=True)
        self._environments.note_failure(message)
        trajectory.begin(-1)
        trajectory.failed = True
        return TurnReply(row, done=True, kept=0)


@dataclass
class ObjectTrajectory(Trajectory):
    """A row whose object answers to turns."""

    length: int = 0
    """Tokens after the prompt."""
    last: int = -1
    """Last token of the model."""

    def begin(self, number: int) -> None:
        super().begin(number)
        self.length = 0


class ObjectLeader(Leader[ObjectTrajectory]):
    """Gives turns of the model to objects with `step` or tools, and their observations to the model."""

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """Give a turn of the model to its object."""
        trajectory, settings = self._rows[row], self._settings
        trajectory.length += len(tokens)
        trajectory.last = tokens[-1]
        trajectory.turns += 1
        last = trajectory.length >= settings.new_tokens or trajectory.turns == self._config.max_turns
        text = self._environments.template.read(tokens, settings.stop_token_ids, settings.stop)
        self._pool.act(trajectory.number, text, last, self._put(row))

    def _start(self, row: int) -> None:
        trajectory = self._rows[row]
        trajectory.begin(self._environments.new_number())
        self._pool.reset(trajectory.number, trajectory.record, self._put(row), alone=trajectory.suspect)

    def _reply(self, row: int, arrived: Answer | None) -> TurnReply | None:
        assert arrived is not None, "only agents send requests"
        answer, trajectory, template = arrived, self._rows[row], self._environments.template
        if isinstance(answer, Failure):
            return self._fail(row, answer)
        trajectory.failed_calls += answer.get("failed_calls", 0)
        self._environments.measures.seconds.append(answer["seconds"])
        if answer["reward"] is not None:
            trajectory.turn_rewards.append((trajectory.length, answer["reward"]))
        if answer["done"]:
            self._pool.drop(trajectory.number, close=False)
            if answer["total"] is not None:
                trajectory.reward = answer["total"]
            return TurnReply(row, done=True)
        observation, starts = answer["observation"], trajectory.turns == 0
        tokens = template.open(observation) if starts else template.observe(observation, trajectory.last)
        if trajectory.length + len(tokens) >= self._settings.new_tokens:
            if starts:
                limit = f"generation.max_new_tokens={self._settings.new_tokens}"
                return self._fail(
                    row, Failure(f"gave {len(tokens)} tokens at reset, which leave none of {limit}")
                )
            trajectory.full = True
            self._pool.end(trajectory.number, self._put(row))
            return None
        trajectory.length += len(tokens)
        return TurnReply(row, tokens, kept=0 if starts else None)
