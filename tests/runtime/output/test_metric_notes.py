"""Misspelt names of metrics in a description are noted once a step has shown which there are."""

from dataclasses import replace

from realrl.algorithms.ppo import ALGORITHM as PPO
from realrl.algorithms.sft import ALGORITHM as SFT
from realrl.recipe.algorithm import AlgorithmSpec, SummaryMetric
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import parse_experiment
from realrl.runtime.output.notes import list_metric_notes

TRAINED = {"actor.train/loss": 1.0, "actor.train/grad_norm": 1.0}
EVALUATED = {"actor.inference/loss": 1.0}
GRAPH = build_graph(
    parse_experiment(
        {"algorithm": "sft", "run_dir": "r", "data": {"train": "t"}, "models": {"actor": {"path": "a"}}}
    )
)
MISSPELT = replace(
    SFT,
    headlines=("actor.train/los", "actor.inference/los"),
    curves={"los": "loss"},
    summary=(SummaryMetric("loss", "grad_norm", "loss"),),
)


def notes(spec: AlgorithmSpec, evaluated: dict[str, float] | None) -> list[str]:
    return list(list_metric_notes(spec, GRAPH, TRAINED, evaluated))


def test_each_field_with_a_misspelt_metric_is_named() -> None:
    assert notes(MISSPELT, EVALUATED) == [
        "algorithm sft: headlines: no call has given a metric actor.train/los; did you mean actor.train/loss?",
        "algorithm sft: headlines: no call has given a metric actor.inference/los; did you mean"
        " actor.inference/loss?",
        "algorithm sft: curves: no call has given a metric los; did you mean loss?",
        "algorithm sft: summary: no evaluation has a metric grad_norm",
    ]


def test_without_evaluations_only_what_training_must_give_is_missed() -> None:
    assert notes(MISSPELT, None) == [
        "algorithm sft: headlines: no call has given a metric actor.train/los; did you mean actor.train/loss?"
    ]
    assert len(notes(replace(MISSPELT, eval_graph=None), None)) == 4


def test_what_calls_give_the_judge_and_optional_calls_are_not_missed() -> None:
    given = {"actor.train/score", "actor.train/finished", "actor.train/kl", "actor.train/response_tokens"}
    trained = dict.fromkeys((*given, "critic.train/value_loss"), 1.0)
    evaluated = {"reward.function/score": 1.0, "ref.inference/kl": 2.0}
    assert notes(SFT, EVALUATED) == []
    assert list(list_metric_notes(PPO, GRAPH, trained, evaluated)) == []
