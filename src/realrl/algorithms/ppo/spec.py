"""Description of PPO. No torch."""

from realrl.algorithms.policy.graph import make_eval_graph
from realrl.algorithms.policy.reference import list_averages
from realrl.algorithms.policy.report import CURVES, HEADLINES, OPTIONAL_CALLS, OPTIONAL_METRICS, SUMMARY
from realrl.algorithms.ppo.config import PPOExperiment
from realrl.algorithms.ppo.graph import train_graph
from realrl.algorithms.rewards.answers import find_answer_reader
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec


def _train_graph(experiment: PPOExperiment) -> DataflowGraph:
    models = experiment.models
    return train_graph(
        minibatches=experiment.ppo.minibatches,
        averages=list_averages(experiment.ppo, models.actor, models.ref),
        reward=experiment.reward,
        reference=models.ref is not None,
    )


def _methods(experiment: PPOExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None) -> object:
    from realrl.algorithms.ppo.method import PPOAlgorithm

    return PPOAlgorithm(
        graph=graph,
        eval_graph=eval_graph,
        config=experiment.ppo,
        reward=experiment.reward,
        generation=experiment.generation,
        eval_generation=ALGORITHM.eval_generation(experiment),
    )


ALGORITHM = AlgorithmSpec(
    name="ppo",
    recipe=PPOExperiment,
    roles={
        "actor": RoleSpec("lm"),
        "critic": RoleSpec("scalar", weights_from="reward", weights_else="actor", dtype_from="actor"),
        "ref": RoleSpec("lm", weights_from="actor", optional=True),
        "reward": RoleSpec("scalar", optional=True),
    },
    form="prompt",
    train_graph=_train_graph,
    eval_graph=lambda experiment: make_eval_graph(
        reward=experiment.reward, reference=experiment.models.ref is not None
    ),
    generation=lambda experiment: experiment.generation,
    epochs=lambda experiment: experiment.ppo.epochs,
    experience_calls=("actor.train", "critic.train"),
    methods=_methods,
    answers=lambda experiment: find_answer_reader(experiment.reward),
    optional_calls=OPTIONAL_CALLS,
    optional_metrics=OPTIONAL_METRICS,
    headlines=(*HEADLINES, "critic.train/value_loss", "judge"),
    sample_keys=("score",),
    curves=CURVES,
    summary=SUMMARY,
)
