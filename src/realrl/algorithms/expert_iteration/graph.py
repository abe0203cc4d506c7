"""Expert iteration: sample, score, learn the best; perhaps a reference to measure the divergence from. No torch."""

from realrl.algorithms.expert_iteration.config import ExpertIterationExperiment
from realrl.algorithms.policy.graph import GENERATE, KEYS, infer_on_sequences, make_graph
from realrl.algorithms.rewards.graph import list_score_keys, score_sequences
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph


def make_expert_iteration_graph(experiment: ExpertIterationExperiment) -> DataflowGraph:
    """Make the calls of one training step."""
    calls = [GENERATE, *score_sequences(experiment.reward)]
    compared: tuple[str, ...] = ()
    if experiment.models.ref is not None:
        calls.append(infer_on_sequences("ref.inference", "ref_logprobs"))
        compared = ("logprobs", "ref_logprobs")
    train = Call(
        "actor.train",
        "actor",
        Kind.TRAIN,
        ("sequences", "prompt_length", "finished", "score", *compared),
        work=("sequences",),
        minibatches=experiment.expert_iteration.minibatches,
    )
    return make_graph([*calls, train], (*KEYS, *list_score_keys(experiment.reward)))
