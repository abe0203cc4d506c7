"""PPO whose actor, critic and reference are one frozen model, with adapters: one copy of it, and equal learning."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.layout.sets import BASE, TUNED
from realrl.plan.cluster import Cluster
from realrl.program.memory import Memory
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.job import make_job
from tests.conftest import PPO_CALLS, World, build_world, read_metrics, thin
from tests.runtime.checkpoints.interrupted import interrupt
from tests.runtime.checkpoints.test_expert_plans import SHAPE
from tests.runtime.models.test_offload import home, prepared

PLAN = {
    "actor.train": {"mesh": "0-1", "dp": 1, "tp": 2},
    "ref.inference": {"mesh": "0-1", "dp": 1, "tp": 2},
    "critic.train": {"mesh": "0-1", "dp": 1, "tp": 2},
    "critic.inference": {"mesh": "0-1", "dp": 1, "pp": 2},
}
"""Three roles at home in one layout; the other calls are elsewhere."""
SHARDED = {
    name: {"mesh": "0-1", "dp": 2, "zero": 3}
    for name in ("actor.train", "ref.inference", "critic.train", "critic.inference")
}
"""Each process has rows of the one base."""
LEARNED = ("loss", "score", "kl", "response_tokens", "grad_norm")


def recipe(world: World, directory: Path, *, copies: bool = False, **changes: object) -> Path:
    """PPO with adapters for one model, or for copies of it."""
    directory.mkdir(exist_ok=True)
    paths = dict.fromkeys(("critic", "ref"), world.actor)
    if copies:
        for role in paths:
            paths[role] = str(directory / f"of-{role}")
            shutil.copytree(world.actor, paths[role])
    given = {
        "models__actor__lora": {"rank": 4, "alpha": 16},
        "models__critic__lora": {"rank": 2, "dora": True},
        **{f"models__{role}__path": path for role, path in paths.items()},
        "training__steps": 2,
        "debug__verify_reallocation": True,
    }
    return world.recipe("ppo", directory, **{**given, **changes})


def run(file: Path) -> list[dict[str, float]]:
    assert run_app(["train", str(file)]) == 0
    return read_metrics(file.parent / "run")


def check_equal(ours: list[dict[str, float]], expected: list[dict[str, float]], *, rel: float = 1e-4) -> None:
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        for name in other:
            if name.endswith(LEARNED):
                assert one[name] == pytest.approx(other[name], rel=rel, abs=1e-5), name


@pytest.fixture(scope="module")
def apart(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Metrics of the run with three copies."""
    return run(recipe(world, tmp_path_factory.mktemp("apart"), copies=True))


def test_one_base_learns_what_copies_of_it_do(
    world: World, tmp_path: Path, apart: list[dict[str, float]]
) -> None:
    before = load_file(f"{world.actor}/model.safetensors")
    check_equal(run(recipe(world, tmp_path)), apart, rel=1e-6)
    after = load_file(f"{world.actor}/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("plan", [PLAN, SHARDED])
def test_one_base_learns_the_same_in_two_processes(
    world: World, tmp_path: Path, apart: list[dict[str, float]], plan: dict[str, object]
) -> None:
    calls = {name: {"mesh": "0-1", "dp": 2} for name in PPO_CALLS} | plan
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"cluster": "1x2", "calls": calls}))
    check_equal(run(recipe(world, tmp_path, cluster="1x2", plan=str(tmp_path / "plan.yaml"))), apart)


@pytest.mark.parametrize("copies", [False, True])
def test_the_memory_of_one_base_is_counted_and_held_once(world: World, tmp_path: Path, copies: bool) -> None:
    ready = prepared(recipe(world, tmp_path, copies=copies))
    memory = ready.job.memory
    assert ready.roles.held() == sum(memory.at_rest(0).values())
    bases = {role: home(ready, role).sets[BASE].buffer.data for role in ("actor", "critic", "ref")}
    assert len({base.data_ptr() for base in bases.values()}) == (3 if copies else 1)
    apart = {role: replace(stored, base=None) for role, stored in memory.stored.items()}
    each = Memory(apart, ready.job.homes, (), {}).at_rest(0)
    saved = sum(size for of, size in each.items() if of.role != "actor" and of.parameter_set == BASE)
    saved -= sum(size for of, size in each.items() if of.role == "reward" and of.parameter_set == BASE)
    assert sum(each.values()) - ready.roles.held() == (0 if copies else saved) and saved > 100_000


