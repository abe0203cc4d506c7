"""What waits in host memory, what follows the actor, and what is saved, under plans of many layouts."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer
from realrl.engine.model import Model
from realrl.engine.offload import HostCopies, Offloadable
from realrl.families.registry import model_tensors
from realrl.huggingface import model_files
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.program.instructions import Load
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.device_memory import list_early_loads
from realrl.runtime.prepare.gpu import Gpu
from realrl.runtime.prepare.job import make_job
from realrl.runtime.processes.process import Process
from realrl.runtime.training_run import TrainingRun
from realrl.runtime.worker.roles import Roles
from tests.conftest import World, read_metrics

ALONE = """
cluster: 1x1
calls: {actor.generate: {mesh: 0, dp: 1}, reward.inference: {mesh: 0, dp: 1}, ref.inference: {mesh: 0, dp: 1},
  critic.inference: {mesh: 0, dp: 1}, actor.train: {mesh: 0, dp: 1}, critic.train: {mesh: 0, dp: 1}}
offload: [actor, critic, ref, reward]
offload_optimizer: [actor, critic]
"""
MIXED = """
cluster: 1x4
calls:
  actor.generate: {mesh: 0-1, dp: 1, tp: 2}
  reward.inference: {mesh: 2-3, dp: 2}
  ref.inference: {mesh: 0-1, dp: 1, pp: 2}
  critic.inference: {mesh: 1, dp: 1}
  actor.train: {mesh: 0-3, dp: 1, tp: 2, pp: 2, sequence_parallel: true}
  critic.train: {mesh: 0-3, dp: 2, tp: 2}
offload: [ref, reward, actor]
offload_optimizer: [actor]
"""
CHANGES = {"ppo__ref_ema": 0.25, "training__steps": 3, "debug__verify_reallocation": True}


def recipe(world: World, directory: Path, plan: str | None, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    if plan is not None:
        (directory / "plan.yaml").write_text(plan)
        changes |= {"plan": str(directory / "plan.yaml"), "cluster": plan.split()[1]}
    return world.recipe("ppo", directory, **{**CHANGES, **changes})


def prepared(file: Path) -> TrainingRun:
    """A run in this process, before its first step."""
    experiment = load_experiment(str(file), [])
    job = make_job(experiment, Cluster(1, 1))
    run = TrainingRun(job, Process(0, 1, torch.device("cpu")), None)
    run.load()
    run.restore()
    return run


def home(run: TrainingRun, role: str) -> Model:
    return run.roles._models[role, run.job.homes[role].layout]


def copy_of(run: TrainingRun, role: str) -> torch.Tensor:
    """The values of all parameter sets of a role, back to back."""
    found = []
    for held in home(run, role).sets.values():
        offloaded = not held.memory.resident
        if offloaded:
            held.memory.load()
        found.append(held.buffer.data.clone())
        if offloaded:
            held.memory.offload(changed=False)
    return torch.cat(found)


def test_offloaded_tensors_return_bit_for_bit_and_free_their_memory() -> None:
    first, second, scratch = torch.randn(1000), torch.randn(10).bfloat16(), torch.zeros(50)
    expected, view = (first.clone(), second.clone()), first[10:20].view(2, 5)
    memory = Offloadable([first, second], [scratch])
    for change in (0.0, 1.0):
        first += change
        scratch += change
        memory.offload(changed=bool(change))
        assert [t.untyped_storage().nbytes() for t in (first, second, scratch, view)] == [0, 0, 0, 0]
        memory.load()
        assert torch.equal(first, expected[0] + change) and torch.equal(second, expected[1])
        assert torch.equal(view.flatten(), first[10:20]) and not scratch.any()


PARTIAL = {"models__actor__trainable_layers": 1, "models__critic__freeze_embeddings": True}


@pytest.mark.parametrize("changes", [{}, PARTIAL])
def test_a_step_with_everything_offloaded_learns_the_same(
    world: World, tmp_path: Path, changes: dict[str, object]
) -> None:
    usual = prepared(recipe(world, tmp_path / "usual", None, **changes))
    offloaded = prepared(recipe(world, tmp_path / "offloaded", ALONE, **changes))
    for step in range(2):
        for run in (usual, offloaded):
            run._train_step(step)
    for role in ("actor", "critic", "ref", "reward"):
        assert torch.equal(copy_of(usual, role), copy_of(offloaded, role)), role
        for held in home(offloaded, role).sets.values():
            assert held.buffer.data.untyped_storage().nbytes() == 0
    trainer = offloaded.roles.trainers["actor"]
    for tensor in (trainer.gradients.data, *trainer.optimizer.persistent, *trainer.optimizer.workspace):
        assert tensor.untyped_storage().nbytes() == 0


def test_host_memory_is_reserved_for_what_is_offloaded_before_weights_are_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[object] = []
    read = Roles._read_weights

    def noted(roles: Roles, role: str, model: Model) -> None:
        log.append(role)
        read(roles, role, model)

    monkeypatch.setattr(Roles, "_read_weights", noted)
    monkeypatch.setattr(Offloadable, "reserve", lambda memory: log.append(memory))
    run = prepared(recipe(world, tmp_path, ALONE.replace("[actor, critic, ref, reward]", "[actor, ref]")))
    assert sorted(item for item in log if isinstance(item, str)) == ["actor", "critic", "ref", "reward"]
    before: list[object] = []
    for item in log:
        if isinstance(item, str):
            expected = [home(run, item).sets["base"].memory] if item in ("actor", "ref") else []
            if item in ("actor", "critic"):
                expected.append(run.roles.trainers[item].memory)
            assert before == expected, item
            before = []
        else:
            before.append(item)
    assert not before


def test_training_begins_with_the_weights_that_were_read(world: World, tmp_path: Path) -> None:
    run = prepared(recipe(world, tmp_path, None, models__actor__dtype="bfloat16", ppo__ref_ema=None))
    master, parameters = run.roles.trainers["actor"].optimizer.master, copy_of(run, "actor")
    assert master is not None and master.dtype == torch.float32 and parameters.dtype == torch.bfloat16
    assert torch.equal(master, parameters.float()) and parameters.any()


class _Beside(HostCopies):
    """Copies that may begin early, as on a GPU."""

    asynchronous = True


def test_loads_that_begin_early_change_nothing(world: World, tmp_path: Path) -> None:
    usual = prepared(recipe(world, tmp_path / "usual", None))
    offloaded = prepared(recipe(world, tmp_path / "offloaded", ALONE))
    gpu = Gpu("NVIDIA H100 80GB HBM3", 80 << 30)
    early = list_early_loads(offloaded.job, 0, gpu)
    program = offloaded.job.train.programs[0]
    # Of the parameters and the optimizers of two roles, at least, some are loaded after the first call.
    assert sum(len(loads) for loads in next(found for of, found in early if of is program).values()) >= 2
    assert not list_early_loads(offloaded.job, 0, None)
    roles = offloaded.roles
    offloaded.worker._early_loads = early
    memories = [held.memory for model in roles._models.values() for held in model.sets.values()]
    for memory in (*memories, *(trainer.memory for trainer in roles.trainers.values())):
        memory._copies = _Beside()
    for step in range(2):
        for run in (usual, offloaded):
            run._train_step(step)
    for role in ("actor", "critic", "ref", "reward"):
        assert torch.equal(copy_of(usual, role), copy_of(offloaded, role)), role


@pytest.mark.parametrize("every", [None, 2])
def test_the_reference_is_an_ema_of_the_actor(world: World, tmp_path: Path, every: int | None) -> None:
    run = prepared(recipe(world, tmp_path, None, ppo__ref_every=every))
    before = copy_of(run, "ref")
    run._train_step(0)
    if every == 2:
        assert torch.equal(copy_of(run, "ref"), before)
        run._train_step(1)
    assert not torch.equal(copy_of(run, "actor"), before)
    torch.testing.assert_close(copy_of(run, "ref"), 0.25 * copy_of(run, "actor") + 0.75 * before)


def test_a_reference_of_another_size_cannot_be_an_ema(world: World, tmp_path: Path) -> None:
    shape = home(prepared(recipe(world, tmp_path / "same", None)), "actor").shape.model_dump()
    other = {"shape": {**shape, "layers": 1}, "tokenizer": world.tokenizer}
    with pytest.raises(UserError, match=r"models\.ref cannot follow models\.actor: their sizes differ"):
        prepared(recipe(world, tmp_path / "other", None, models__ref=other))


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run in one process and in four, where every call has a layout of its own.

    The actor replaces the reference after every second step.
    """
    changes = {"ppo__ref_ema": None, "ppo__ref_every": 2}
    root = tmp_path_factory.mktemp("runs")
    for name, plan in (("alone", None), ("mixed", MIXED)):
        assert run_app(["train", str(recipe(world, root / name, plan, **changes))]) == 0
    return root / "alone" / "run", root / "mixed" / "run"


