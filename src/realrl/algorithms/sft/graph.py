"""Supervised fine-tuning: one call."""

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

TOKENS = Key("tokens", "int64")
PROMPT_LENGTH = Key("prompt_length", "int64", "one")
NLL = Key("nll", "float32", "one")


def train_graph() -> DataflowGraph:
    """`tokens` are prompt and answer, special tokens included; the first `prompt_length` are not learnt."""
    train = Call("actor.train", "actor", Kind.TRAIN, ("tokens", "prompt_length"), work=("tokens",))
    return DataflowGraph([train], [TOKENS, PROMPT_LENGTH])


def eval_graph() -> DataflowGraph:
    """`nll` is the negative log-likelihood of the answer, summed over its tokens."""
    inputs = ("tokens", "prompt_length")
    inference = Call("actor.inference", "actor", Kind.INFERENCE, inputs, ("nll",), work=("tokens",))
    return DataflowGraph([inference], [TOKENS, PROMPT_LENGTH, NLL])
