import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from realrl.algorithms.base.method import GenerateMethod, PlainTrain, StatelessAlgorithm
from realrl.algorithms.build import build_algorithm
from realrl.algorithms.ppo import ALGORITHM as PPO
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_loss import ActorTrain
from realrl.config.errors import UserError
from realrl.dataflow.call import Kind
from realrl.recipe.experiment import Experiment
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.load import parse_experiment
from tests.conftest import PPO_CALLS

MODELS = {
    "sft": {"actor": {"path": "m"}},
    "reward": {"reward": {"path": "m"}},
    "ppo": {"actor": {"path": "a"}, "reward": {"path": "r"}},
}


def experiment(algorithm: str, *, evaluate: bool = True, **settings: object) -> Experiment:
    data = {"train": "t.jsonl", "eval": "e.jsonl" if evaluate else None, "batch": 8}
    recipe = {"algorithm": algorithm, "run_dir": "r", "models": MODELS[algorithm], "data": data, **settings}
    return parse_experiment(recipe)


@pytest.mark.parametrize(
    ("algorithm", "calls", "sources"),
    [
        ("sft", ["actor.train"], ("tokens", "loss_mask")),
        ("reward", ["reward.train"], ("chosen", "rejected", "pairs_of_prompt")),
        ("ppo", list(PPO_CALLS), ("prompts",)),
    ],
)
def test_a_step_runs_these_calls_on_these_columns(
    algorithm: str, calls: list[str], sources: tuple[str, ...]
) -> None:
    graph = build_graph(experiment(algorithm))
    assert [call.name for call in graph.order] == calls
    assert graph.sources == sources
    assert all(call.name == f"{call.role}.{call.kind}" for call in graph.calls)


@pytest.mark.parametrize(
    ("algorithm", "calls", "sources"),
    [
        ("sft", ["actor.inference"], ("tokens", "loss_mask")),
        ("reward", ["reward.inference"], ("chosen", "rejected", "pairs_of_prompt")),
        ("ppo", ["actor.generate", "reward.inference", "ref.inference"], ("prompts",)),
    ],
)
def test_an_evaluation_trains_nothing(algorithm: str, calls: list[str], sources: tuple[str, ...]) -> None:
    graph = build_eval_graph(experiment(algorithm))
    assert graph is not None
    assert [call.name for call in graph.order] == calls
    assert graph.sources == sources
    assert not any(graph.trained(role) for role in graph.roles)


@pytest.mark.parametrize("algorithm", MODELS)
def test_without_evaluation_records_there_is_no_evaluation_graph(algorithm: str) -> None:
    assert build_eval_graph(experiment(algorithm, evaluate=False)) is None
    assert build_algorithm(experiment(algorithm, evaluate=False)).eval_graph is None


@pytest.mark.parametrize("algorithm", MODELS)
def test_every_call_has_a_method(algorithm: str) -> None:
    built = build_algorithm(experiment(algorithm))
    assert built.eval_graph is not None
    for call in (*built.graph.calls, *built.eval_graph.calls):
        assert hasattr(built.method(call.name), "sampling" if call.kind is Kind.GENERATE else "sequences")


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({}, "actor.generate has none"),
        ({"actor.generate": PlainTrain()}, "actor.generate needs a GenerateMethod"),
        (
            {"actor.generate": GenerateMethod(GenerationConfig(greedy=True), GenerationConfig())},
            "actor.generate samples otherwise than generation and eval_generation of the description say",
        ),
        (
            {"reward.inference": PlainTrain()},
            "reward.inference has no sequences, which realrl.algorithms.InferenceMethod needs",
        ),
        (
            {"actor.train": PlainTrain()},
            "actor.train has no sequences, which realrl.algorithms.TrainMethod needs",
        ),
        ({"actor.train": SimpleNamespace(entropy=False)}, "actor.train has no epochs, which"),
        ({"actor.train": ActorTrain(PPOConfig(epochs=2))}, "actor.train passes 2 times over its items"),
    ],
)
def test_methods_that_contradict_the_description_are_named(methods: dict[str, Any], message: str) -> None:
    def build(recipe: Any, graph: Any, eval_graph: Any) -> StatelessAlgorithm:
        ours = PPO.methods(recipe, graph, eval_graph)
        calls = {call.name: ours.method(call.name) for call in graph.calls} if methods else {}
        return StatelessAlgorithm(graph=graph, eval_graph=eval_graph, methods={**calls, **methods})

    recipe = experiment("ppo").model_copy()
    recipe._spec = replace(PPO, methods=build)
    with pytest.raises(UserError) as caught:
        build_algorithm(recipe)
    place, _, problem = str(caught.value).partition("): ")
    assert place.startswith(f"algorithm ppo: methods ({__file__}:") and problem.startswith(message)


def test_graphs_are_built_without_torch() -> None:
    code = "import sys, realrl.algorithms.ppo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
