"""KTO: settings, calls and description. This module does not import torch."""

from typing import Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from realrl.config.base import Settings
from realrl.config.lazy import import_later
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import ModelConfig, TrainedModelConfig


class KTOConfig(Settings):
    """Loss of labelled answers. The reward of an answer is `beta` · (log p_actor - log p_ref), summed over its
    tokens."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto`: 1 - sigmoid(reward - beta z) for good answers and 1 - sigmoid(beta z - reward) for bad answers. z is
    an estimate of the actor's divergence from the reference. `apo_zero_unpaired`: the same loss with z = 0, which
    needs no estimate (D'Oosterlinck et al. 2024)."""
    beta: PositiveFloat = 0.1
    """Scale of rewards. A higher value keeps the actor nearer to the reference."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of good answers. If good answers are rare, raise it until (number of good answers · their weight) is
    1 to 4/3 times (number of bad answers · their weight)."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of bad answers."""

    @property
    def estimates_kl(self) -> bool:
        return self.loss == "kto"


class KTOModels(Models):
    """The models of KTO."""

    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig = ModelConfig()
    """Frozen reference policy. Without a `path` it is the actor's starting point, and without a `dtype` it takes
    the actor's."""


class KTOExperiment(Experiment):
    """KTO: answers that are each good or bad, without pairs (Ethayarajh et al. 2024, arXiv 2402.01306)."""

    models: KTOModels
    kto: KTOConfig = KTOConfig()

    @model_validator(mode="after")
    def _mismatched(self) -> Self:
        if self.kto.estimates_kl and self.data.batch < 2:
            raise ValueError(
                "data.batch=1 leaves no other answers of the step to estimate the divergence from; set it to at"
                " least 2, or kto.loss=apo_zero_unpaired"
            )
        return self


KEYS = (
    Key("tokens", "int64"),
    Key("prompt_length", "int64", "one"),
    Key("label", "int64", "one"),
    Key("mismatched", "int64"),
    *(
        Key(name, "float32", "one")
        for name in ("logps", "ref_logps", "mismatched_logps", "ref_mismatched_logps")
    ),
)
"""`tokens` holds a prompt with its answer. `mismatched` holds the prompt with the answer of another item of the
step. `label` is 1 for a good answer. Keys that end with `logps` hold log-probabilities of answers, summed over
tokens."""

LOGPS = {"tokens": "logps", "mismatched": "mismatched_logps"}
"""Key of token rows -> key of their log-probabilities."""


def _list_rows(config: KTOConfig) -> tuple[str, ...]:
    return tuple(LOGPS) if config.estimates_kl else ("tokens",)


def _refer(config: KTOConfig) -> Call:
    """Make the call of the reference. It has one row per item or, if the loss needs mismatched answers, two."""
    work = _list_rows(config)
    outputs = tuple(f"ref_{LOGPS[rows]}" for rows in work)
    return Call("ref.inference", "ref", Kind.INFERENCE, (*work, "prompt_length"), outputs, work=work)


def make_kto_graph(config: KTOConfig) -> DataflowGraph:
    """Make the graph that trains the actor. The graph first estimates the divergence if the loss needs it."""
    inputs: tuple[str, ...] = ("tokens", "prompt_length", "label", "ref_logps")
    calls = [_refer(config)]
    if config.estimates_kl:
        rows, made = ("mismatched", "prompt_length"), ("mismatched_logps",)
        calls.append(Call("actor.inference", "actor", Kind.INFERENCE, rows, made, work=rows[:1]))
        inputs = (*inputs, *made, "ref_mismatched_logps")
    calls.append(Call("actor.train", "actor", Kind.TRAIN, inputs, work=("tokens",)))
    return DataflowGraph.using(calls, KEYS)


def make_kto_eval_graph(config: KTOConfig) -> DataflowGraph:
    """Make the graph that computes log-probabilities of answers and, if the loss needs them, mismatched answers."""
    refer, work = _refer(config), _list_rows(config)
    inputs = (*work, "prompt_length", "label", *refer.outputs)
    outputs = tuple(LOGPS[rows] for rows in work)
    infer = Call("actor.inference", "actor", Kind.INFERENCE, inputs, outputs, work=work)
    return DataflowGraph.using([refer, infer], KEYS)


ALGORITHM = AlgorithmSpec(
    name="kto",
    recipe=KTOExperiment,
    roles={"actor": RoleSpec("lm"), "ref": RoleSpec("lm", weights_from="actor")},
    form="label",
    train_graph=lambda experiment: make_kto_graph(experiment.kto),
    eval_graph=lambda experiment: make_kto_eval_graph(experiment.kto),
    generation=None,
    methods=import_later("realrl.algorithms.kto_loss:make_algorithm"),
    optional_metrics=("kl",),
    headlines=(
        "actor.train/loss",
        "actor.train/accuracy",
        "actor.train/kl",
        "actor.train/chosen_reward",
        "actor.train/rejected_reward",
        "actor.inference/accuracy",
    ),
    curves={
        "loss": "loss",
        "chosen_reward": "reward of good answers",
        "rejected_reward": "reward of bad answers",
        "kl": "KL to the reference (nats)",
    },
    summary=(
        SummaryMetric("kto_accuracy", "accuracy", "held-out answers whose reward has the right sign"),
        SummaryMetric("kto_chosen_reward", "chosen_reward", "reward of held-out good answers"),
        SummaryMetric("kto_rejected_reward", "rejected_reward", "reward of held-out bad answers"),
    ),
)
