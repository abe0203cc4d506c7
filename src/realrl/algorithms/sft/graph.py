"""Supervised fine-tuning: one call."""

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

INPUTS = ("tokens", "loss_mask")
TOKENS = Key("tokens", "int64")
LOSS_MASK = Key("loss_mask", "int64", "tokens")
NLL = Key("nll", "float32", "one")


def train_graph() -> DataflowGraph:
    """`tokens` are prompts and answers, special tokens included; those where `loss_mask` is 1 are learnt,
    never the first one of a row, which nothing predicts."""
    return DataflowGraph(
        [Call("actor.train", "actor", Kind.TRAIN, INPUTS, work=("tokens",))], [TOKENS, LOSS_MASK]
    )


def eval_graph() -> DataflowGraph:
    """`nll` is the negative log-likelihood of an item, summed over the tokens to learn."""
    inference = Call("actor.inference", "actor", Kind.INFERENCE, INPUTS, ("nll",), work=("tokens",))
    return DataflowGraph([inference], [TOKENS, LOSS_MASK, NLL])
