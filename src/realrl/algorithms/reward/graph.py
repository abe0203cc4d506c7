"""Reward modelling: one call on preference pairs."""

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

PAIR = ("chosen", "rejected")
CHOSEN, REJECTED = (Key(name, "int64") for name in PAIR)
CHOSEN_SCORE = Key("chosen_score", "float32", "one")
REJECTED_SCORE = Key("rejected_score", "float32", "one")


def train_graph() -> DataflowGraph:
    """`chosen` and `rejected` are whole sequences, prompt included."""
    return DataflowGraph([Call("reward.train", "reward", Kind.TRAIN, PAIR, work=PAIR)], [CHOSEN, REJECTED])


def eval_graph() -> DataflowGraph:
    """Scores both sequences of each pair."""
    outputs = ("chosen_score", "rejected_score")
    inference = Call("reward.inference", "reward", Kind.INFERENCE, PAIR, outputs, work=PAIR)
    return DataflowGraph([inference], [CHOSEN, REJECTED, CHOSEN_SCORE, REJECTED_SCORE])
