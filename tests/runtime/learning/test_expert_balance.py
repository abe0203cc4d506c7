"""Runs that balance the experts of a mixture, and recipes that cannot."""

from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.job import make_job
from realrl.testing.shrink import SHAPE
from tests.conftest import World, read_metrics

MIXTURE = {"family": "mixtral", "intermediate_size": 24, "mixture": {"experts": 8, "per_token": 2}}
SIZES = {**SHAPE, **MIXTURE, "init_std": 0.3}


def balance(world: World, directory: Path, loss: float) -> list[dict[str, float]]:
    """The metrics of a run, whose routers are far from balanced at first."""
    directory.mkdir()
    actor = {
        "shape": SIZES,
        "tokenizer": world.tokenizer,
        "router_loss": loss,
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
    }
    changes = {"models__actor": actor, "training__steps": 6, "plan": "symmetric"}
    assert run_app(["train", str(world.recipe("sft", directory, **changes))]) == 0
    return read_metrics(directory / "run")


def test_a_high_router_loss_spreads_tokens_over_experts(world: World, tmp_path: Path) -> None:
    plain, balanced = (balance(world, tmp_path / str(loss), loss) for loss in (0.0, 10.0))
    names = [f"actor.train/router_{name}" for name in ("loss", "busiest", "idle")]
    assert [plain[0][name] for name in names] == [balanced[0][name] for name in names]
    loss, busiest, idle = names
    # 2 is that of equal experts; a learning router without it prefers some of them more and more.
    assert balanced[-1][loss] < 2.4 < 2.8 < plain[-1][loss]
    assert balanced[-1][busiest] < min(1.4, balanced[0][busiest], plain[-1][busiest])
    assert all(0 <= step[idle] < 1 for step in (*plain, *balanced))


@pytest.mark.parametrize("algorithm", ["sft", "reward"])
def test_a_router_loss_without_experts_is_one_message(world: World, tmp_path: Path, algorithm: str) -> None:
    role = "actor" if algorithm == "sft" else "reward"
    changes = {f"models__{role}__router_loss": 0.01}
    experiment = load_experiment(str(world.recipe(algorithm, tmp_path, **changes)))
    with pytest.raises(
        UserError, match=rf"^models\.{role}\.router_loss=0\.01 balances the experts of a mixture"
    ):
        make_job(experiment, Cluster(1, 1))


def test_a_router_loss_that_no_trained_layer_has_is_one_message(world: World, tmp_path: Path) -> None:
    sizes = {**SIZES, "family": "qwen3_moe", "dense_layers": [1], "dense_size": 40}
    actor = {"shape": sizes, "tokenizer": world.tokenizer, "router_loss": 0.01, "trainable_layers": 1}
    experiment = load_experiment(str(world.recipe("sft", tmp_path, models__actor=actor)))
    with pytest.raises(UserError, match=r"^models\.actor: router_loss=0\.01 and trainable_layers=1 exclude"):
        make_job(experiment, Cluster(1, 1))
