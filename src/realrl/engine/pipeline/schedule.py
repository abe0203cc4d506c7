"""Pipeline schedules: the order in which stages work on micro-batches. No torch, so that dry runs are cheap."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Forward (`F`) or backward (`B`) of one micro-batch on one stage.

    Its text is for example `2F0`: stage 2, forward, micro-batch 0.
    """

    stage: int
    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form; ValueError for anything else."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ValueError(f"not a pipeline action: {text!r}")
        return cls(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))

    def list_dependencies(self, stages: int) -> tuple["Action", ...]:
        """Actions that must have ended before this one starts."""
        if self.kind == "F":
            return (Action(self.stage - 1, "F", self.micro_batch),) if self.stage else ()
        own = Action(self.stage, "F", self.micro_batch)
        if self.stage == stages - 1:
            return (own,)
        return (own, Action(self.stage + 1, "B", self.micro_batch))


Schedule = list[list[Action]]
"""Actions of each stage, in order."""


def make_1f1b_schedule(stages: int, micro_batches: int) -> Schedule:
    """Make a 1F1B schedule (PipeDream-Flush, arXiv 2006.09503).

    After a warm-up, each stage alternates, so that stage s never holds activations of more than `stages - s`
    micro-batches.
    """
    schedule: Schedule = []
    for stage in range(stages):
        warmup = min(stages - stage - 1, micro_batches)
        order = [Action(stage, "F", i) for i in range(warmup)]
        for i in range(micro_batches - warmup):
            order += [Action(stage, "F", warmup + i), Action(stage, "B", i)]
        order += [Action(stage, "B", i) for i in range(micro_batches - warmup, micro_batches)]
        schedule.append(order)
    return schedule


def dry_run(schedule: Schedule) -> int:
    """Execute a schedule in unit time steps without any process; the number of steps it takes. Tests prove with it
    that schedules end.

    ValueError, with the grid of what each stage has done and where it stands, when an action runs twice or
    waits for one that never comes.
    """
    done: set[Action] = set()
    position = [0] * len(schedule)
    steps = 0
    while any(p < len(actions) for p, actions in zip(position, schedule, strict=True)):
        ready = [
            stage
            for stage, actions in enumerate(schedule)
            if position[stage] < len(actions)
            and set(actions[position[stage]].list_dependencies(len(schedule))) <= done
        ]
        started = [schedule[stage][position[stage]] for stage in ready]
        if not ready or done & set(started):
            raise ValueError("the schedule cannot go on:\n" + _grid(schedule, position))
        done |= set(started)
        for stage in ready:
            position[stage] += 1
        steps += 1
    return steps


def _grid(schedule: Schedule, position: Sequence[int]) -> str:
    lines = []
    for stage, actions in enumerate(schedule):
        past = " ".join(map(str, actions[: position[stage]]))
        rest = actions[position[stage] :]
        here = f" {rest[0]} <-- ERROR HERE" if rest else " (end)"
        lines.append(f"  stage {stage}: {past}{here}")
    return "\n".join(lines)
