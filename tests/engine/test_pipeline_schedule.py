"""Pipeline schedules and the order of their messages, dry-run without processes."""

from itertools import product

import pytest

from realrl.engine.pass_schedule import Action, Message, Schedule, find_message, make_schedule, order_messages

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (4, 3), (4, 8), (5, 16)]
INTERLEAVED = [
    (stages, micro_batches, virtual)
    for stages, micro_batches, virtual in product((2, 3, 4, 8), (1, 2, 3, 5, 7, 8, 13, 16, 31), (2, 3, 4))
]
BACKWARD = 2
"""Time of a backward pass, in forward passes."""


def find_dependencies(action: Action, stages: int, virtual: int = 1) -> set[Action]:
    """Actions that must have ended before this one starts."""
    place = action.virtual * stages + action.stage
    before = {Action(action.stage, "F", action.micro_batch, action.virtual)} if action.kind == "B" else set()
    place += -1 if action.kind == "F" else 1
    if not 0 <= place < stages * virtual:
        return before
    return before | {Action(place % stages, action.kind, action.micro_batch, place // stages)}


def dry_run(schedule: Schedule, virtual: int = 1) -> int:
    """Execute a schedule, and return its time. A pass through a virtual stage takes one unit of time forward, and
    `BACKWARD` units backward."""
    stages, ended = len(schedule), dict[Action, int]()
    free, remaining = [0] * stages, [list(actions) for actions in schedule]
    while any(remaining):
        progress = False
        for stage, actions in enumerate(remaining):
            while actions and (needed := find_dependencies(actions[0], stages, virtual)) <= ended.keys():
                action = actions.pop(0)
                start = max([free[stage], *(ended[one] for one in needed)])
                free[stage] = ended[action] = start + (1 if action.kind == "F" else BACKWARD)
                progress = True
        assert progress, f"every stage waits: {remaining}"
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_micro_batch_goes_forward_and_backward_once_through_every_stage(
    stages: int, micro_batches: int
) -> None:
    for virtual in (1, 3) if stages > 1 else (1,):
        for stage, actions in enumerate(make_schedule(stages, micro_batches, virtual)):
            expected = {
                Action(stage, k, i, v)
                for k in ("F", "B")
                for i in range(micro_batches)
                for v in range(virtual)
            }
            assert len(actions) == len(expected) and set(actions) == expected


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_schedules_end_in_the_least_possible_time(stages: int, micro_batches: int) -> None:
    assert dry_run(make_schedule(stages, micro_batches)) == (1 + BACKWARD) * (micro_batches + stages - 1)


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_virtual_stages_shorten_the_time_in_which_stages_wait(
    stages: int, micro_batches: int, virtual: int
) -> None:
    """The least possible time: a stage's own passes, and the passes of one micro-batch through one virtual stage
    of each other stage. With fewer micro-batches than stages, a micro-batch's own way is the longest."""
    taken = dry_run(make_schedule(stages, micro_batches, virtual), virtual)
    least = max(micro_batches * virtual + stages - 1, virtual * stages + micro_batches - 1)
    assert taken == (1 + BACKWARD) * least


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_forward_passes_alone_take_the_least_possible_time(
    stages: int, micro_batches: int, virtual: int
) -> None:
    taken = dry_run(make_schedule(stages, micro_batches, virtual, backward=False), virtual)
    assert taken == max(micro_batches * virtual + stages - 1, virtual * stages + micro_batches - 1)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_activations_in_flight_are_bounded_by_the_distance_to_the_end(
    stages: int, micro_batches: int
) -> None:
    for stage, actions in enumerate(make_schedule(stages, micro_batches)):
        assert _count_held(actions) == min(stages - stage, micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_interleaved_stages_hold_the_passes_of_the_warm_up(
    stages: int, micro_batches: int, virtual: int
) -> None:
    """In Megatron, stage s holds 2 * (stages - s - 1) + (virtual - 1) * stages + 1 passes. Groups of more
    micro-batches hold more."""
    group = -(-micro_batches // max(1, micro_batches // stages))
    for stage, actions in enumerate(make_schedule(stages, micro_batches, virtual)):
        most = 2 * (stages - stage - 1) + (virtual - 1) * group + 1
        assert _count_held(actions) == min(most, micro_batches * virtual)


def _count_held(actions: tuple[Action, ...]) -> int:
    held, most = 0, 0
    for action in actions:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), INTERLEAVED)
def test_stages_never_wait_in_a_circle_if_messages_occupy_both_stages(
    stages: int, micro_batches: int, virtual: int, backward: bool
) -> None:
    """Each stage handles its messages in their common order, and waits until each of them has arrived: it receives
    up to the message that its next action needs, and sends as soon as the action has ended."""
    for first in (0, stages, stages * virtual - 1):
        order = order_messages(stages, micro_batches, virtual, backward=backward, first=first)
        schedule = make_schedule(stages, micro_batches, virtual, backward=backward)
        made = {
            message
            for actions in schedule
            for action in actions
            if (message := find_message(action, stages, virtual, first))
        }
        assert set(order) == made and len(order) == len(made)
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


def _check_that_sends_are_made(stage: int, actions: tuple[Action, ...], order: tuple[Message, ...]) -> None:
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
