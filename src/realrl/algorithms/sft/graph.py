"""Supervised fine-tuning: one call."""

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

INPUTS = ("tokens", "trained")
TOKENS = Key("tokens", "int64")
TRAINED = Key("trained", "int64", "tokens")
NLL = Key("nll", "float32", "one")


def train_graph() -> DataflowGraph:
    """`tokens` are prompts and answers, special tokens included; those where `trained` is 1 are learnt."""
    return DataflowGraph(
        [Call("actor.train", "actor", Kind.TRAIN, INPUTS, work=("tokens",))], [TOKENS, TRAINED]
    )


def eval_graph() -> DataflowGraph:
    """`nll` is the negative log-likelihood of an item, summed over the tokens to learn."""
    inference = Call("actor.inference", "actor", Kind.INFERENCE, INPUTS, ("nll",), work=("tokens",))
    return DataflowGraph([inference], [TOKENS, TRAINED, NLL])
