"""Description of PPO. No torch."""

from realrl.algorithms.ppo.config import PPOExperiment
from realrl.algorithms.ppo.graph import eval_graph, train_graph
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric


def _train_graph(experiment: PPOExperiment) -> DataflowGraph:
    models = experiment.models
    return train_graph(
        minibatches=experiment.ppo.minibatches,
        ref_ema=experiment.ppo.ref_ema,
        same_start=models.ref.starts_like(models.actor),
        reward=experiment.reward,
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
        "ref": RoleSpec("lm", weights_from="actor"),
        "reward": RoleSpec("scalar", optional=True),
    },
    form="prompt",
    train_graph=_train_graph,
    eval_graph=lambda experiment: eval_graph(reward=experiment.reward),
    generation=lambda experiment: experiment.generation,
    epochs=lambda experiment: experiment.ppo.epochs,
    experience_calls=("actor.train", "critic.train"),
    methods=_methods,
    optional_calls=("reward.inference", "reward.function"),
    headlines=(
        "reward.inference/score",
        "reward.inference/finished",
        "reward.function/score",
        "reward.function/finished",
        "actor.train/score",
        "actor.train/finished",
        "actor.train/kl",
        "actor.train/response_tokens",
        "critic.train/value_loss",
        "ref.inference/kl",
        "judge",
    ),
    sample_keys=("score",),
    curves={
        "score": "reward's score",
        "judge": "independent judge",
        "kl": "KL to the reference (nats)",
        "response_tokens": "tokens per completion",
    },
    summary=(
        SummaryMetric("judge_before", "judge", "independent judge, before", at="first"),
        SummaryMetric("judge_after", "judge", "independent judge, after"),
        SummaryMetric("reward_before", "score", "reward's score, before", at="first"),
        SummaryMetric("reward_after", "score", "reward's score, after"),
        SummaryMetric("kl", "kl", "KL to the reference after (nats per sequence)"),
    ),
)
