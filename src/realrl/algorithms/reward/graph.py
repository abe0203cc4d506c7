"""Reward modelling: one call on preference pairs."""

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

PAIR = ("chosen", "rejected")
INPUTS = (*PAIR, "pairs_of_prompt")
CHOSEN, REJECTED = (Key(name, "int64") for name in PAIR)
PAIRS_OF_PROMPT = Key("pairs_of_prompt", "int64", "one")
CHOSEN_SCORE = Key("chosen_score", "float32", "one")
REJECTED_SCORE = Key("rejected_score", "float32", "one")


def train_graph() -> DataflowGraph:
    """`chosen` and `rejected` are whole sequences, prompt included; a pair weighs 1 / `pairs_of_prompt`."""
    train = Call("reward.train", "reward", Kind.TRAIN, INPUTS, work=PAIR)
    return DataflowGraph([train], [CHOSEN, REJECTED, PAIRS_OF_PROMPT])


def eval_graph() -> DataflowGraph:
    """Scores both sequences of each pair."""
    outputs = ("chosen_score", "rejected_score")
    inference = Call("reward.inference", "reward", Kind.INFERENCE, INPUTS, outputs, work=PAIR)
    return DataflowGraph([inference], [CHOSEN, REJECTED, PAIRS_OF_PROMPT, CHOSEN_SCORE, REJECTED_SCORE])
