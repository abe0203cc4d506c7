"""Pipeline schedules, dry-run without processes."""

import pytest

from realrl.engine.pipeline import Action, make_1f1b_schedule

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (4, 3), (4, 8), (5, 16)]


def find_dependencies(action: Action, stages: int) -> set[Action]:
    """Actions that must have ended before this one starts."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "F":
        return {Action(stage - 1, "F", number)} if stage else set()
    later = {Action(stage + 1, "B", number)} if stage < stages - 1 else set()
    return {Action(stage, "F", number), *later}


def dry_run(schedule: list[list[Action]]) -> int:
    """Execute a schedule in unit time steps, and return their number."""
    done: set[Action] = set()
    remaining = [list(actions) for actions in schedule]
    steps = 0
    while any(remaining):
        ready = [
            actions
            for actions in remaining
            if actions and find_dependencies(actions[0], len(schedule)) <= done
        ]
        assert ready, f"every stage waits: {remaining}"
        done |= {actions.pop(0) for actions in ready}
        steps += 1
    return steps


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_micro_batch_goes_forward_and_backward_once_through_every_stage(
    stages: int, micro_batches: int
) -> None:
    schedule = make_1f1b_schedule(stages, micro_batches)
    for stage, actions in enumerate(schedule):
        expected = {Action(stage, k, i) for k in ("F", "B") for i in range(micro_batches)}
        assert len(actions) == len(expected) and set(actions) == expected


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_schedules_end_in_the_least_possible_steps(stages: int, micro_batches: int) -> None:
    assert dry_run(make_1f1b_schedule(stages, micro_batches)) == 2 * (micro_batches + stages - 1)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_activations_in_flight_are_bounded_by_the_distance_to_the_end(
    stages: int, micro_batches: int
) -> None:
    for stage, actions in enumerate(make_1f1b_schedule(stages, micro_batches)):
        held, most = 0, 0
        for action in actions:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert most == min(stages - stage, micro_batches)
