"""Trajectories of a generate call in an environment: what its rows exchange with the objects of the environment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realrl.algorithms.base.method import Metrics
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.environment import (
    ENVIRONMENT_FAILED,
    ENVIRONMENT_REWARD,
    FAILED_CALLS,
    TURNS,
)
from realrl.engine.generation.turns import TurnReply
from realrl.plan.placement import Placement
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.agents import AgentLeader, AgentTrajectory
from realrl.runtime.worker.leading import Leader, ObjectLeader, ObjectTrajectory, TurnSettings
from realrl.runtime.worker.replica import Follower, ReplySender, list_replica


def begin_trajectories(
    environments: Environments,
    placement: Placement,
    process: Process,
    *,
    records: Sequence[Mapping[str, Any]],
    origins: Sequence[str],
    settings: TurnSettings,
    advance: Callable[[], None],
) -> "Trajectories":
    """Begin the trajectories of a generate call on this rank's replica.

    `records` has the fields for `reset` or `run`, and `origins` the origin of the record, of each row. `advance`
    reports progress to the watchdog.
    """
    rank, control = process.rank, process.control
    ranks = list_replica(placement, rank)
    leader = next(other for other in placement.output_ranks if other in ranks)
    side: Leader[Any] | Follower
    if rank != leader:
        side = Follower(leader, control)
    else:
        others = ReplySender([other for other in ranks if other != leader], control)
        items = zip(records, origins, strict=True)
        if environments.runs:
            agents = [AgentTrajectory(record, origin) for record, origin in items]
            side = AgentLeader(environments, agents, others, settings, advance)
        else:
            objects = [ObjectTrajectory(record, origin) for record, origin in items]
            side = ObjectLeader(environments, objects, others, settings, advance)
    return Trajectories(environments.config.max_turn_tokens, side, replaces_prompts=environments.runs)


class Trajectories:
    """The environment of a generate call on one rank; see `engine.generation.turns.Turns`."""

    def __init__(
        self, turn_tokens: int | None, side: Leader[Any] | Follower, *, replaces_prompts: bool
    ) -> None:
        """`turn_tokens` is the maximum number of tokens of a turn of the model; None for no limit."""
        self._turn_tokens = turn_tokens
        self.replaces_prompts = replaces_prompts
        """Whether the first reply to a row brings its prompt. Until then, one token stands in for it."""
        self._side = side
        self._limits: dict[int, int] = {}
        """Maximum tokens of the current turn of rows, if an agent has given them."""

    def note(self, row: int, count: int, token: int, logprob: float) -> bool:
        self._side.note(row, token, logprob)
        return count in (self._turn_tokens, self._limits.get(row))

    def end(self, row: int, tokens: Sequence[int]) -> None:
        self._side.end(row, tokens)

    def collect(self, seconds: float) -> Sequence[TurnReply]:
        replies = self._side.collect(seconds)
        self._limits.update((reply.row, reply.limit) for reply in replies if reply.limit is not None)
        return replies

    def outputs(self, batch: Batch, rows: Sequence[int]) -> dict[str, Ragged]:
        """Return the numbers of trajectories that have ended, by key.

        Only the rank that leads the replica has them. `batch` has their sequences, and `rows` has their numbers. A
        trajectory that a limit ended becomes unfinished.
        """
        assert isinstance(self._side, Leader), "only the leader asks"
        return self._side.outputs(batch, rows)


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
