"""The order in which pipeline stages run their passes, and the order of the messages between these passes."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Pass of one micro-batch through one virtual stage of a pipeline stage: forward (`F`), backward (`B`), or the
    gradients of the weights (`W`) if the backward pass leaves them out."""

    stage: int
    kind: Literal["F", "B", "W"]
    micro_batch: int
    virtual: int = 0


@dataclass(frozen=True)
class Message:
    """Hidden states, or their gradient, that one action makes and another one needs."""

    made_by: Action
    needed_by: Action


@dataclass(frozen=True)
class Schedule:
    """Passes through a pipeline, and the messages between them."""

    actions: Sequence[Sequence[Action]]
    """The actions of each stage, in order."""
    messages: Sequence[Message]
    """All messages, in one order in which every stage sends and receives its own. An action needs only messages
    that come before the one it makes. So stages never wait for each other in a circle, even if every message
    occupies both of its stages until it has arrived."""


@lru_cache(maxsize=32)
def make_schedule(
    stages: int,
    micro_batches: int,
    virtual: int = 1,
    *,
    backward: bool = True,
    splits: bool = False,
    first: int = 0,
) -> Schedule:
    """Make the schedule of `micro_batches` micro-batches through `stages` stages, each with `virtual` virtual
    stages. Without `backward`, there are only forward passes.

    After a warm-up, each stage alternates between forward and backward passes (1F1B, PipeDream-Flush, arXiv
    2006.09503). So stage s never holds activations of more than `stages - s` micro-batches.

    Virtual stages are interleaved as in Megatron (arXiv 2104.04473, section 2.2). A group of about as many
    micro-batches as there are stages passes the first virtual stage of every stage, then the second ones, and so
    on. While the pipeline fills and empties, stages then wait for passes through virtual stages, which are shorter.
    Megatron's groups have exactly `stages` micro-batches. Here, groups share the micro-batches evenly, so that any
    number of them makes a schedule.

    `splits`: whether backward passes leave out the gradients of weights. No other stage waits for these, so a stage
    computes them while it would wait itself (zero bubble, arXiv 2401.10241; without virtual stages, this is its
    schedule ZB-H1). Each stage may leave out the gradients of as many passes as its warm-up is shorter than that of
    the first stage, and of one more.

    `first`: place of the first virtual stage with something to train, in the order in which a micro-batch passes
    virtual stages. Virtual stages up to it send no gradients back.
    """
    orders, holds = [], []
    for stage in range(stages):
        passes, warmup = _order_passes(stages, stage, micro_batches, virtual, backward=backward)
        orders.append(passes)
        holds.append(min(warmup + 1, micro_batches * virtual))
    return _DryRun(orders, virtual, holds if splits else None, first).run()


def _order_passes(
    stages: int, stage: int, micro_batches: int, virtual: int, *, backward: bool
) -> tuple[list[Action], int]:
    """Order the forward and backward passes of a stage. Also returns the number of passes before it alternates."""
    groups = _group(micro_batches, stages)

    def order(kind: Literal["F", "B"], turns: Sequence[int]) -> deque[Action]:
        return deque(Action(stage, kind, i, turn) for group in groups for turn in turns for i in group)

    there, back = order("F", range(virtual)), order("B", range(virtual)[::-1])
    if not backward:
        return list(there), 0
    warmup = stages - stage - 1
    if virtual > 1:
        warmup = 2 * warmup + (virtual - 1) * len(groups[0])
    actions = [there.popleft() for _ in range(min(warmup, len(there)))]
    while back:
        if there:
            actions.append(there.popleft())
        actions.append(back.popleft())
    return actions, warmup


