"""Check of a recipe's functions, before anything slow such as a search."""

from typing import cast

from realrl.algorithms.base.method import FunctionMethod
from realrl.algorithms.build import build_algorithm
from realrl.algorithms.rewards.scorers import load_judge
from realrl.recipe.experiment import Experiment


def check_functions(experiment: Experiment) -> list[str]:
    """Load the functions and the judge of a run, like its ranks will. Returns the names of their calls.

    Raises UserError if one is missing or does not work, such as a verifier that fails on a known pair.
    """
    algorithm = build_algorithm(experiment)
    graphs = [graph for graph in (experiment.graph, experiment.eval_graph) if graph is not None]
    names = list(dict.fromkeys(call.name for graph in graphs for call in graph.functions))
    for name in names:
        cast(FunctionMethod, algorithm.method(name)).load()
    if load_judge(experiment.evaluation.judge) is not None:
        names.append("evaluation.judge")
    return names
