"""Learning from preference pairs (DPO, ORPO, SimPO): settings, calls and descriptions.

This module does not import torch.
"""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from realrl.algorithms.policy import ReferenceConfig, drop_reference, list_averages
from realrl.config.base import PRESENCE, derive_settings
from realrl.config.lazy import import_later
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import ModelConfig, TrainedModelConfig

_PER_TOKEN = ("ipo", "odds_ratio")
"""Losses that compare scores per token. `ipo` has a fixed target difference of scores, which would be easier to
reach with long answers if scores were sums over tokens."""


class PreferenceModels(Models):
    """Models of a preference recipe: the trained actor, and a frozen reference if the loss uses one."""

    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig | None = Field(default=ModelConfig(), json_schema_extra=PRESENCE)
    """Frozen reference policy. Without a `path` it is the actor's starting point, and without a `dtype` it takes
    the actor's. There is no reference unless `preference.reference` is `model`."""


class PreferenceConfig(ReferenceConfig):
    """Loss of preference pairs. The score of an answer is its log-probability under the actor, minus its
    log-probability under the reference if there is a reference. The reward of an answer is `beta` times its score.
    With a reference that follows the actor, the algorithm is TR-DPO (Gorbatovski et al. 2024)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "odds_ratio"] = "sigmoid"
    """Loss of a pair; d is the score of the chosen answer minus the score of the rejected answer. `sigmoid`:
    -log sigmoid(beta d - gamma) (Rafailov et al. 2023). `robust`: the same loss, corrected for the bias of wrong
    labels (Chowdhury et al. 2024). `hinge`: max(0, 1 - beta d) (Zhao et al. 2023). `ipo`: (d - 1 / (2 beta))^2 with
    scores per token, as in the authors' experiments (Azar et al. 2023). `odds_ratio`: -beta log sigmoid of the
    difference of log odds, without a reference (Hong et al. 2024)."""
    beta: PositiveFloat = 0.1
    """Scale of rewards. A higher value keeps the actor nearer to the reference."""
    gamma: NonNegativeFloat = 0.0
    """Target margin between the rewards of the chosen and the rejected answer. Only for loss=sigmoid."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that the label of a pair is wrong. Only for loss=sigmoid (Mitchell 2023) and loss=robust."""
    length_normalization: bool | None = None
    """Divide each answer's score by its number of tokens. null divides only for loss=ipo and loss=odds_ratio."""
    reference: Literal["model", "records", "none"] = "model"
    """Source of the reference's log-probabilities. `model`: the model `models.ref`. `records`: the record columns
    `ref_chosen_logps` and `ref_rejected_logps`, each summed over the tokens of an answer. `none`: no reference, so
    scores are log-probabilities of the actor alone."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight, in the loss, of the mean negative log-likelihood per token of chosen answers."""
    nll_prompts: bool = False
    """Include the tokens of prompts in the likelihood of `nll_coef`."""

    @property
    def per_token(self) -> bool:
        if self.length_normalization is None:
            return self.loss in _PER_TOKEN
        return self.length_normalization

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.gamma > 0 and self.loss != "sigmoid":
            raise ValueError(
                f"gamma={self.gamma:g} is the margin of loss=sigmoid; set gamma=0 for {self.loss}"
            )
        if self.label_smoothing > 0 and self.loss not in ("sigmoid", "robust"):
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} goes with loss=sigmoid or robust; set it to 0 for"
                f" {self.loss}"
            )
        if self.loss in _PER_TOKEN and not self.per_token:
            raise ValueError(
                f"length_normalization=false: loss={self.loss} compares means over tokens; leave it out, or choose"
                " another loss"
            )
        if self.loss == "odds_ratio" and self.reference != "none":
            raise ValueError(
                "loss=odds_ratio compares log-probabilities of the actor alone; set reference=none"
            )
        if self.following is not None and self.reference != "model":
            raise ValueError(f"{self.following} moves models.ref, and reference={self.reference}")
        return self


class PreferenceExperiment(Experiment):
    """Learning from preference pairs without sampling."""

    models: PreferenceModels
    preference: PreferenceConfig = PreferenceConfig()

    @model_validator(mode="after")
    def _reference(self) -> Self:
        setting = f"preference.reference={self.preference.reference}"
        needed, ref = self.preference.reference == "model", self.models.ref
        if needed and ref is None:
            raise ValueError(f"models.ref is null, and {setting} needs it")
        if not needed and ref is not None:
            if "ref" in self.models.model_fields_set:
                raise ValueError(f"models.ref is given, and {setting} has no use for it; leave it out")
            drop_reference(self)
        return self