def test_layouts_offloading_and_averages_do_not_change_learning(runs: tuple[Path, Path]) -> None:
    alone, mixed = map(read_metrics, runs)
    for expected, ours in zip(alone, mixed, strict=True):
        for name in expected:
            if name.endswith(("loss", "score", "kl", "response_tokens", "grad_norm")):
                assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_the_divergence_is_zero_after_the_reference_has_been_replaced(runs: tuple[Path, Path]) -> None:
    for run in runs:
        first, second, third = (step["actor.train/kl"] for step in read_metrics(run))
        assert abs(second) > 1e-3 and max(abs(first), abs(third)) < 1e-5


@pytest.mark.parametrize("name", ["final", "final-critic"])
def test_a_sharded_model_is_saved_whole(runs: tuple[Path, Path], name: str) -> None:
    def saved(run: Path) -> FlatBuffer:
        head = "lm" if name == "final" else "scalar"
        shape = model_files.read_shape(run / name)
        tensors = model_tensors(shape, head)
        buffer = FlatBuffer(tensors, torch.float32, "cpu")
        assert model_files.load(run / name, shape, tensors, buffer) == []
        return buffer

    alone, mixed = map(saved, runs)
    torch.testing.assert_close(mixed.data, alone.data, rtol=1e-3, atol=1e-4)


def test_offloading_an_optimizer_names_the_set_that_is_trained() -> None:
    trainer = SimpleNamespace(parameter_set="tuned", memory=object())
    roles = cast(Roles, SimpleNamespace(trainers={"actor": trainer}))
    place = Placement(Mesh(0, 1), Strategy())
    assert Roles._memory(roles, Load("actor", place, "optimizer", "tuned")) is trainer.memory
    with pytest.raises(AssertionError, match="actor trains its set tuned, not base"):
        Roles._memory(roles, Load("actor", place, "optimizer"))
