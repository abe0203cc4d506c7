"""PPO: four roles, six calls. A function may take the place of the reward model, and the reference may be left out.

`values[t]` is the critic's value of the state after token t.
"""

from collections.abc import Iterable

from realrl.algorithms.policy.graph import GENERATE, KEYS, infer_on_sequences, make_graph
from realrl.algorithms.rewards.config import Rewards
from realrl.algorithms.rewards.graph import list_score_keys, score_sequences
from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph

VALUES = Key("values", "float32", "sequences")


def train_graph(
    *,
    minibatches: int,
    averages: Iterable[MovingAverage] = (),
    reward: Rewards | None = None,
    reference: bool = True,
) -> DataflowGraph:
    """One step: sample, score, train.

    `minibatches` are optimizer steps per pass over the samples; `averages` say how the reference follows the actor,
    if it does; `reward` are its terms, None for a reward
    model alone; `reference` says whether there is a reference model.
    """
    scoring = score_sequences(reward)
    inference = [infer_on_sequences("critic.inference", "values")]
    if reference:
        inference.insert(0, infer_on_sequences("ref.inference", "ref_logprobs"))
    experience = (
        "sequences",
        "prompt_length",
        "finished",
        "logprobs",
        "score",
        *(key for call in inference for key in call.outputs),
    )
    train = [
        Call(f"{role}.train", role, Kind.TRAIN, experience, work=("sequences",), minibatches=minibatches)
        for role in ("actor", "critic")
    ]
    return make_graph(
        [GENERATE, *scoring, *inference, *train], (*KEYS, VALUES, *list_score_keys(reward)), averages
    )
