"""The same recipe learns the same under every plan and micro-batch size."""

from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World, read_metrics, thin

PLANS = {
    "generation elsewhere": """
cluster: 1x2
calls:
  actor.generate: {mesh: 1, dp: 1}
  reward.inference: {mesh: 1, dp: 1}
  ref.inference: {mesh: 0, dp: 1}
  critic.inference: {mesh: 1, dp: 1}
  actor.train: {mesh: 0, dp: 1}
  critic.train: {mesh: 1, dp: 1, micro_batch_tokens: 100}
""",
    "two and two": """
cluster: 1x4
calls:
  actor.generate: {mesh: 2-3, dp: 2}
  reward.inference: {mesh: 0-1, dp: 2}
  ref.inference: {mesh: 2-3, dp: 2}
  critic.inference: {mesh: 2-3, dp: 2}
  actor.train: {mesh: 0-1, dp: 2}
  critic.train: {mesh: 2-3, dp: 2}
""",
}


def run(world: World, algorithm: str, directory: Path, **changes: object) -> list[dict[str, float]]:
    directory.mkdir(parents=True, exist_ok=True)
    recipe = world.recipe(algorithm, directory, **changes)
    assert run_app(["train", str(recipe)]) == 0
    return read_metrics(directory / "run")


def assert_same(got: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float) -> None:
    """Equal losses, scores and lengths of samples at every step."""
    assert len(got) == len(expected) == 5
    for step, (ours, reference) in enumerate(zip(got, expected, strict=True)):
        assert ours.keys() == reference.keys()
        for name in reference:
            if name.endswith(("loss", "accuracy", "score", "response_tokens", "grad_norm")):
                assert ours[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), (
                    step,
                    name,
                )


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Every algorithm in one process."""
    root = tmp_path_factory.mktemp("alone")
    return {name: run(world, name, root / name) for name in ("sft", "reward", "ppo")}


@pytest.mark.parametrize("algorithm", thin(["ppo", "sft", "reward"], 3))
def test_two_processes_learn_as_one_does(
    world: World, alone: dict[str, list[dict[str, float]]], tmp_path: Path, algorithm: str
) -> None:
    assert_same(run(world, algorithm, tmp_path, cluster="1x2"), alone[algorithm], 1e-4)


@pytest.mark.parametrize("algorithm", ["sft", "reward", "ppo"])
def test_micro_batch_size_does_not_change_learning(
    world: World, alone: dict[str, list[dict[str, float]]], tmp_path: Path, algorithm: str
) -> None:
    assert_same(run(world, algorithm, tmp_path, micro_batch_tokens=128), alone[algorithm], 1e-5)


@pytest.mark.parametrize("name", ["disjoint", *PLANS])
def test_ppo_learns_the_same_on_any_meshes(
    world: World, alone: dict[str, list[dict[str, float]]], tmp_path: Path, name: str
) -> None:
    plan, cluster = name, "1x4"
    if name in PLANS:
        (tmp_path / "plan.yaml").write_text(PLANS[name])
        plan, cluster = str(tmp_path / "plan.yaml"), "auto"
        cluster = PLANS[name].split()[1]
    assert_same(run(world, "ppo", tmp_path, plan=plan, cluster=cluster), alone["ppo"], 1e-4)


def test_recomputed_logprobs_change_nothing_if_the_sampler_has_the_same_weights(
    world: World, alone: dict[str, list[dict[str, float]]], tmp_path: Path
) -> None:
    changes = {"ppo__recompute_logprobs": True, "ppo__sampler_correction": "sequence_mask"}
    got = run(world, "ppo", tmp_path, cluster="1x2", **changes)
    for ours, reference in zip(got, alone["ppo"], strict=True):
        for name in ("policy_loss_per_token", "loss", "grad_norm", "kl"):
            name = f"actor.train/{name}"
            assert ours[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-4)
        for name in ("effective_sample_size", "sampler_weight"):
            assert ours[f"actor.train/{name}"] == pytest.approx(1, abs=1e-4)
        assert ours["actor.train/sampler_corrections_beyond_cap"] == 0


def test_losses_fall_during_training(alone: dict[str, list[dict[str, float]]]) -> None:
    for algorithm, name in (("sft", "actor.train/loss"), ("reward", "reward.train/loss")):
        losses = [step[name] for step in alone[algorithm]]
        assert losses[-1] < losses[0]


def test_sampler_and_trainer_agree_at_every_step(alone: dict[str, list[dict[str, float]]]) -> None:
    assert all(step["actor.train/sampler_trainer_mismatch"] <= 1e-5 for step in alone["ppo"])
