"""`realrl.testing` lets a right algorithm pass, and says of a wrong one which plan and which metric."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.dataflow.call import Kind
from realrl.huggingface.directory import known_shape
from realrl.recipe.load import load_experiment, parse_experiment
from realrl.testing import CheckFailure, check_algorithm
from realrl.testing.check import list_run_cases
from realrl.testing.compare import read_metrics
from realrl.testing.shrink import shrink_recipe
from tests.conftest import PPO_CALLS, World

ALGORITHM = '''
from realrl.algorithms.base.method import PlainTrain, StatelessAlgorithm
from realrl.algorithms.base.method import Metrics
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import TrainedModelConfig


class CloneModels(Models):
    actor: TrainedModelConfig


class CloneExperiment(Experiment):
    """Fine-tuning on every token, each of which weighs less from step to step."""

    models: CloneModels


def train_graph(experiment):
    keys = [Key("tokens", "int64")]
    return DataflowGraph([Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))], keys)


class Clone(PlainTrain):
    seen = 0.0

    def prepare(self, batch, dp_sum):
        count = batch["tokens"].values.new_tensor(float(sum(batch["tokens"].lengths))).double()
        self.seen += float(dp_sum(count))
        return batch, Metrics()

    def sequences(self, batch):
        return batch["tokens"]

    def weight(self, batch):
        return float(sum(batch["tokens"].lengths))

    def loss(self, batch, output):
        loss = -output.logprobs.sum() * 1000 / (1000 + self.seen)
        metrics = Metrics()
        metrics.mean("loss", loss, sum(output.lengths))
        return loss, metrics


class Cloning(StatelessAlgorithm):
    def state_dict(self):
        return {"seen": self.method("actor.train").seen}

    def load_state_dict(self, state):
        self.method("actor.train").seen = state["seen"]


ALGORITHM = AlgorithmSpec(
    name="clone",
    recipe=CloneExperiment,
    roles={"actor": RoleSpec("lm")},
    form="answer",
    train_graph=train_graph,
    eval_graph=None,
    generation=None,
    methods=lambda experiment, graph, _: Cloning(graph=graph, eval_graph=None, methods={"actor.train": Clone()}),
    headlines=("actor.train/loss",),
    curves={},
    summary=(),
)
'''
RECIPE = {
    "run_dir": "run",
    "data": {"train": "nowhere.jsonl", "batch": 512},
    "models": {"actor": {"shape": "llama-3-70b", "dtype": "bfloat16", "optimizer": {"lr": 1e-6}}},
}
TOKENS = [{"prompt": "", "answer": f"{'very ' * (i % 5)}long answer {i}"} for i in range(20)]


def check(
    directory: Path, old: str = "ALGORITHM =", new: str = "ALGORITHM =", settings: Mapping[str, Any] = RECIPE
) -> None:
    """Check the algorithm with a mistake in it."""
    assert old in ALGORITHM
    (directory / "clone.py").write_text(ALGORITHM.replace(old, new))
    recipe = directory / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**settings, "algorithm": str(directory / "clone.py")}))
    check_algorithm(recipe, directory / "check", records=TOKENS)


def test_an_algorithm_that_learns_the_same_under_every_plan_passes(tmp_path: Path) -> None:
    check(tmp_path)
    assert not list_expert_plans(tmp_path)


def list_expert_plans(directory: Path) -> list[Path]:
    """The plans of a check under which ranks divide experts."""
    return [file for file in (directory / "check").glob("*.plan.yaml") if "ep: 2" in file.read_text()]


def test_ranks_divide_the_experts_of_mixtures(tmp_path: Path) -> None:
    actor = {"shape": "mixtral-8x7b", "router_loss": 0.1, "optimizer": {"lr": 1e-6}}
    check(tmp_path, settings={**RECIPE, "models": {"actor": actor}})
    [file] = list_expert_plans(tmp_path)
    metrics = read_metrics(file.with_suffix("").with_suffix(""))
    assert all(step["metrics"]["actor.train/router_loss"] > 0 for step in metrics)


def test_only_calls_of_mixtures_divide_experts(world: World, tmp_path: Path) -> None:
    experiment = load_experiment(str(world.recipe("ppo", tmp_path)))
    found = {case.name: case.plan for case in list_run_cases(experiment.graph, 64, 2, {"actor", "ref"})}
    degrees = {name: placement.strategy.ep for name, placement in found["ep=2"].placements.items()}
    assert degrees == {name: 2 if name.startswith(("actor", "ref")) else 1 for name in PPO_CALLS}
    found["ep=2"].check(experiment.graph)


def test_virtual_stages_train_and_infer_with_all_layers(world: World, tmp_path: Path) -> None:
    """Generation has a pipeline without them."""
    experiment = load_experiment(str(world.recipe("ppo", tmp_path)))
    plans = {case.name: case.plan for case in list_run_cases(experiment.graph, 64, 2)}
    plan = plans["pp=2, vpp=2 and zero bubble"]
    plan.check(experiment.graph)
    for call in experiment.graph.calls:
        strategy = plan[call.name].strategy
        generates, trains = call.kind is Kind.GENERATE, call.kind is Kind.TRAIN
        assert (strategy.pp, strategy.vpp) == (2, 1 if generates else 2), call.name
        assert strategy.zero_bubble == trains, call.name
    settings = shrink_recipe(experiment, tmp_path, records=None)
    shapes = [known_shape(config) for config in parse_experiment(settings).model_configs.values()]
    assert {shape.layers for shape in shapes if shape} == {4}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(
            "1000 / (1000 + self.seen)",
            "1000 / (1000 + sum(output.lengths))",
            r"micro_batch_tokens=48 in one process: step 1: actor\.train/loss is [\d.]+; with 4096 it is [\d.]+",
            id="a loss that depends on the micro-batch",
        ),
        pytest.param(
            '{"seen": self.method("actor.train").seen}',
            '{"seen": 0.0}',
            r"rebuilt from its state_dict after each step: step 2: actor\.train/loss is .* in one process",
            id="state that is not saved",
        ),
        pytest.param(
            "float(dp_sum(count))",
            "float(count)",
            r"plan symmetric on 2 processes: step 1: actor\.train/\w+ is [\d.]+; in one process it is",
            id="state of one rank",
        ),
        pytest.param(
            '("tokens",), work',
            '("token",), work',
            r"description: .*call actor\.train: work=\('tokens',\) must name some of its inputs",
            id="a wrong key",
        ),
        pytest.param(
            "return loss, metrics",
            "return loss.detach(), metrics",
            r"one process: algorithm=.*clone\.py: loss of actor\.train .* gave a loss without gradient",
            id="a method that gives something wrong",
        ),
    ],
)
def test_a_mistake_is_one_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(CheckFailure, match=message) as caught:
        check(tmp_path, old, new)
    assert "\n" not in str(caught.value)


CLAIM = """
from dataclasses import replace