def test_a_run_goes_on_with_one_base(world: World, tmp_path: Path) -> None:
    file = recipe(world, tmp_path, training__steps=3, checkpoint__every=1, checkpoint__keep=10)
    whole = run(file)
    resumed = interrupt(file.parent / "run", 1, tmp_path / "killed")
    assert run_app(["train", str(file), f"run_dir={resumed}"]) == 0
    check_equal(read_metrics(resumed), whole, rel=1e-6)


def test_a_reference_keeps_its_adapters_apart_from_one_base(world: World, tmp_path: Path) -> None:
    """Those that SFT has made, from which the actor goes on."""
    lora = {"rank": 4, "alpha": 16}
    (tmp_path / "sft").mkdir()
    sft = world.recipe(
        "sft", tmp_path / "sft", models__actor={"path": world.actor, "lora": lora, "optimizer": {"lr": 1e-2}}
    )
    assert run_app(["train", str(sft)]) == 0
    adapters, merged = str(tmp_path / "sft" / "run" / "final"), str(tmp_path / "merged" / "actor")
    assert (
        run_app(["export", str(tmp_path / "sft" / "run"), "--out", str(tmp_path / "merged"), "--merge"]) == 0
    )
    runs = []
    for name, reference in (("apart", adapters), ("merged", merged)):
        file = recipe(
            world,
            tmp_path / name,
            models__actor__path=adapters,
            models__ref__path=reference,
            models__actor__lora=lora,
        )
        ready = prepared(file)
        assert [*home(ready, "ref").sets] == ([BASE, TUNED] if name == "apart" else [BASE])
        assert ready.roles.held() == sum(ready.job.memory.at_rest(0).values())
        runs.append((ready.roles.held(), run(file)))
    (less, ours), (more, expected) = runs
    assert less < more
    check_equal(ours, expected, rel=1e-3)


def test_a_reference_whose_adapters_belong_to_single_experts_has_a_base_of_its_own(tmp_path: Path) -> None:
    """Earlier versions of PEFT saved such adapters. They are merged."""
    world = build_world(tmp_path / "world", SHAPE)
    saved = tmp_path / "saved"
    saved.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": world.actor, "r": 2, "lora_alpha": 2.0}
    modules = {"target_modules": ["gate_proj"]}
    (saved / "adapter_config.json").write_text(json.dumps(settings | modules))
    module = "base_model.model.model.layers.1.mlp.experts.3.gate_proj"
    rows, columns = load_file(f"{world.actor}/model.safetensors")[f"{module[17:]}.weight"].shape
    save_file(
        {f"{module}.lora_A.weight": torch.ones(2, columns), f"{module}.lora_B.weight": torch.ones(rows, 2)},
        saved / "adapter_model.safetensors",
    )
    ready = prepared(recipe(world, tmp_path / "run", models__ref__path=str(saved)))
    assert [*home(ready, "actor").sets] == [BASE, TUNED]
    assert [*home(ready, "ref").sets] == [BASE]


@pytest.mark.parametrize("cluster", thin(["1x2", "1x1"], 2))
def test_a_reference_follows_the_adapters_of_the_actor(world: World, tmp_path: Path, cluster: str) -> None:
    metrics = run(recipe(world, tmp_path, cluster=cluster, ppo__ref_ema=1.0, training__steps=3))
    plain = run(recipe(world, tmp_path / "plain", training__steps=3))
    # A reference that is what the actor was at the end of the last step is nearer to it.
    kl = [next(of[name] for name in of if name.endswith("kl")) for of in (metrics[-1], plain[-1])]
    assert abs(kl[0]) < abs(kl[1])


def test_offloading_what_others_share_is_one_message(world: World, tmp_path: Path) -> None:
    calls = {name: {"mesh": "0", "dp": 1} for name in PPO_CALLS}
    document = {"cluster": "1x1", "calls": calls, "offload": ["ref"]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(document))
    experiment = load_experiment(str(recipe(world, tmp_path, plan=str(tmp_path / "plan.yaml"))))
    with pytest.raises(
        UserError,
        match="offload: ref cannot be offloaded: it shares its frozen weights",
    ):
        make_job(experiment, Cluster(1, 1))


def test_saved_adapters_name_one_base(world: World, tmp_path: Path) -> None:
    run(recipe(world, tmp_path))
    for name in ("final", "final-critic"):
        config = json.loads((tmp_path / "run" / name / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(Path(world.actor).resolve())
