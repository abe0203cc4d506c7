"""Trajectories of a generate call in an environment: what its rows exchange with the objects of the environment."""

import json
import math
import queue
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.base.method import Metrics
from realrl.config.errors import UserCodeError
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.environment import (
    ENVIRONMENT_FAILED,
    ENVIRONMENT_REWARD,
    FAILED_CALLS,
    TURN_REWARDS,
    TURNS,
)
from realrl.engine.generation.turns import TurnReply, decode_replies, encode_replies, take_all
from realrl.environments.pool import Answer, Failure
from realrl.plan.placement import Placement
from realrl.recipe.stop_strings import StopStrings
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.processes.process import Process

_WAIT_SECONDS = 0.5
"""How long a rank with nothing else to do waits for a reply before it tells the other ranks that there is none."""
_HEAD = 2
"""Numbers in the message that announces replies: how many numbers follow, and whether the leader has failed."""
_TAG = (1 << 21) + 1
"""Tag of messages about replies. It differs from the tags of `worker.exchange`."""


@dataclass
class _Trajectory:
    """A row of the call."""

    record: Mapping[str, Any]
    """Fields for `reset`."""
    origin: str
    """Origin of the record, FILE:LINE; empty if unknown."""
    attempt: int = 0
    """Number of starts that failed by their own fault."""
    number: int = -1
    """Number of the object. Each start has another one."""
    length: int = 0
    """Tokens after the prompt."""
    last: int = -1
    """Last token of the model."""
    turns: int = 0
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewards of turns, with the number of tokens between the prompt and the end of the turn."""
    failed_calls: int = 0
    reward: float = math.nan
    full: bool = False
    """Whether there was no room for the next observation."""
    failed: bool = False
    suspect: bool = False
    """Whether it may have ended a process. Its calls then run alone."""

    def begin(self, number: int) -> None:
        """Start, or start again, with the object `number`; -1 for none."""
        self.number, self.length, self.turns, self.failed_calls = number, 0, 0, 0
        self.turn_rewards, self.full = [], False


def begin_trajectories(
    environments: Environments,
    placement: Placement,
    process: Process,
    *,
    records: Sequence[Mapping[str, Any]],
    origins: Sequence[str],
    new_tokens: int,
    stop_token_ids: Collection[int],
    stop: StopStrings | None,
    advance: Callable[[], None],
) -> "Trajectories":
    """Begin the trajectories of a generate call on this rank's replica.

    `records` has the fields for `reset`, and `origins` the origin of the record, of each row. `new_tokens`: maximum
    tokens after a prompt. `stop_token_ids` and `stop` end turns. `advance` reports progress to the watchdog.
    """
    rank, control = process.rank, process.control
    ranks = list_replica(placement, rank)
    leader = next(other for other in placement.output_ranks if other in ranks)
    limit = environments.config.max_turn_tokens
    if rank != leader:
        return Trajectories(limit, _Follower(leader, control))
    rows = [_Trajectory(record, origin) for record, origin in zip(records, origins, strict=True)]
    others = [other for other in ranks if other != leader]
    leading = _Leader(
        environments,
        rows,
        others,
        control,
        new_tokens=new_tokens,
        stop_token_ids=stop_token_ids,
        stop=stop,
        advance=advance,
    )
    return Trajectories(limit, leading)


def list_replica(placement: Placement, rank: int) -> list[int]:
    """List the ranks of a placement that process the same items as `rank`."""
    item = placement.item_index(rank)
    return [other for other in placement.ranks if placement.item_index(other) == item]


class Trajectories:
    """The environment of a generate call on one rank; see `engine.generation.turns.Turns`."""

    def __init__(self, turn_tokens: int | None, side: "_Leader | _Follower") -> None:
        """`turn_tokens` is the maximum number of tokens of a turn of the model; None for no limit."""
        self._turn_tokens = turn_tokens
        self._side = side

    def note(self, row: int, count: int, token: int, logprob: float) -> bool:
        return count == self._turn_tokens

    def end(self, row: int, tokens: Sequence[int]) -> None:
        self._side.end(row, tokens)

    def collect(self, *, idle: bool) -> Sequence[TurnReply]:
        return self._side.collect(idle)

    def outputs(self, batch: Batch) -> dict[str, Ragged]:
        """Return the numbers of each trajectory, by key; only the rank that leads the replica has them.

        `batch` has the sequences. A trajectory without room for the next observation becomes unfinished.
        """
        assert isinstance(self._side, _Leader), "only the leader asks"
        return self._side.outputs(batch)


class _Follower:
    """A rank that learns of replies from the leader of its replica."""

    def __init__(self, leader: int, control: dist.ProcessGroup | None) -> None:
        self._leader, self._control = leader, control

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """Do nothing: the leader has sampled the same tokens."""

    def collect(self, idle: bool) -> list[TurnReply]:
        head = torch.empty(_HEAD, dtype=torch.int64)
        dist.recv(head, self._leader, group=self._control, tag=_TAG)
        size, failed = head.tolist()
        if not size:
            return []
        numbers = torch.empty(size, dtype=torch.int64)
        dist.recv(numbers, self._leader, group=self._control, tag=_TAG)
        if failed:
            message, trace = json.loads(bytes(numbers.tolist()))
            raise UserCodeError(message, trace, alone=True)
        return list(decode_replies(numbers.numpy()))


class _Leader:
    """The rank of a replica that talks to the objects, and tells the other ranks what they reply."""

    def __init__(
        self,
        environments: Environments,
        rows: Sequence[_Trajectory],
        others: Sequence[int],
        control: dist.ProcessGroup | None,
        *,
        new_tokens: int,
        stop_token_ids: Collection[int],
        stop: StopStrings | None,
        advance: Callable[[], None],
    ) -> None:
        self._environments = environments
        self._config, self._pool = environments.config, environments.pool
        self._rows, self._others, self._control = rows, others, control
        self._new_tokens, self._advance = new_tokens, advance
        self._stop_token_ids, self._stop = stop_token_ids, stop
        self._answers: queue.SimpleQueue[tuple[int, int, Answer]] = queue.SimpleQueue()
        """Answers of objects: (row, number of the object, answer)."""
        self._sent: list[tuple[dist.Work, Tensor]] = []
        for row in range(len(rows)):
            self._reset(row)

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """Give a turn of the model to its object."""
        trajectory = self._rows[row]
        trajectory.length += len(tokens)
        trajectory.last = tokens[-1]
        trajectory.turns += 1
        last = trajectory.length >= self._new_tokens or trajectory.turns == self._config.max_turns
        text = self._environments.template.read(tokens, self._stop_token_ids, self._stop)
        self._pool.act(trajectory.number, text, last, self._put(row))

    def collect(self, idle: bool) -> list[TurnReply]:
        """Return the replies that have arrived, and send them to the other ranks of the replica."""
        replies: list[TurnReply] = []
        try:
            for row, number, answer in take_all(self._answers, _WAIT_SECONDS if idle else 0.0):
                # An object that was given up may still answer.
                if number == self._rows[row].number:
                    reply = self._reply(row, answer)
                    replies += [] if reply is None else [reply]
        except UserCodeError as error:
            # The first rank to fail may be any of them, so all say the same.
            self._send(torch.tensor([*json.dumps([str(error), error.trace]).encode()]), failed=True)
            raise
        self._advance()
        self._send(torch.from_numpy(encode_replies(replies)))
        return replies

    def outputs(self, batch: Batch) -> dict[str, Ragged]:
        rows = self._rows
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

    def _put(self, row: int) -> Callable[[Answer], None]:
        number = self._rows[row].number
        return lambda answer: self._answers.put((row, number, answer))

    def _reset(self, row: int) -> None:
        """Start a trajectory with a new object."""
        trajectory = self._rows[row]
        trajectory.begin(self._environments.new_number())
        self._pool.reset(trajectory.number, trajectory.record, self._put(row), alone=trajectory.suspect)

    def _reply(self, row: int, answer: Answer) -> TurnReply | None:
        """Make the reply to a row; None if the object has to answer something else first."""
        trajectory, template = self._rows[row], self._environments.template
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
        if trajectory.length + len(tokens) >= self._new_tokens:
            if starts:
                limit = f"generation.max_new_tokens={self._new_tokens}"
                return self._fail(
                    row, Failure(f"gave {len(tokens)} tokens at reset, which leave none of {limit}")
                )
            trajectory.full = True
            self._pool.end(trajectory.number, self._put(row))
            return None
        trajectory.length += len(tokens)
        return TurnReply(row, tokens, kept=0 if starts else None)

    def _fail(self, row: int, failure: Failure) -> TurnReply | None:
        """Start a trajectory again after its object failed, or give it up."""
        trajectory = self._rows[row]
        self._pool.drop(trajectory.number, close=True)
        trajectory.attempt += failure.own
        trajectory.suspect |= failure.suspect
        if trajectory.attempt <= self._config.retries:
            self._reset(row)
            return None
        again = f", {trajectory.attempt} times" if trajectory.attempt > 1 else ""
        where = f"; record {trajectory.origin}" if trajectory.origin else ""
        message = f"{self._environments.label} {failure.reason}{again}{where}"
        if self._config.on_error == "fail":
            raise UserCodeError(message, failure.trace, alone=True)
        self._environments.note_failure(message)
        trajectory.begin(-1)
        trajectory.failed = True
        return TurnReply(row, done=True, kept=0)

    def _send(self, numbers: Tensor, *, failed: bool = False) -> None:
        """Send replies, or the message of a failure, to the other ranks of the replica. [N] int64"""
        head = torch.tensor([len(numbers), int(failed)])
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for rank in self._others:
            for tensor in (head, numbers) if len(numbers) else (head,):
                work = dist.isend(tensor, rank, group=self._control, tag=_TAG)
                assert work is not None, "this rank is part of the control group"
                self._sent.append((work, tensor))
        if failed:
            for work, _ in self._sent:
                work.wait()


def summarize_trajectories(batch: Batch) -> Metrics:
    """Compute metrics of a generate call's trajectories. Those that failed count only for `failed`."""
    metrics, failed = Metrics(), batch[ENVIRONMENT_FAILED].values
    fine = failed == 0
    for name, key in (("turns", TURNS), ("failed_calls", FAILED_CALLS)):
        metrics.mean(name, batch[key].values[fine].sum(), fine.sum())
    rewards = batch[ENVIRONMENT_REWARD].values
    given = fine & rewards.isfinite()
    metrics.mean("environment_reward", rewards[given].sum(), given.sum())
    metrics.mean("failed", failed.sum(), len(batch))
    return metrics
