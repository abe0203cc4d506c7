"""Pipeline schedules, dry-run without processes."""

import pytest

from realrl.engine.pipeline import Action, dry_run, make_1f1b_schedule

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (4, 3), (4, 8), (5, 16)]


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


def test_pipeline_actions_round_trip_through_text() -> None:
    for action in make_1f1b_schedule(3, 4)[1]:
        assert Action.parse(str(action)) == action
    with pytest.raises(ValueError, match="2X0"):
        Action.parse("2X0")


def test_a_stage_that_goes_backward_too_early_is_reported_with_the_grid() -> None:
    schedule = make_1f1b_schedule(2, 2)
    schedule[0] = [Action(0, "B", 0), *schedule[0][:1]]
    with pytest.raises(ValueError, match=r"stage 0:  ?0B0 <-- ERROR HERE\n  stage 1"):
        dry_run(schedule)
