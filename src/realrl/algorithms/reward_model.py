"""Reward modelling on pairs, ranked answers or steps: settings, calls and descriptions.

This module does not import torch.
"""

from typing import Any

from pydantic import Field, NonNegativeFloat

from realrl.config.base import Settings
from realrl.config.lazy import import_later
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.forms import MOST_ANSWERS
from realrl.recipe.model import TrainedModelConfig


class RewardModels(Models):
    """The model of reward modelling."""

    reward: TrainedModelConfig
    """Model that is trained. It starts from a language model or a sequence classifier, and becomes a sequence
    classifier with one label."""


class PairLossConfig(Settings):
    """Loss of the scores of pairs."""

    margins: bool = False
    """Whether each record has a number `margin`, the target difference of the scores of its answers
    (Touvron et al. 2023, equation 2)."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of both scores, which pulls their mean towards 0 (Eisenstein et al. 2023). 0.01 is
    usual."""


class RankingConfig(Settings):
    """Loss of the scores of ranked answers."""

    answers: int = Field(default=4, ge=2, le=MOST_ANSWERS)
    """Number of answers in each record, which lists the best answer first."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of the scores of a record, which pulls their mean towards 0."""


class RewardExperiment(Experiment):
    """Reward modelling on preference pairs (Bradley-Terry)."""

    models: RewardModels
    loss: PairLossConfig = PairLossConfig()


class RankedRewardExperiment(Experiment):
    """Reward modelling on several ranked answers per prompt (Plackett-Luce)."""

    models: RewardModels
    loss: RankingConfig = RankingConfig()


class ProcessRewardExperiment(Experiment):
    """Process reward modelling: a score for each step of an answer, right or wrong (Lightman et al. 2023)."""

    models: RewardModels


PAIR = ("chosen", "rejected")
PAIR_KEYS = (
    *(Key(name, "int64") for name in PAIR),
    Key("pairs_of_prompt", "int64", "one"),
    Key("margin", "float32", "one"),
    *(Key(f"{name}_score", "float32", "one") for name in PAIR),
)
"""`chosen` and `rejected` hold prompts with answers. The weight of a pair is 1 / `pairs_of_prompt`."""

_STEPS = ("tokens", "step_ends", "step_labels")
_STEP_KEYS = (
    Key("tokens", "int64"),
    Key("step_ends", "int64"),
    Key("step_labels", "int64", "step_ends"),
    Key("step_scores", "float32", "step_ends"),
)
"""`tokens` holds a prompt with its answer. `step_ends` holds the position of the last token of each step."""


def name_answers(count: int) -> tuple[str, ...]:
    """Name the keys of ranked answers: whole sequences, prompt included, the best first."""
    return tuple(f"answer_{i}" for i in range(count))


def name_scores(count: int) -> tuple[str, ...]:
    return tuple(f"score_{i}" for i in range(count))


def list_pair_inputs(margins: bool) -> tuple[str, ...]:
    return (*PAIR, "pairs_of_prompt", *(("margin",) if margins else ()))


def make_reward_graph(
    keys: tuple[Key, ...], inputs: tuple[str, ...], work: tuple[str, ...], outputs: tuple[str, ...] = ()
) -> DataflowGraph:
    """Make a graph with one call, which computes `outputs` or, without outputs, trains.

    `keys`: declarations of all keys. `work`: keys of the token rows that the model runs on.
    """
    kind = Kind.INFERENCE if outputs else Kind.TRAIN
    return DataflowGraph.using([Call(f"reward.{kind}", "reward", kind, inputs, outputs, work=work)], keys)


def _make_pair_graph(experiment: RewardExperiment, outputs: tuple[str, ...] = ()) -> DataflowGraph:
    return make_reward_graph(PAIR_KEYS, list_pair_inputs(experiment.loss.margins), PAIR, outputs)


def _make_ranking_graph(experiment: RankedRewardExperiment, *, score: bool = False) -> DataflowGraph:
    answers, scores = name_answers(experiment.loss.answers), name_scores(experiment.loss.answers)
    keys = (*(Key(name, "int64") for name in answers), *(Key(name, "float32", "one") for name in scores))
    return make_reward_graph(keys, answers, answers, scores if score else ())


_COMMON: dict[str, Any] = {
    "roles": {"reward": RoleSpec("scalar")},
    "generation": None,
    "headlines": ("reward.train/loss", "reward.train/accuracy", "reward.inference/accuracy"),
}

ALGORITHM = AlgorithmSpec(
    name="reward",
    methods=import_later("realrl.algorithms.reward_model_loss:make_pair_algorithm"),
    recipe=RewardExperiment,
    form="pair",
    train_graph=_make_pair_graph,
    eval_graph=lambda experiment: _make_pair_graph(experiment, ("chosen_score", "rejected_score")),
    curves={"loss": "loss per pair (nats)", "accuracy": "pairs ranked right"},
    summary=(SummaryMetric("reward_pair_accuracy", "accuracy", "reward model: held-out pairs ranked right"),),
    **_COMMON,
)

RANKED = AlgorithmSpec(
    name="ranked_reward",
    methods=import_later("realrl.algorithms.reward_model_loss:make_ranking_algorithm"),
    recipe=RankedRewardExperiment,
    form="ranked",
    train_graph=_make_ranking_graph,
    eval_graph=lambda experiment: _make_ranking_graph(experiment, score=True),
    curves={"loss": "loss per ranking (nats)", "accuracy": "pairs of answers ranked right"},
    summary=(
        SummaryMetric("ranked_reward_accuracy", "accuracy", "reward model: held-out answers ranked right"),
    ),
    **_COMMON,
)

PROCESS = AlgorithmSpec(
    name="process_reward",
    methods=import_later("realrl.algorithms.reward_model_loss:make_step_algorithm"),
    recipe=ProcessRewardExperiment,
    form="steps",
    train_graph=lambda experiment: make_reward_graph(_STEP_KEYS, _STEPS, _STEPS[:1]),
    eval_graph=lambda experiment: make_reward_graph(_STEP_KEYS, _STEPS, _STEPS[:1], ("step_scores",)),
    curves={"loss": "loss per step (nats)", "accuracy": "steps judged right"},
    summary=(
        SummaryMetric("process_reward_accuracy", "accuracy", "process reward: held-out steps judged right"),
    ),
    **_COMMON,
)