from realrl.algorithms.policy_gradient import {base}

ALGORITHM = replace({base}, name="claim", needs_whole_batch=lambda experiment: None)


def score(completions, **columns):
    return [float(len(text) % 5) for text in completions]
"""


def check_claim(directory: Path, base: str) -> None:
    """Check an algorithm that says that it can train on portions."""
    (directory / "claim.py").write_text(CLAIM.format(base=base))
    recipe = {
        **RECIPE,
        "algorithm": str(directory / "claim.py"),
        "asynchrony": {"portions": 2},
        "reward": f"{directory / 'claim.py'}:score",
        "models": {**RECIPE["models"], "reward": None},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    check_algorithm(directory / "recipe.yaml", directory / "check", processes=2)


def test_an_algorithm_that_trains_on_portions_passes(tmp_path: Path) -> None:
    check_claim(tmp_path, "DR_GRPO")
    assert "portions: 2" in (tmp_path / "check" / "portions.yaml").read_text()


def test_an_algorithm_that_needs_the_whole_batch_is_found(tmp_path: Path) -> None:
    message = (
        r"plan sampling apart on 2 processes, 2 portions: step 1: actor\.train/\w+ is [\d.-]+; in one process"
    )
    with pytest.raises(CheckFailure, match=message):
        check_claim(tmp_path, "REINFORCE_PP")