SIDES = ("chosen", "rejected")
_PAIR = (*SIDES, "chosen_prompt_length", "rejected_prompt_length")
_REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")
_LOGPS = ("chosen_logps", "rejected_logps")

_KEYS = (
    *(Key(name, "int64") for name in SIDES),
    *(Key(name, "int64", "one") for name in (*_PAIR[2:], "pairs_of_prompt")),
    *(Key(name, "float32", "one") for name in (*_REF_LOGPS, *_LOGPS, "chosen_nll")),
)
"""`chosen` and `rejected` hold prompts with answers. Keys that end with `_logps` hold log-probabilities of answers,
summed over tokens. The weight of a pair is 1 / `pairs_of_prompt`."""


def _make_graph(experiment: PreferenceExperiment, kind: Kind) -> DataflowGraph:
    """Make the graph with a call of the actor, which follows a call of the reference if there is a reference.

    Inference computes log-probabilities of both answers of each pair, and `chosen_nll` if the loss includes it.
    """
    config, models = experiment.preference, experiment.models
    scored = _REF_LOGPS if config.reference != "none" else ()
    outputs: tuple[str, ...] = ()
    if kind is Kind.INFERENCE:
        outputs = _LOGPS if config.nll_coef == 0 else (*_LOGPS, "chosen_nll")
    inputs = (*_PAIR, "pairs_of_prompt", *scored)
    calls = [Call(f"actor.{kind}", "actor", kind, inputs, outputs, work=SIDES)]
    if models.ref is not None:
        calls.insert(0, Call("ref.inference", "ref", Kind.INFERENCE, _PAIR, _REF_LOGPS, work=SIDES))
    averages = list_averages(config, models.actor, models.ref) if kind is Kind.TRAIN else ()
    return DataflowGraph.using(calls, _KEYS, averages)


def _describe(name: str, about: str, **defaults: Any) -> AlgorithmSpec:
    """Describe an algorithm that learns from pairs. `defaults`: defaults that differ from `PreferenceConfig`."""
    config = derive_settings(PreferenceConfig, f"{name.title()}Config", about, defaults)
    recipe = derive_settings(
        PreferenceExperiment, f"{name.title()}Experiment", about, {"preference": config()}
    )
    return AlgorithmSpec(
        name=name,
        recipe=recipe,
        roles={"actor": RoleSpec("lm"), "ref": RoleSpec("lm", weights_from="actor", optional=True)},
        form="pair",
        train_graph=lambda experiment: _make_graph(experiment, Kind.TRAIN),
        eval_graph=lambda experiment: _make_graph(experiment, Kind.INFERENCE),
        generation=None,
        methods=import_later("realrl.algorithms.preference_loss:make_algorithm"),
        optional_calls=("ref.inference",),
        headlines=(
            "actor.train/loss",
            "actor.train/accuracy",
            "actor.train/margin",
            "actor.inference/accuracy",
            "actor.inference/margin",
        ),
        curves={
            "loss": "loss",
            "accuracy": "pairs ranked right",
            "margin": "reward of chosen minus rejected answers",
        },
        summary=(
            SummaryMetric("preference_accuracy", "accuracy", "held-out pairs ranked right"),
            SummaryMetric("preference_margin", "margin", "reward margin of held-out pairs"),
        ),
    )


DPO = _describe(
    "dpo",
    "DPO: preference pairs without a reward model or samples; IPO, hinge and robust losses (Rafailov et al. 2023,"
    " arXiv 2305.18290)",
)
ORPO = _describe(
    "orpo",
    "ORPO: fine-tuning on chosen answers with a penalty on the odds of rejected ones, without a reference (Hong et"
    " al. 2024, arXiv 2403.07691)",
    loss="odds_ratio",
    length_normalization=True,
    reference="none",
    nll_coef=1.0,
    nll_prompts=True,
)
SIMPO = _describe(
    "simpo",
    "SimPO: preference pairs by mean log-probabilities and a margin, without a reference (Meng et al. 2024, arXiv"
    " 2405.14734)",
    beta=2.0,
    gamma=1.0,
    length_normalization=True,
    reference="none",
)
