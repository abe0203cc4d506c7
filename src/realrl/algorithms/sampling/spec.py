"""Description of sampling without training, which `realrl generate` runs. No torch."""

from realrl.algorithms.rewards.answers import find_answer_reader
from realrl.algorithms.sampling.config import SamplingExperiment
from realrl.algorithms.sampling.graph import make_sampling_graph
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec


def _methods(
    experiment: SamplingExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.sampling.method import sampling_algorithm

    return sampling_algorithm(experiment, graph, eval_graph, ALGORITHM.eval_generation(experiment))


ALGORITHM = AlgorithmSpec(
    name="sampling",
    recipe=SamplingExperiment,
    roles={"actor": RoleSpec("lm"), "reward": RoleSpec("scalar", optional=True)},
    form="prompt",
    train_graph=make_sampling_graph,
    eval_graph=make_sampling_graph,
    trains=False,
    generation=lambda experiment: experiment.generation,
    samples_per_prompt=lambda experiment: experiment.evaluation.samples,
    methods=_methods,
    answers=lambda experiment: find_answer_reader(experiment.reward),
    headlines=(),
    curves={},
    summary=(),
)
