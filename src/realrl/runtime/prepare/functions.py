"""Check of a recipe's functions before a search, which takes long, is run for nothing."""

from collections.abc import Iterator

from realrl.config.base import Settings
from realrl.config.user_code import is_own_module
from realrl.config.user_function import UserFunction
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph, build_graph


def check_functions(experiment: Experiment) -> None:
    """Import the functions that a run will call, and its judge; UserError where one is missing or is none."""
    graphs = [graph for graph in (build_graph(experiment), build_eval_graph(experiment)) if graph is not None]
    settings = dict(_list_references(experiment))
    calls = {call.function: call.name for graph in graphs for call in graph.functions}
    for reference, name in calls.items():
        # Those of this package are there, and are no functions but methods.
        if reference is not None and not is_own_module(reference.partition(":")[0]):
            UserFunction(settings.get(reference, name), reference, awaits=True)
    if experiment.evaluation.judge is not None:
        UserFunction("evaluation.judge", experiment.evaluation.judge)


def _list_references(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield the texts of a recipe that may be references to functions, each with the path of its setting."""
    for name, value in experiment:
        if isinstance(value, str):
            yield value, name
        if isinstance(value, dict):
            for key, section in value.items():
                function = getattr(section, "function", None) if isinstance(section, Settings) else None
                if isinstance(function, str):
                    yield function, name if key == name else f"{name}.{key}"
