"""The dataflow graphs of every algorithm; imports no torch, so that they can be shown at once."""

from typing import assert_never

from realrl.algorithms.ppo import graph as ppo
from realrl.algorithms.reward import graph as reward
from realrl.algorithms.sft import graph as sft
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.experiment import Experiment, PPOExperiment, RewardExperiment, SFTExperiment


def build_graph(experiment: Experiment) -> DataflowGraph:
    """The calls of one training step."""
    match experiment:
        case SFTExperiment():
            return sft.train_graph()
        case RewardExperiment():
            return reward.train_graph()
        case PPOExperiment():
            settings, models = experiment.ppo, experiment.models
            return ppo.train_graph(
                minibatches=settings.minibatches,
                ref_ema=settings.ref_ema,
                same_start=models.ref.starts_like(models.actor),
            )
        case _:
            assert_never(experiment)


def build_eval_graph(experiment: Experiment) -> DataflowGraph | None:
    """The calls of one evaluation step; None for a recipe without evaluation records."""
    if experiment.data.eval is None:
        return None
    match experiment:
        case SFTExperiment():
            return sft.eval_graph()
        case RewardExperiment():
            return reward.eval_graph()
        case PPOExperiment():
            return ppo.eval_graph()
        case _:
            assert_never(experiment)
