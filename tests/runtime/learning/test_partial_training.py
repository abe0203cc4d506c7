"""Runs that train a part of a model: under plans that move it, with a reference that follows, and saved whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.families.sizes import SHAPES
from realrl.layout.sets import TrainablePart
from realrl.plan.cluster import Cluster
from realrl.planner.report.comparison import Comparison
from realrl.program.instructions import Instruction, Load, Reallocate
from realrl.program.memory import StoredModel
from realrl.recipe.load import load_experiment
from realrl.runtime.measure.step_timer import StepTimer
from realrl.runtime.prepare.job import make_job
from realrl.runtime.prepare.trained_parts import list_trained_parts
from realrl.runtime.training_run import TrainingRun
from tests.conftest import PPO_CALLS, World, read_metrics
from tests.runtime.models.test_offload import prepared

PLAN = {
    "actor.generate": {"mesh": "0-1", "dp": 1, "tp": 2},
    "actor.train": {"mesh": "0-1", "dp": 1, "pp": 2},
    "critic.train": {"mesh": "0-1", "dp": 2},
    "critic.inference": {"mesh": "0-1", "dp": 1, "tp": 2},
}
"""The actor's first pipeline stage holds nothing that is trained."""
CHANGES = {
    "models__actor__trainable_layers": 1,
    "models__critic__freeze_embeddings": True,
    "ppo__ref_ema": 0.25,
    "training__steps": 3,
    "debug__verify_reallocation": True,
}


def recipe(world: World, directory: Path, cluster: str = "1x1", **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    if cluster != "1x1":
        others = {name: {"mesh": "0-1", "dp": 2} for name in PPO_CALLS}
        plan = {"cluster": cluster, "calls": others | PLAN, "keep": ["actor"], "offload": ["critic", "ref"]}
        (directory / "plan.yaml").write_text(yaml.safe_dump(plan | {"offload_optimizer": ["actor"]}))
        changes["plan"] = str(directory / "plan.yaml")
    return world.recipe("ppo", directory, cluster=cluster, **{**CHANGES, **changes})


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run in one process and in two."""
    root = tmp_path_factory.mktemp("partial")
    for name, cluster in (("alone", "1x1"), ("two", "1x2")):
        assert run_app(["train", str(recipe(world, root / name, cluster))]) == 0
    return root / "alone" / "run", root / "two" / "run"


def test_a_part_learns_the_same_under_every_plan(runs: tuple[Path, Path]) -> None:
    alone, two = map(read_metrics, runs)
    for expected, ours in zip(alone, two, strict=True):
        for name in expected:
            if name.endswith(("loss", "score", "kl", "response_tokens", "grad_norm")):
                assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("number", [0, 1])
def test_saved_models_are_whole_and_what_was_frozen_is_as_it_was(
    world: World, runs: tuple[Path, Path], number: int
) -> None:
    for name, source, trained in (
        ("final", world.actor, ("layers.1.", "model.norm")),
        ("final-critic", world.reward, ("layers.", "model.norm", "score")),
    ):
        before = load_file(f"{source}/model.safetensors")
        after = load_file(runs[number] / name / "model.safetensors")
        assert after.keys() == before.keys()
        for tensor, values in after.items():
            changed = any(word in tensor for word in trained)
            assert torch.equal(values, before[tensor]) != changed, tensor


def test_only_what_is_trained_moves_after_an_update(runs: tuple[Path, Path]) -> None:
    costs = Comparison.load(runs[1])
    moves = [of.instruction.split(":")[0] for of in costs.reallocations]
    assert sorted(moves) == [
        "reallocate actor/tuned",
        "reallocate actor/tuned",
        "reallocate critic",
        "reallocate critic/tuned",
    ]
    mixed = [of.instruction for of in costs.reallocations if "mixed into ref" in of.instruction]
    assert len(mixed) == 1 and mixed[0].startswith("reallocate actor/tuned")


class Watch(StepTimer):
    """A step timer that also notes what roles hold before each instruction that brings nothing."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(torch.device("cpu"), held=run.roles.held, staged=lambda: 0)
        self.holds, self.held = run.roles.held, list[int]()

    @contextmanager
    def instruction(self, instruction: Instruction) -> Iterator[None]:
        if not isinstance(instruction, Reallocate | Load):
            self.held.append(self.holds())
        with super().instruction(instruction):
            yield


@pytest.mark.parametrize("keep", [[], ["actor"]])
def test_bytes_in_device_memory_are_those_that_are_predicted(
    world: World, tmp_path: Path, keep: list[str]
) -> None:
    calls = {name: {"mesh": "0", "dp": 1} for name in PPO_CALLS}
    plan = {
        "cluster": "1x1",
        "calls": calls | {"actor.generate": {"mesh": "0", "dp": 1, "dtype": "bfloat16"}},
        "keep": keep,
        "offload": ["actor", "critic", "ref"],
        "offload_optimizer": ["actor", "critic"],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    run = prepared(recipe(world, tmp_path, plan=str(tmp_path / "plan.yaml")))
    run.worker.start(run.job.start[0])
    program = run.job.train.programs[0]
    expected = [
        sum(holdings.values())
        for instruction, holdings in run.job.memory.timeline(program)
        if not isinstance(instruction, Reallocate | Load)
    ]
    for step in range(2):
        run.costs.timer = watch = Watch(run)
        run._train_step(step)
        assert watch.held == expected


def test_more_layers_than_there_are_is_one_message(world: World, tmp_path: Path) -> None:
    experiment = load_experiment(str(recipe(world, tmp_path, models__actor__trainable_layers=3)))
    with pytest.raises(
        UserError, match=r"models\.actor\.trainable_layers=3 is more than the 2 decoder layers"
    ):
        make_job(experiment, Cluster(1, 1))


TIED = "the head is tied to the frozen embeddings"


@pytest.mark.parametrize(
    ("model", "part", "line"),
    [
        ("qwen2.5-7b", TrainablePart(last_layers=4), "1.5 B of 7.6 B parameters (layers 24-27, norm, head)"),
        ("qwen2.5-7b", TrainablePart(last_layers=0), "545 M of 7.6 B parameters (norm, head)"),
        (
            "qwen2.5-0.5b",
            TrainablePart(last_layers=1),
            f"14.9 M of 494 M parameters (layer 23, norm; {TIED})",
        ),
        ("qwen2.5-0.5b", TrainablePart(None, True), f"358 M of 494 M parameters (layers 0-23, norm; {TIED})"),
    ],
)
def test_the_part_that_is_trained_is_named(model: str, part: TrainablePart, line: str) -> None:
    stored = StoredModel(SHAPES[model], "lm", "float32", trained=True, part=part)
    whole = replace(stored, part=TrainablePart())
    models = {"actor": stored, "critic": whole, "ref": replace(stored, trained=False)}
    assert list(list_trained_parts(models)) == [f"models.actor trains {line}"]


def test_show_plan_and_the_start_of_a_run_name_what_is_trained(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(world.recipe("sft", tmp_path, models__actor__trainable_layers=1, training__steps=1))
    for command in (["show", file], ["plan", file, "--effort", "50000", "--json"], ["train", file]):
        assert run_app(command) == 0
        captured = " ".join("".join(capsys.readouterr()).split())
        assert "models.actor trains " in captured and f"(layer 1, norm; {TIED})" in captured, command
