"""The order in which pipeline stages run their passes, and the order of the messages between these passes."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Forward (`F`) or backward (`B`) pass of one micro-batch through one virtual stage of a pipeline stage."""

    stage: int
    kind: Literal["F", "B"]
    micro_batch: int
    virtual: int = 0


Schedule = Sequence[Sequence[Action]]
"""The actions of each stage, in order."""


@lru_cache(maxsize=64)
def make_schedule(stages: int, micro_batches: int, virtual: int = 1, *, backward: bool = True) -> Schedule:
    """Make the schedule of `micro_batches` micro-batches through `stages` stages, each with `virtual` virtual
    stages. Without `backward`, there are only forward passes.

    After a warm-up, each stage alternates between forward and backward passes (1F1B, PipeDream-Flush, arXiv
    2006.09503). So stage s never holds activations of more than `stages - s` micro-batches.

    Virtual stages are interleaved as in Megatron (arXiv 2104.04473, section 2.2). A group of about as many
    micro-batches as there are stages passes the first virtual stage of every stage, then the second ones, and so
    on. While the pipeline fills and empties, stages then wait for passes through virtual stages, which are shorter.
    Megatron's groups have exactly `stages` micro-batches. Here, groups share the micro-batches evenly, so that any
    number of them makes a schedule.
    """
    if not backward:
        forward = [_order(micro_batches, stages, range(virtual))] * stages
        return tuple(tuple(Action(s, "F", i, k) for i, k in order) for s, order in enumerate(forward))
    schedule = []
    forwards, backwards = (
        _order(micro_batches, stages, turns) for turns in (range(virtual), range(virtual)[::-1])
    )
    for stage in range(stages):
        after = stages - stage - 1
        if virtual > 1:
            after = 2 * after + (virtual - 1) * len(_group(micro_batches, stages)[0])
        warmup = min(after, len(forwards))
        there, back = deque(forwards), deque(backwards)
        actions = [Action(stage, "F", *there.popleft()) for _ in range(warmup)]
        while back:
            if there:
                actions.append(Action(stage, "F", *there.popleft()))
            actions.append(Action(stage, "B", *back.popleft()))
        schedule.append(tuple(actions))
    return tuple(schedule)


def _order(micro_batches: int, stages: int, turns: Sequence[int]) -> list[tuple[int, int]]:
    """List the passes of a stage: (micro-batch, virtual stage)."""
    return [(i, turn) for group in _group(micro_batches, stages) for turn in turns for i in group]


def _group(micro_batches: int, stages: int) -> list[range]:
    """Divide micro-batches into groups of at least `stages`, the larger ones first, or into a single group."""
    count = max(1, micro_batches // stages)
    size, larger = divmod(micro_batches, count)
    ends = [group * size + min(group, larger) for group in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Message:
    """Hidden states, or their gradient, that one action makes and another one needs."""

    made_by: Action
    needed_by: Action


@lru_cache(maxsize=16)
def order_messages(
    stages: int, micro_batches: int, virtual: int, *, backward: bool = True, first: int = 0
) -> tuple[Message, ...]:
    """Put all messages of a schedule in one order, in which every stage sends and receives its own.

    It is the order in which they are made if forward passes take one unit of time and backward passes two. An
    action needs only messages that come before the one it makes. So stages never wait for each other in a circle,
    even if every message occupies both of its stages until it has arrived.

    `first`: place of the first virtual stage with something to train, in the order in which a micro-batch passes
    virtual stages. Virtual stages up to it send no gradients back.
    """
    schedule = make_schedule(stages, micro_batches, virtual, backward=backward)
    position = [0] * stages
    free = [0] * stages
    arrived: dict[Action, int] = {}
    found: list[tuple[int, int, Message]] = []
    waiting = {stage for stage in range(stages) if schedule[stage]}
    ready = deque(sorted(waiting))
    needs = {message.needed_by for message in _list_messages(schedule, virtual, first)}
    while ready:
        stage = ready.popleft()
        while position[stage] < len(schedule[stage]):
            action = schedule[stage][position[stage]]
            if action in needs and action not in arrived:
                break
            start = max(free[stage], arrived.get(action, 0))
            free[stage] = start + (1 if action.kind == "F" else 2)
            position[stage] += 1
            message = find_message(action, stages, virtual, first)
            if message is not None:
                arrived[message.needed_by] = free[stage]
                found.append((free[stage], stage, message))
                ready.append(message.needed_by.stage)
    assert all(position[s] == len(schedule[s]) for s in range(stages)), "every stage waits for another one"
    return tuple(message for *_, message in sorted(found, key=lambda one: one[:2]))


def _list_messages(schedule: Schedule, virtual: int, first: int) -> Iterator[Message]:
    for actions in schedule:
        for action in actions:
            message = find_message(action, len(schedule), virtual, first)
            if message is not None:
                yield message


def find_message(action: Action, stages: int, virtual: int, first: int) -> Message | None:
    """Find the message that an action makes, if it makes one. For `first`, see `order_messages`."""
    place = action.virtual * stages + action.stage
    if action.kind == "F":
        place += 1
        made = place < stages * virtual
    else:
        made = place > first
        place -= 1
    if not made:
        return None
    return Message(action, Action(place % stages, action.kind, action.micro_batch, place // stages))
