"""Supervised fine-tuning: settings, calls and description. This module does not import torch."""

from realrl.config.lazy import import_later
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import TrainedModelConfig


class SFTModels(Models):
    """The model of supervised fine-tuning."""

    actor: TrainedModelConfig
    """The language model to fine-tune."""


class SFTExperiment(Experiment):
    """Supervised fine-tuning on `{prompt, answer}` records or conversations."""

    models: SFTModels


INPUTS = ("tokens", "loss_mask")
KEYS = (Key("tokens", "int64"), Key("loss_mask", "int64", "tokens"))
"""`tokens` holds prompts with answers, special tokens included. `loss_mask` is 1 on the tokens to learn. It is 0 on
the first token of each row, which nothing predicts."""


def train_graph() -> DataflowGraph:
    return DataflowGraph([Call("actor.train", "actor", Kind.TRAIN, INPUTS, work=("tokens",))], KEYS)


def eval_graph() -> DataflowGraph:
    """Make the graph that computes `nll`: the negative log-likelihood of each item, summed over tokens to learn."""
    inference = Call("actor.inference", "actor", Kind.INFERENCE, INPUTS, ("nll",), work=("tokens",))
    return DataflowGraph([inference], (*KEYS, Key("nll", "float32", "one")))


ALGORITHM = AlgorithmSpec(
    name="sft",
    recipe=SFTExperiment,
    roles={"actor": RoleSpec("lm")},
    form="answer",
    train_graph=lambda experiment: train_graph(),
    eval_graph=lambda experiment: eval_graph(),
    generation=None,
    methods=import_later("realrl.algorithms.sft_loss:make_algorithm"),
    headlines=("actor.train/loss", "actor.inference/loss"),
    curves={"loss": "loss per token (nats)"},
    summary=(
        SummaryMetric("sft_loss_before", "loss", "held-out loss per token, before", at="first"),
        SummaryMetric("sft_loss_after", "loss", "held-out loss per token, after"),
    ),
)
