"""Pipeline schedules and the order of their messages, dry-run without processes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from realrl.engine.pass_schedule import Action, Message, find_message, make_schedule

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (4, 3), (4, 8), (5, 16)]
INTERLEAVED = [
    (stages, micro_batches, virtual)
    for stages, micro_batches, virtual in product((2, 3, 8), (1, 3, 8, 13, 31), (2, 3))
]
BACKWARD = 2
"""Time of a backward pass, in forward passes."""


def find_dependencies(action: Action, stages: int, virtual: int = 1) -> set[Action]:
    """Actions that must have ended before this one starts."""
    place = action.virtual * stages + action.stage
    if action.kind == "W":
        return {replace(action, kind="B")}
    before = {replace(action, kind="F")} if action.kind == "B" else set()
    place += -1 if action.kind == "F" else 1
    if not 0 <= place < stages * virtual:
        return before
    return before | {Action(place % stages, action.kind, action.micro_batch, place // stages)}


def dry_run(schedule: Sequence[Sequence[Action]], virtual: int = 1, backward: int = BACKWARD) -> int:
    """Execute the actions of stages, and return the time. A pass through a virtual stage takes one unit of time
    forward, and `backward` units backward. Gradients of weights take one unit."""
    stages, ended = len(schedule), dict[Action, int]()
    free, remaining = [0] * stages, [list(actions) for actions in schedule]
    while any(remaining):
        progress = False
        for stage, actions in enumerate(remaining):
            while actions and (needed := find_dependencies(actions[0], stages, virtual)) <= ended.keys():
                action = actions.pop(0)
                start = max([free[stage], *(ended[one] for one in needed)])
                free[stage] = ended[action] = start + (backward if action.kind == "B" else 1)
                progress = True
        assert progress, f"every stage waits: {remaining}"
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_micro_batch_goes_forward_and_backward_once_through_every_stage(
    stages: int, micro_batches: int
) -> None:
    for virtual in (1, 3) if stages > 1 else (1,):
        for stage, actions in enumerate(make_schedule(stages, micro_batches, virtual).actions):
            expected = {
                Action(stage, k, i, v)
                for k in ("F", "B")
                for i in range(micro_batches)
                for v in range(virtual)
            }
            assert len(actions) == len(expected) and set(actions) == expected


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_schedules_end_in_the_least_possible_time(stages: int, micro_batches: int) -> None:
    assert dry_run(make_schedule(stages, micro_batches).actions) == (1 + BACKWARD) * (
        micro_batches + stages - 1
    )


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_virtual_stages_shorten_the_time_in_which_stages_wait(
    stages: int, micro_batches: int, virtual: int
) -> None:
    """The least possible time: a stage's own passes, and the passes of one micro-batch through one virtual stage
    of each other stage. With fewer micro-batches than stages, a micro-batch's own way is the longest."""
    taken = dry_run(make_schedule(stages, micro_batches, virtual).actions, virtual)
    least = max(micro_batches * virtual + stages - 1, virtual * stages + micro_batches - 1)
    assert taken == (1 + BACKWARD) * least


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_forward_passes_alone_take_the_least_possible_time(
    stages: int, micro_batches: int, virtual: int
) -> None:
    taken = dry_run(make_schedule(stages, micro_batches, virtual, backward=False).actions, virtual)
    assert taken == max(micro_batches * virtual + stages - 1, virtual * stages + micro_batches - 1)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_activations_in_flight_are_bounded_by_the_distance_to_the_end(
    stages: int, micro_batches: int
) -> None:
    for stage, actions in enumerate(make_schedule(stages, micro_batches).actions):
        assert _count_held(actions) == min(stages - stage, micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_interleaved_stages_hold_the_passes_of_the_warm_up(
    stages: int, micro_batches: int, virtual: int
) -> None:
    """In Megatron, stage s holds 2 * (stages - s - 1) + (virtual - 1) * stages + 1 passes. Groups of more
    micro-batches hold more."""
    group = -(-micro_batches // max(1, micro_batches // stages))
    for stage, actions in enumerate(make_schedule(stages, micro_batches, virtual).actions):
        most = 2 * (stages - stage - 1) + (virtual - 1) * group + 1
        assert _count_held(actions) == min(most, micro_batches * virtual)


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), [(*size, 1) for size in SIZES] + INTERLEAVED)
def test_gradients_of_weights_fill_two_thirds_of_the_time_in_which_stages_wait(
    stages: int, micro_batches: int, virtual: int
) -> None:
    """Zero Bubble Pipeline Parallelism, table 1: stages of ZB-H1 wait for (p - 1) (T_F + T_B - T_W) instead of
    (p - 1) (T_F + T_B + T_W), and the largest number of held micro-batches stays the same."""
    schedule = make_schedule(stages, micro_batches, virtual, splits=True).actions
    taken = dry_run(schedule, virtual, backward=1)
    if micro_batches >= stages:
        assert taken == 3 * micro_batches * virtual + stages - 1
    else:
        assert taken < dry_run(make_schedule(stages, micro_batches, virtual).actions, virtual)
    most = max(map(_count_held, make_schedule(stages, micro_batches, virtual).actions))
    for stage, actions in enumerate(schedule):
        assert _count_held(actions, ends="W") <= most
        own = _count_held(make_schedule(stages, micro_batches, virtual).actions[stage])
        assert _count_held(actions) <= own
        assert _count_held(actions, begins="B", ends="W") <= most - own + 1
        for kind in ("F", "B", "W"):
            passes = {(one.micro_batch, one.virtual) for one in actions if one.kind == kind}
            assert passes == {(i, turn) for i in range(micro_batches) for turn in range(virtual)}
        assert len(actions) == 3 * micro_batches * virtual and {one.stage for one in actions} == {stage}


