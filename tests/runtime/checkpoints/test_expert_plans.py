"""Runs of mixtures whose ranks divide experts, which learn and go on as runs of one process do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from realrl.checkpoint.saved import list_checkpoints
from realrl.plan.cluster import Cluster
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.export import export_models
from realrl.testing.check import make_uniform_plan
from realrl.testing.compare import compare_runs
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World, build_world
from tests.runtime.checkpoints.interrupted import interrupt
from tests.runtime.checkpoints.test_resume import lines, read_models
from tests.runtime.learning.test_plans import OPTIMIZER

SHAPE = {
    "family": "glm4_moe",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 24,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "mixture": {"experts": 8, "per_token": 2, "scores": "sigmoid", "correction": True, "shared": 1},
    "dense_layers": [0],
    "dense_size": 56,
}
ALGORITHMS = {
    "grpo": {"policy__kl": {"coef": 0.05}, "policy__samples": 2},
    "ppo": {"models__critic__optimizer": OPTIMIZER, "ppo__ref_ema": 0.5},
    "grpo, adapters": {
        "policy__samples": 2,
        "models__actor__lora": {
            "rank": 3,
            "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"],
        },
    },
}
"""Algorithm and what else tells a run apart -> settings."""
PLANS = {
    1: [{}],
    2: [{"ep": 2, "zero": 3}, {"tp": 2, "ep": 2}],
    4: [{"tp": 2, "ep": 4}, {"ep": 2, "zero": 2}],
}
"""Number of processes -> degrees by axis and the stage of ZeRO of uniform plans, of which algorithms take turns."""


def write_recipe(world: World, algorithm: str, directory: Path, devices: int) -> Path:
    """A recipe of 4 steps with a checkpoint after 2."""
    directory.mkdir(parents=True)
    changes = {
        **ALGORITHMS[algorithm],
        "cluster": f"1x{devices}",
        "checkpoint__every": 2,
        "checkpoint__keep": 3,
        "training__steps": 4,
        "models__actor__optimizer": OPTIMIZER,
        "debug__verify_reallocation": True,
    }
    name = algorithm.partition(",")[0]
    graph = build_graph(load_experiment(str(world.recipe(name, directory, **changes))))
    degrees = PLANS[devices][[*ALGORITHMS].index(algorithm) % len(PLANS[devices])]
    plan = make_uniform_plan(graph, Cluster(1, devices), micro_batch_tokens=256, **degrees)
    if devices == 2 and algorithm == "ppo":
        # Two runs of a buffer are offloaded, and copied after each update.
        plan = replace(plan, offload=("reward",), offload_optimizer=("actor", "critic"), keep=("actor",))
    plan.save(directory / "plan.yaml", graph)
    return world.recipe(name, directory, plan=str(directory / "plan.yaml"), **changes)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("mixtures"), SHAPE)


@pytest.fixture(scope="module")
def uninterrupted(mixtures: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Algorithm -> the directory of its run on 4 processes."""
    top = tmp_path_factory.mktemp("uninterrupted")
    recipes = {name: write_recipe(mixtures, name, top / name, 4) for name in ALGORITHMS}
    run_on_ranks(4, list(recipes.values()))
    return {name: recipe.parent / "run" for name, recipe in recipes.items()}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("resumed", [False, True], ids=["alone", "resumed"])
def test_runs_with_divided_experts_learn_and_go_on_alike(
    uninterrupted: dict[str, Path], mixtures: World, tmp_path: Path, size: int, resumed: bool
) -> None:
    recipes = {name: write_recipe(mixtures, name, tmp_path / name, size) for name in ALGORITHMS}
    for algorithm, recipe in recipes.items() if resumed else ():
        interrupt(uninterrupted[algorithm], 2, recipe.parent)
    run_on_ranks(size, list(recipes.values()))
    for algorithm, recipe in recipes.items():
        compare_runs(
            recipe.parent / "run",
            uninterrupted[algorithm],
            name=algorithm,
            than="four processes",
            tolerance=1e-4,
        )


def test_adapters_of_divided_experts_are_saved_for_peft_and_merged(
    uninterrupted: dict[str, Path], mixtures: World, tmp_path: Path
) -> None:
    run = uninterrupted["grpo, adapters"]
    (merged,) = export_models(run, list_checkpoints(run)[4], ["actor"], tmp_path, merge=True)
    row = torch.arange(1, 40)[None]

    def open_theirs(path: Path | str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")

    with torch.no_grad():
        before, found = (open_theirs(path)(row).logits for path in (mixtures.actor, merged))
        adapted = PeftModel.from_pretrained(open_theirs(mixtures.actor), run / "final").eval()(row).logits
    torch.testing.assert_close(found, adapted, atol=1e-5, rtol=1e-5)
    assert (found - before).abs().max() > 1e-3


@pytest.mark.parametrize("algorithm", ["grpo", "grpo, adapters"])
def test_a_run_with_divided_experts_goes_on_bit_for_bit(
    mixtures: World, tmp_path: Path, algorithm: str
) -> None:
    whole, resumed = (write_recipe(mixtures, algorithm, tmp_path / name, 2) for name in ("whole", "resumed"))
    run_on_ranks(2, [whole])
    interrupt(whole.parent / "run", 2, resumed.parent)
    run_on_ranks(2, [resumed])
    expected, found = read_models(whole.parent / "run"), read_models(resumed.parent / "run")
    assert expected.keys() == found.keys() and all(expected[name].equal(found[name]) for name in expected)
    assert lines(resumed.parent / "run") == lines(whole.parent / "run")