def _group(micro_batches: int, stages: int) -> list[range]:
    """Divide micro-batches into groups of at least `stages`, the larger ones first. If there are fewer
    micro-batches than stages, they are one group."""
    count = max(1, micro_batches // stages)
    size, larger = divmod(micro_batches, count)
    ends = [group * size + min(group, larger) for group in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def find_message(action: Action, stages: int, virtual: int, first: int = 0) -> Message | None:
    """Find the message that an action makes, if it makes one. For `first`, see `make_schedule`."""
    place = action.virtual * stages + action.stage
    match action.kind:
        case "F":
            place += 1
            made = place < stages * virtual
        case "B":
            made = place > first
            place -= 1
        case "W":
            made = False
    if not made:
        return None
    return Message(action, Action(place % stages, action.kind, action.micro_batch, place // stages))


class _DryRun:
    """Run of a schedule in which a forward pass takes one unit of time, a backward pass two, and gradients of
    weights one of these two."""

    def __init__(
        self, orders: Sequence[Sequence[Action]], virtual: int, holds: Sequence[int] | None, first: int
    ) -> None:
        """`orders`: forward and backward passes of each stage. `holds`: if backward passes leave out gradients of
        weights, the number of passes between whose forward and backward passes each stage is at a time, or more."""
        self._virtual, self._first = virtual, first
        self._splits = holds is not None
        self._most = max(holds or [0])
        """Number of passes that a stage may hold if backward passes leave out gradients of weights."""
        self._most_left_out = [self._most - hold + 1 for hold in holds or ()]
        """Number of passes whose gradients of weights a stage may leave out before its next backward pass."""
        self._left = [deque(actions) for actions in orders]
        self._left_out: list[deque[Action]] = [deque() for _ in orders]
        """Gradients of weights that each stage still has to compute."""
        self._held = [0] * len(orders)
        """Number of passes whose activations each stage holds."""
        self._arrivals: dict[Action, int] = {}
        """Times at which messages have arrived, by the action that needs them."""
        self._needs = {
            message.needed_by
            for actions in orders
            for action in actions
            if (message := find_message(action, len(orders), virtual, first)) is not None
        }

    def run(self) -> Schedule:
        stages = range(len(self._left))
        actions: list[list[Action]] = [[] for _ in stages]
        messages: list[tuple[int, int, Message]] = []
        free = [0 for _ in stages]
        due = [(0, stage) for stage in stages]  # times at which a stage may have something to do
        while due:
            time, stage = heapq.heappop(due)
            action = self._choose(stage, time) if time >= free[stage] else None
            if action is None:
                continue
            actions[stage].append(action)
            free[stage] = time + (2 if action.kind == "B" and not self._splits else 1)
            heapq.heappush(due, (free[stage], stage))
            message = find_message(action, len(stages), self._virtual, self._first)
            if message is not None:
                self._arrivals[message.needed_by] = free[stage]
                messages.append((free[stage], stage, message))
                receiver = message.needed_by.stage
                heapq.heappush(due, (max(free[stage], free[receiver]), receiver))
        assert not any(self._left), "every stage waits for another one"
        in_order = (message for *_, message in sorted(messages, key=lambda made: made[:2]))
        return Schedule(tuple(map(tuple, actions)), tuple(in_order))

    def _choose(self, stage: int, time: int) -> Action | None:
        """Choose and count what a stage does at a time; None if it waits."""
        left, left_out = self._left[stage], self._left_out[stage]
        action = left[0] if left else None
        if action is not None and action in self._needs and self._arrivals.get(action, time + 1) > time:
            action = None
        if left_out and (action is None or self._is_full(stage, action)):
            self._held[stage] -= 1
            return left_out.popleft()
        if action is None:
            return None
        left.popleft()
        if action.kind == "F":
            self._held[stage] += 1
        elif not self._splits:
            self._held[stage] -= 1
        else:
            left_out.append(replace(action, kind="W"))
        return action

    def _is_full(self, stage: int, action: Action) -> bool:
        """Check whether a stage must compute gradients of weights before it has memory for an action."""
        if action.kind == "F":
            return self._held[stage] >= self._most
        return len(self._left_out[stage]) >= self._most_left_out[stage]
