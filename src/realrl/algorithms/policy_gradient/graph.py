"""Policy gradient without a critic: sample, score, train; perhaps a reference and greedy answers. No torch."""

from realrl.algorithms.policy.graph import GENERATE, KEYS, infer_on_sequences, make_graph
from realrl.algorithms.policy.reference import list_averages
from realrl.algorithms.policy_gradient.config import PolicyGradientExperiment
from realrl.algorithms.rewards.graph import list_score_keys, score_sequences
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

GREEDY = "greedy_"
"""Prefix of the keys of greedy answers."""

OLD_LOGPROBS = Key("old_logprobs", "float32", "sequences")

GREEDY_KEYS = (
    Key(f"{GREEDY}sequences", "int64"),
    Key(f"{GREEDY}prompt_length", "int64", "one"),
    Key(f"{GREEDY}finished", "float32", "one"),
)


def make_policy_gradient_graph(experiment: PolicyGradientExperiment) -> DataflowGraph:
    """Make the calls of one training step."""
    config, models = experiment.policy, experiment.models
    calls = [GENERATE, *score_sequences(experiment.reward)]
    made = ["score"]
    if config.baseline == "greedy":
        calls += [
            Call(
                "actor.generate_greedy",
                "actor",
                Kind.GENERATE,
                ("prompts",),
                tuple(f"{GREEDY}{key}" for key in ("sequences", "prompt_length", "finished")),
                work=("prompts",),
                prefix=GREEDY,
            ),
            *score_sequences(experiment.reward, prefix=GREEDY),
        ]
        made.append(f"{GREEDY}score")
    if models.ref is not None:
        calls.append(infer_on_sequences("ref.inference", "ref_logprobs"))
        made.append("ref_logprobs")
    if config.recompute_logprobs:
        calls.append(infer_on_sequences("actor.inference", "old_logprobs"))
        made.append("old_logprobs")
    calls.append(
        Call(
            "actor.train",
            "actor",
            Kind.TRAIN,
            ("sequences", "prompt_length", "finished", "logprobs", *made),
            work=("sequences",),
            minibatches=config.minibatches,
        )
    )
    averages = list_averages(config, models.actor, models.ref)
    scores = [key for prefix in ("", GREEDY) for key in list_score_keys(experiment.reward, prefix)]
    return make_graph(calls, (*KEYS, OLD_LOGPROBS, *GREEDY_KEYS, *scores), averages)
