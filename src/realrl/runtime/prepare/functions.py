"""Check of a recipe's functions before a search, which takes long, is run for nothing."""

from realrl.config.user_function import UserFunction
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph, build_graph


def check_functions(experiment: Experiment) -> None:
    """Import the functions that a run will call, and its judge; UserError where one is missing or is none."""
    graphs = [graph for graph in (build_graph(experiment), build_eval_graph(experiment)) if graph is not None]
    settings = {value: name for name, value in experiment if isinstance(value, str)}
    calls = {call.function: call.name for graph in graphs for call in graph.functions}
    for reference, name in calls.items():
        if reference is not None:
            UserFunction(settings.get(reference, name), reference)
    if experiment.training.judge is not None:
        UserFunction("training.judge", experiment.training.judge)
