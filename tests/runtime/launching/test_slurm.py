"""Variables of srun describe a rank as those of torchrun do."""

import pytest

from realrl.config.errors import UserError
from realrl.runtime.processes import slurm
from realrl.runtime.processes.slurm import join_slurm_step

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[03-04,7]",
}
"""Process 1 of the second of three nodes."""


@pytest.fixture(autouse=True)
def every_host_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "find_own_address", lambda _: "10.0.0.1")


def test_a_process_of_a_step_is_a_rank() -> None:
    environment = dict(STEP)
    join_slurm_step(environment)
    assert environment.items() - STEP.items() == {
        ("RANK", "3"),
        ("WORLD_SIZE", "5"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("GROUP_RANK", "1"),
        ("GROUP_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "n03"),
        ("MASTER_PORT", "26705"),
    }
    before = dict(environment)
    join_slurm_step(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1,n2,n3", "n1"),
        ("gpu-a[2-4]", "gpu-a2"),
        ("rack[1-3]n[08,09]", "rack1n08"),
        ("r[5]x.example.org,n[1-2]", "r5x.example.org"),
    ],
)
def test_ranks_meet_at_the_first_host(nodes: str, first: str) -> None:
    environment = {**STEP, "SLURM_STEP_NODELIST": nodes}
    join_slurm_step(environment)
    assert environment["MASTER_ADDR"] == first


def test_the_user_may_choose_where_ranks_meet_and_the_cores_of_a_rank() -> None:
    own = {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "555"}
    environment = {**STEP, **own, "SLURM_CPUS_PER_TASK": "6"}
    join_slurm_step(environment)
    assert own.items() <= environment.items() and environment["OMP_NUM_THREADS"] == "6"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_ID": "1",
        },  # a batch script
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {**STEP, "RANK": "1", "WORLD_SIZE": "2"},  # torchrun, started by srun
    ],
)
def test_other_processes_stay_as_they_are(variables: dict[str, str]) -> None:
    environment = dict(variables)
    join_slurm_step(environment)
    assert environment == variables


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"SLURM_PROCID": "five"},
            "SLURM_PROCID=five, .*: srun does not set these so; start the command with",
        ),
        ({"SLURM_STEP_NUM_TASKS": None}, "SLURM_STEP_NUM_TASKS=, .*: srun does not set these so"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8, .*SLURM_STEP_TASKS_PER_NODE="),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3, .*: srun does not set these so"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2, .*: srun does not set these so"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "SLURM_STEP_TASKS_PER_NODE=2x2: srun does not set"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST=: srun does not set these so"),
        ({"SLURM_PROCID": "4"}, "are not numbered in a row; start them with srun --distribution=block"),
    ],
)
def test_variables_that_contradict_each_other_are_one_message(
    changes: dict[str, str | None], message: str
) -> None:
    environment = {name: value for name, value in (STEP | changes).items() if value is not None}
    before = dict(environment)
    with pytest.raises(UserError, match=message):
        join_slurm_step(environment)
    assert environment == before


def test_a_first_node_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"has no way to no\.such\.host\.invalid, where the nodes meet"):
        join_slurm_step({**STEP, "SLURM_STEP_NODELIST": "no.such.host.invalid,n[1-2]"})
