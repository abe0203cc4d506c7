"""Generate calls leave their memory to the next step where the plan's memory has room, and learn the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from realrl.engine.generation.decode_memory import KeptDecoding
from realrl.engine.generation.generator import Generation
from realrl.plan.cluster import Cluster
from realrl.planner.simulate.estimate import MemoryPart, PartKind
from realrl.planner.simulate.plan_memory import compute_footprints
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.device_memory import list_kept_decoding
from realrl.runtime.prepare.devices import memory_spec
from realrl.runtime.prepare.gpu import Gpu
from realrl.runtime.prepare.job import make_job
from realrl.runtime.prepare.scenarios import phase_scenarios
from realrl.runtime.training_run import TrainingRun
from realrl.runtime.worker import worker
from realrl.testing.check import make_uniform_plan
from tests.conftest import World
from tests.runtime.models.test_offload import ALONE, copy_of, prepared, recipe

NAME = "NVIDIA H100 80GB HBM3"
HOME = ALONE.split("offload:")[0]


def kept_of(run: TrainingRun, memory: int = 80 << 30) -> dict[str, int]:
    return list_kept_decoding(run.job, 0, Gpu(NAME, memory))


def test_memory_is_kept_where_everything_else_fits_beside_it(world: World, tmp_path: Path) -> None:
    run = prepared(recipe(world, tmp_path, HOME))
    spec = memory_spec(run.experiment, run.job.train.plan.cluster, Gpu(NAME, 80 << 30))
    taken, others = 0, 0
    for name, scenario in phase_scenarios(run.job, spec).items():
        (device,) = compute_footprints(scenario, run.job.memory, run.job.phases[name].programs)
        for footprint in device.footprints:
            if (name, footprint.during) == ("train", "actor.generate"):
                parts = footprint.parts
                taken = parts[MemoryPart(PartKind.CACHE)] + parts[MemoryPart(PartKind.GRAPHS)]
            else:
                others = max(others, footprint.bytes)
    assert kept_of(run) == {"actor.generate": taken} and taken > 0
    reserved = (80 << 30) - device.capacity  # for drivers and messages
    assert kept_of(run, reserved + others + taken) == {"actor.generate": taken}
    assert kept_of(run, reserved + others + taken - 1) == {}


def test_nothing_is_kept_where_parameters_leave_or_there_are_no_graphs(world: World, tmp_path: Path) -> None:
    home = prepared(recipe(world, tmp_path / "home", HOME))
    assert list_kept_decoding(home.job, 0, None) == {}, "a CPU"
    assert kept_of(prepared(recipe(world, tmp_path / "offloaded", ALONE))) == {}


@pytest.mark.parametrize(("degrees", "kept"), [({"dp": 2}, True), ({"tp": 2}, False), ({"cp": 2}, False)])
def test_graphs_with_collectives_are_not_kept(
    world: World, tmp_path: Path, degrees: dict[str, int], kept: bool
) -> None:
    """They would outlive the communicators that they hold."""
    experiment = load_experiment(str(recipe(world, tmp_path, None, cluster="1x2")), [])
    plan = make_uniform_plan(experiment.graph, Cluster(1, 2), micro_batch_tokens=256, **degrees)
    found = list_kept_decoding(make_job(experiment, Cluster(1, 2), plan), 0, Gpu(NAME, 80 << 30))
    assert (found.keys() == {"actor.generate"}) == kept


def test_steps_learn_the_same_from_memory_that_is_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, keeping = (prepared(recipe(world, tmp_path / name, None)) for name in ("usual", "keeping"))
    keeping.roles.keep_decoding(["actor.generate"])
    given: list[KeptDecoding | None] = []

    def noted(*arguments: Any, kept: KeptDecoding | None, **options: Any) -> Generation:
        given.append(kept)
        return Generation(*arguments, kept=kept, **options)

    monkeypatch.setattr(worker, "Generation", noted)
    for step in range(3):
        keeping._train_step(step)
    steps = [kept for kept in given if kept is not None]
    assert len(steps) == 3 and len(set(map(id, steps))) == 1
    assert keeping.roles.kept_beside("actor.generate") == 0
    assert keeping.roles.kept_beside("actor.train") == steps[0].nbytes
    monkeypatch.undo()
    for step in range(3):
        usual._train_step(step)
    for role in ("actor", "critic"):
        assert torch.equal(copy_of(usual, role), copy_of(keeping, role)), role
