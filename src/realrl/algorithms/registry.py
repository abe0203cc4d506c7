"""From a recipe to its algorithm."""

from typing import assert_never

from realrl.algorithms.graphs import build_eval_graph, build_graph
from realrl.algorithms.method import Algorithm
from realrl.algorithms.ppo.method import PPOAlgorithm
from realrl.algorithms.reward.method import reward_algorithm
from realrl.algorithms.sft.method import sft_algorithm
from realrl.recipe.experiment import Experiment, PPOExperiment, RewardExperiment, SFTExperiment


def build_algorithm(experiment: Experiment) -> Algorithm:
    """Graphs and methods of the experiment, with fresh state."""
    graph, eval_graph = build_graph(experiment), build_eval_graph(experiment)
    match experiment:
        case SFTExperiment():
            return sft_algorithm(graph, eval_graph)
        case RewardExperiment():
            return reward_algorithm(graph, eval_graph)
        case PPOExperiment():
            return PPOAlgorithm(
                graph=graph,
                eval_graph=eval_graph,
                config=experiment.ppo,
                generation=experiment.generation,
                eval_generation=experiment.eval_generation,
            )
        case _:
            assert_never(experiment)
