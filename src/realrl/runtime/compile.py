"""From a recipe to validated programs, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from realrl.algorithms.graphs import build_eval_graph, build_graph
from realrl.config.errors import UserError
from realrl.config.experiment import Experiment
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from realrl.program.instructions import Program
from realrl.program.lower import home_placements, lower
from realrl.program.validate import validate


@dataclass(frozen=True)
class Phase:
    """One kind of step: its graph, where its calls run, and the program of every rank."""

    graph: DataflowGraph
    plan: Plan
    programs: list[Program]


@dataclass(frozen=True)
class Compiled:
    """A recipe on a cluster: training steps, evaluation steps, and where parameters live in between."""

    train: Phase
    evaluation: Phase | None
    homes: Mapping[str, Placement]


def compile_recipe(experiment: Experiment, cluster: Cluster) -> Compiled:
    """Graph, plan and validated programs. UserError for a plan that does not fit."""
    graph = build_graph(experiment)
    plan = make_plan(experiment.plan, graph, cluster, experiment.micro_batch_tokens)
    homes = home_placements(graph, plan)
    _check_batch(experiment, graph, plan)
    train = _phase(graph, plan, homes)
    eval_graph = build_eval_graph(experiment)
    if eval_graph is None:
        return Compiled(train, None, homes)
    return Compiled(train, _phase(eval_graph, plan.evaluation(eval_graph, graph), homes), homes)


def _phase(graph: DataflowGraph, plan: Plan, homes: Mapping[str, Placement]) -> Phase:
    programs = lower(graph, plan, homes)
    validate(programs, graph, {role: homes[role] for role in graph.roles})
    return Phase(graph, plan, programs)


def _check_batch(experiment: Experiment, graph: DataflowGraph, plan: Plan) -> None:
    batch = experiment.data.batch
    for call in graph.calls:
        dp = plan[call.name].strategy.dp
        if batch // call.minibatches < dp:
            raise UserError(
                f"data.batch={batch} in {call.minibatches} mini-batches leaves some of the {dp} data-parallel"
                f" ranks of {call.name} without an item; make it at least {dp * call.minibatches}"
            )
