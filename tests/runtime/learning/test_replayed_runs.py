"""Runs of mixtures of experts whose routers choose by a hair: training takes over what generation chose."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from realrl.cli.app import run_app
from realrl.families.shape import Mixture
from realrl.plan.cluster import Cluster
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.job import make_job
from realrl.testing.ranks import run_on_ranks
from realrl.testing.shrink import SHAPE, save_model
from tests.conftest import World, read_metrics
from tests.model.small_models import SHAPES

MIXTURE = SHAPES["mixtral"].model_copy(
    update={"vocab_size": SHAPE["vocab_size"], "mixture": Mixture(experts=6, per_token=2)}
)
STEPS = 2
NARROW = "actor.generate: {mesh: 0, dp: 1, dtype: bfloat16}"
DIVIDED = """
cluster: 1x2
calls:
  actor.generate: {mesh: 0-1, dp: 2}
  reward.inference: {mesh: 0, dp: 1}
  ref.inference: {mesh: 1, dp: 1}
  actor.inference: {mesh: 0-1, dp: 1, tp: 2}
  actor.train: {mesh: 0-1, dp: 1, pp: 2}
"""
SHARDED = """
cluster: 1x2
calls:
  actor.generate: {mesh: 0-1, dp: 1, tp: 2}
  reward.inference: {mesh: 0-1, dp: 2, zero: 3}
  ref.inference: {mesh: 0-1, dp: 2, zero: 3}
  actor.inference: {mesh: 0-1, dp: 1, cp: 2, zero: 3}
  actor.train: {mesh: 0-1, dp: 1, cp: 2, zero: 3, recompute: true}
