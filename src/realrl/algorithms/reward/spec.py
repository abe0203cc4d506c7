"""Descriptions of reward modelling. No torch."""

from typing import Any

from realrl.algorithms.reward.config import (
    ProcessRewardExperiment,
    RankedRewardExperiment,
    RewardExperiment,
)
from realrl.algorithms.reward.graph import (
    PAIR,
    PAIR_KEYS,
    STEP_KEYS,
    STEPS,
    list_pair_inputs,
    make_ranking_keys,
    make_reward_eval_graph,
    make_reward_graph,
    name_answers,
    name_scores,
)
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric

_HEADLINES = ("reward.train/loss", "reward.train/accuracy", "reward.inference/accuracy")
_COMMON: dict[str, Any] = {
    "roles": {"reward": RoleSpec("scalar")},
    "generation": None,
    "headlines": _HEADLINES,
}


def _pair_methods(
    experiment: RewardExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.reward.method import PairInference, RewardTrain, make_algorithm

    config = experiment.loss
    return make_algorithm(RewardTrain(config), PairInference(config), graph, eval_graph)


def _ranking_methods(
    experiment: RankedRewardExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.reward.method import make_algorithm
    from realrl.algorithms.reward.ranking import RankingInference, RankingTrain

    config = experiment.loss
    return make_algorithm(RankingTrain(config), RankingInference(config), graph, eval_graph)


def _process_methods(
    experiment: ProcessRewardExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.reward.method import make_algorithm
    from realrl.algorithms.reward.process import StepInference, StepTrain

    return make_algorithm(StepTrain(), StepInference(), graph, eval_graph)


def _train_on_pairs(experiment: RewardExperiment) -> DataflowGraph:
    return make_reward_graph(PAIR_KEYS, list_pair_inputs(experiment.loss.margins), PAIR)


def _score_pairs(experiment: RewardExperiment) -> DataflowGraph:
    outputs = tuple(f"{side}_score" for side in PAIR)
    return make_reward_eval_graph(PAIR_KEYS, list_pair_inputs(experiment.loss.margins), PAIR, outputs)


def _train_on_rankings(experiment: RankedRewardExperiment) -> DataflowGraph:
    count = experiment.loss.answers
    return make_reward_graph(make_ranking_keys(count), name_answers(count), name_answers(count))


def _score_rankings(experiment: RankedRewardExperiment) -> DataflowGraph:
    count = experiment.loss.answers
    answers = name_answers(count)
    return make_reward_eval_graph(make_ranking_keys(count), answers, answers, name_scores(count))


ALGORITHM = AlgorithmSpec(
    name="reward",
    recipe=RewardExperiment,
    form="pair",
    train_graph=_train_on_pairs,
    eval_graph=_score_pairs,
    methods=_pair_methods,
    curves={"loss": "loss per pair (nats)", "accuracy": "pairs ranked right"},
    summary=(SummaryMetric("reward_pair_accuracy", "accuracy", "reward model: held-out pairs ranked right"),),
    **_COMMON,
)

RANKED = AlgorithmSpec(
    name="ranked_reward",
    recipe=RankedRewardExperiment,
    form="ranked",
    train_graph=_train_on_rankings,
    eval_graph=_score_rankings,
    methods=_ranking_methods,
    curves={"loss": "loss per ranking (nats)", "accuracy": "pairs of answers ranked right"},
    summary=(
        SummaryMetric("ranked_reward_accuracy", "accuracy", "reward model: held-out answers ranked right"),
    ),
    **_COMMON,
)

PROCESS = AlgorithmSpec(
    name="process_reward",
    recipe=ProcessRewardExperiment,
    form="steps",
    train_graph=lambda experiment: make_reward_graph(STEP_KEYS, STEPS, STEPS[:1]),
    eval_graph=lambda experiment: make_reward_eval_graph(STEP_KEYS, STEPS, STEPS[:1], ("step_scores",)),
    methods=_process_methods,
    curves={"loss": "loss per step (nats)", "accuracy": "steps judged right"},
    summary=(
        SummaryMetric("process_reward_accuracy", "accuracy", "process reward: held-out steps judged right"),
    ),
    **_COMMON,
)