def _count_held(actions: Sequence[Action], begins: str = "F", ends: str = "B") -> int:
    held, most = 0, 0
    for action in actions:
        held += (action.kind == begins) - (action.kind == ends)
        most = max(most, held)
    return most


@pytest.mark.parametrize("settings", [{}, {"backward": False}, {"splits": True}])
@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_stages_never_wait_in_a_circle_if_messages_occupy_both_stages(
    stages: int, micro_batches: int, virtual: int, settings: dict[str, bool]
) -> None:
    """Each stage handles its messages in their common order, and waits until each of them has arrived: it receives
    up to the message that its next action needs, and sends as soon as the action has ended."""
    for first in (0, stages, stages * virtual - 1):
        made = make_schedule(stages, micro_batches, virtual, **settings, first=first)
        schedule, order = made.actions, made.messages
        expected = {
            message
            for actions in schedule
            for action in actions
            if (message := find_message(action, stages, virtual, first))
        }
        assert set(order) == expected and len(order) == len(expected)
        for stage, actions in enumerate(schedule):
            _check_that_sends_are_made(stage, actions, order)
        # An action needs only messages that come before the one it makes, and so do the actions before it.
        places = {message.needed_by: place for place, message in enumerate(order)}
        makers = {message.made_by: place for place, message in enumerate(order)}
        for actions in schedule:
            latest = -1
            for action in actions:
                latest = max(latest, places.get(action, -1))
                assert latest < makers.get(action, len(order))


def _check_that_sends_are_made(stage: int, actions: Sequence[Action], order: Sequence[Message]) -> None:
    """Check a stage's messages: it posts them in order, up to the one that an action needs, and after the action up
    to the one that the action has made."""
    unposted = [one for one in order if stage in (one.made_by.stage, one.needed_by.stage)]
    needed = {one.needed_by: one for one in unposted if one.needed_by.stage == stage}
    sent = {one.made_by: one for one in unposted if one.made_by.stage == stage}
    done: set[Action] = set()

    def post(last: Message | None) -> None:
        while last in unposted:
            posted = unposted.pop(0)
            assert posted.made_by.stage != stage or posted.made_by in done, (
                f"{posted} is sent before it is made"
            )

    for action in actions:
        post(needed.get(action))
        done.add(action)
        post(sent.get(action))
    assert not unposted