"""
MISMATCH = "actor.train/sampler_trainer_mismatch"


def save_actor(directory: Path, difference: float) -> str:
    """Save a mixture in which any two of three experts have nearly the same probability."""
    save_model(directory, "lm", None, MIXTURE.model_dump())
    file = directory / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, router in tensors.items():
        if name.endswith("gate.weight"):
            router[:3], router[3:] = router[:1].clone(), router[3:4].clone()
            router += difference * torch.randn(router.shape, generator=generator)
    save_file(tensors, file, {"format": "pt"})
    return str(directory)


def write_recipe(
    world: World,
    place: Path,
    name: str,
    algorithm: str,
    actor: str,
    replay: bool | None = None,
    **changes: Any,
) -> Path:
    optimizer = {"lr": 1e-5, "schedule": "constant"}
    role = {"path": actor, "tokenizer": world.tokenizer, "optimizer": optimizer, "router_replay": replay}
    changes = {
        "run_dir": str(place / name),
        "data__batch": 4,
        "training__steps": STEPS,
        "models": {"actor": role, "reward": {"path": world.reward}},
        **changes,
    }
    return world.recipe(algorithm, place, **changes).rename(place / f"{name}.yaml")


def read_mismatches(recipe: Path) -> list[float]:
    found = [step[MISMATCH] for step in read_metrics(recipe.with_suffix(""))]
    assert len(found) == STEPS
    return found


def test_training_takes_over_the_experts_of_a_sampler_that_rounds_more(world: World, tmp_path: Path) -> None:
    """Generation in bfloat16, training in float32; samples in rounds, too, and the best of them."""
    actor = save_actor(tmp_path / "actor", 1e-4)
    rest = (
        "reward.inference: {mesh: 0, dp: 1}, ref.inference: {mesh: 0, dp: 1}, actor.train: {mesh: 0, dp: 1}"
    )
    for name, calls in {
        "with": rest,
        "without": rest.replace("ref.inference: {mesh: 0, dp: 1}, ", ""),
    }.items():
        text = f"cluster: 1x1\ncalls: {{{NARROW}, {calls}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    grpo = {"plan": str(tmp_path / "with.yaml"), "policy": {"samples": 2, "minibatches": 1}}
    dapo = {"plan": str(tmp_path / "without.yaml"), "policy": {"samples": 2, "sampling_rounds": 2}}
    own = write_recipe(world, tmp_path, "own", "grpo", actor, False, **grpo)
    replayed = write_recipe(world, tmp_path, "replayed", "grpo", actor, **grpo)
    rounds = write_recipe(world, tmp_path, "rounds", "dapo", actor, **dapo)
    best = write_recipe(
        world, tmp_path, "best", "expert_iteration", actor, plan=str(tmp_path / "without.yaml"),
        expert_iteration={"samples": 2},
    )  # fmt: skip
    run_on_ranks(1, [own, replayed, rounds, best])
    assert max(read_mismatches(replayed)) < 0.1 and max(read_mismatches(rounds)) < 0.1
    assert min(read_mismatches(own)) > 0.5
    assert len(read_metrics(best.with_suffix(""))) == STEPS


@pytest.mark.parametrize("plan", [DIVIDED, SHARDED], ids=["divided", "sharded"])
def test_sampler_and_trainer_agree_in_other_layouts_with_experts_that_rounding_chooses(
    world: World, tmp_path: Path, plan: str
) -> None:
    """Generated whole, inferred on in two parts, trained in two stages; or generated in parts, the rest by rows."""
    actor = save_actor(tmp_path / "actor", 0.0)
    (tmp_path / "plan.yaml").write_text(plan)
    changes: dict[str, Any] = {
        "cluster": "1x2",
        "plan": str(tmp_path / "plan.yaml"),
        "policy": {"samples": 2, "minibatches": 1, "recompute_logprobs": True},
        "micro_batch_tokens": 100,
    }
    recipe = write_recipe(world, tmp_path, "two", "grpo", actor, **changes)
    run_on_ranks(2, [recipe])
    assert max(read_mismatches(recipe)) <= 1e-5


@pytest.mark.parametrize(
    ("algorithm", "replaying"),
    [
        ("ppo", {"actor.train"}),
        ("grpo", {"actor.train", "actor.inference"}),
        ("remax", {"actor.train"}),
        ("dapo", {"actor.train"}),
        ("expert_iteration", {"actor.train"}),
        ("distillation", {"actor.train"}),
        ("sft", set()),
    ],
)
def test_calls_of_the_role_that_sampled_replay_and_no_others(
    world: World, tmp_path: Path, algorithm: str, replaying: set[str]
) -> None:
    """Every role is a mixture; evaluations sample without a record."""
    mixture = {"shape": MIXTURE.model_dump(), "tokenizer": world.tokenizer}
    roles = {"ppo": ("reward", "critic"), "sft": (), "distillation": ("teacher",)}.get(algorithm, ("reward",))
    changes: dict[str, Any] = {"models": dict.fromkeys(("actor", *roles), mixture)}
    if algorithm == "grpo":
        changes["policy"] = {"recompute_logprobs": True}
    if algorithm != "sft":
        changes["data__eval"] = str(world.root / "ppo.jsonl")
    experiment = load_experiment(str(world.recipe(algorithm, tmp_path, **changes)))
    job = make_job(experiment, Cluster(1, 1))
    graph = job.train.graph
    assert {call.name for call in graph.calls if call.replays} == replaying
    assert {call.name for call in graph.calls if "routed_experts" in call.inputs} == replaying
    recording = {call.name for call in graph.calls if call.records_experts}
    assert recording == ({"actor.generate"} if replaying else set())
    if replaying:
        assert graph.keys["routed_experts"].width == 4 and graph.keys["routed_experts"].position_bytes == 8
    if job.evaluation is not None:
        assert not any(call.records_experts or call.replays for call in job.evaluation.graph.calls)
    if job.sampled is not None:
        (sampling,) = (call for call in job.sampled.sampling.graph.calls if call.records_experts)
        assert sampling == graph.call("actor.generate")


@pytest.mark.parametrize("replay", [True, False])
def test_a_model_without_experts_has_nothing_to_replay(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], replay: bool
) -> None:
    recipe = world.recipe("ppo", tmp_path, models__actor__router_replay=replay)
    assert run_app(["train", str(recipe)]) == 2
    written = " ".join(capsys.readouterr().err.split())
    assert (
        f"models.actor.router_replay={str(replay).lower()}: the model is not a mixture of experts" in written
    )


def test_a_role_that_samples_nothing_has_nothing_to_replay(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = {"shape": MIXTURE.model_dump(), "tokenizer": world.tokenizer}
    critic = {**mixture, "router_replay": True}
    recipe = world.recipe("ppo", tmp_path, models={"actor": mixture, "reward": mixture, "critic": critic})
    assert run_app(["plan", str(recipe)]) == 2
    written = " ".join(capsys.readouterr().err.split())
    assert "models.critic.router_replay=true: critic is not trained on samples of its own" in written
