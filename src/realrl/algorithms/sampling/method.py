"""Methods of sampling without training."""

from realrl.algorithms.base import StatelessAlgorithm
from realrl.algorithms.method import GenerateMethod, Method
from realrl.algorithms.rewards.methods import make_reward_methods
from realrl.algorithms.sampling.config import SamplingExperiment
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.generation import GenerationConfig


def sampling_algorithm(
    experiment: SamplingExperiment,
    graph: DataflowGraph,
    eval_graph: DataflowGraph | None,
    eval_generation: GenerationConfig | None,
) -> StatelessAlgorithm:
    """Make the methods; `eval_generation` is how evaluation samples."""
    generation = experiment.generation
    methods: dict[str, Method] = {
        "actor.generate": GenerateMethod(generation, eval_generation or generation),
        **(make_reward_methods(experiment.reward) if experiment.is_scored else {}),
    }
    return StatelessAlgorithm(
        graph=graph, eval_graph=eval_graph, methods=methods, temperature=generation.temperature
    )
