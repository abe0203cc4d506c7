"""Methods of the calls of distillation."""

from realrl.algorithms.base import StatelessAlgorithm
from realrl.algorithms.distillation.config import DistillationExperiment, OfflineDistillationConfig
from realrl.algorithms.distillation.distributions import DivergenceInference, DivergenceTrain, TopTeacher
from realrl.algorithms.distillation.drawn import DrawnTeacher, DrawnTrain
from realrl.algorithms.method import GenerateMethod, Method
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.generation import GenerationConfig


def distillation_algorithm(
    experiment: DistillationExperiment,
    graph: DataflowGraph,
    eval_graph: DataflowGraph | None,
    eval_generation: GenerationConfig | None,
) -> StatelessAlgorithm:
    """Make the algorithm of these graphs; `eval_generation` is how evaluation samples."""
    config, generation = experiment.distillation, experiment.generation
    methods: dict[str, Method] = {"actor.generate": GenerateMethod(generation, eval_generation or generation)}
    if config.top_k is None:
        methods |= {"teacher.inference": DrawnTeacher(config), "actor.train": DrawnTrain(config)}
    else:
        methods |= {
            "teacher.inference": TopTeacher(),
            "actor.inference": DivergenceInference(config),
            "actor.train": DivergenceTrain(config, epochs=config.epochs, sampled=True),
        }
    return StatelessAlgorithm(
        graph=graph, eval_graph=eval_graph, methods=methods, temperature=generation.temperature
    )


def offline_algorithm(
    config: OfflineDistillationConfig, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    """Make the algorithm of these graphs."""
    methods: dict[str, Method] = {
        "teacher.inference": TopTeacher(),
        "actor.inference": DivergenceInference(config),
        "actor.train": DivergenceTrain(config),
    }
    return StatelessAlgorithm(
        graph=graph, eval_graph=eval_graph, methods=methods, temperature=config.temperature
    )
