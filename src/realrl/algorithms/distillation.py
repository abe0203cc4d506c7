"""Distillation on sampled and on recorded answers: settings, calls and descriptions.

This module does not import torch.
"""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.algorithms.policy import GENERATE, KEYS, infer_on_sequences, train_on_sequences
from realrl.config.base import Settings
from realrl.config.lazy import import_later
from realrl.dataflow.call import Call, Candidates, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig


class DivergenceConfig(Settings):
    """Divergence of the actor from the teacher."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """`reverse_kl`: KL(actor || teacher), for an actor that sticks to likely answers of the teacher.
    `forward_kl`: KL(teacher || actor), for an actor that covers all answers of the teacher. `jsd`: the generalised
    Jensen-Shannon divergence between actor and teacher (Agarwal et al. 2023, equation 1)."""
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of `jsd`. Near 0, `jsd` behaves like forward KL; near 1, like reverse
    KL."""


class DistillationConfig(DivergenceConfig):
    """Divergence of the actor from the teacher, averaged over the tokens of the actor's own answers.

    At each token, the distributions of both models are compared over the teacher's `top_k` likeliest tokens and one
    outcome for all other tokens. With top_k=null, the divergence is estimated from the sampled tokens instead."""

    top_k: PositiveInt | None = 64
    """Number of tokens whose log-probabilities the teacher sends at each position, 8 bytes for each token. If it is
    the size of the vocabulary, the divergence is exact. null: the teacher sends log-probabilities of sampled tokens
    only. The divergence is then estimated, and a policy gradient lowers it (see `clip` and `max_ratio`)."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """With top_k=null, after the first update of a batch, clip probability ratios to [1 - clip, 1 + clip]."""
    max_ratio: PositiveFloat = 10.0
    """With top_k=null and `forward_kl`, maximum ratio of the teacher's probability of a token to the actor's.
    Without this limit, single tokens would dominate."""
    samples: PositiveInt = 1
    """Answers sampled for each prompt."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch; must divide `data.batch`."""
    epochs: PositiveInt = 1
    """Passes over each batch."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        for name in ("clip", "max_ratio"):
            if self.top_k is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is for an estimate from drawn tokens; leave it out, or set top_k=null"
                )
        return self


class OfflineDistillationConfig(DivergenceConfig):
    """Divergence of the actor from the teacher, averaged over the tokens of the records' answers.

    At each token, the distributions of both models are compared over the teacher's `top_k` likeliest tokens and one
    outcome for all other tokens."""

    top_k: PositiveInt = 64
    """Number of tokens whose log-probabilities the teacher sends at each position, 8 bytes for each token. If it is
    the size of the vocabulary, the divergence is exact."""
    temperature: PositiveFloat = 1.0
    """Divisor of both models' logits."""


class DistillationModels(Models):
    """The models of distillation."""

    actor: TrainedModelConfig
    """The student."""
    teacher: ModelConfig
    """The frozen teacher, a language model with the actor's vocabulary."""


class DistillationExperiment(Experiment):
    """On-policy distillation: an actor learns a teacher's distributions at each token of the actor's own answers
    (Agarwal et al. 2023, arXiv 2306.13649)."""

    models: DistillationModels
    distillation: DistillationConfig = DistillationConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _estimated_from_all_tokens(self) -> Self:
        if self.distillation.top_k is not None:
            return self
        if self.generation.restricted:
            raise ValueError(
                "generation leaves tokens out, and the divergence is estimated from draws among all of them; set"
                " greedy=false, top_k=0, top_p=1 and min_new_tokens=0, or a distillation.top_k"
            )
        if self.evaluation.change(self.generation).skews(self.generation.temperature):
            raise ValueError(
                "evaluation samples otherwise than training, and the divergence is estimated from draws by the"
                " actor's own probabilities; leave out evaluation.greedy, temperature, top_p and min_new_tokens"
            )
        return self


class OfflineDistillationExperiment(Experiment):
    """Off-policy distillation: an actor learns a teacher's distributions at each token of the answers of records
    (Hinton et al. 2015, arXiv 1503.02531)."""

    models: DistillationModels
    distillation: OfflineDistillationConfig = OfflineDistillationConfig()


DRAWN = Key("teacher_logprobs", "float32", "sequences")
"""The teacher's log-probabilities of the sampled tokens."""
IDS, TOP = "teacher_ids", "teacher_top_logprobs"
"""The teacher's likeliest tokens at each position, and their log-probabilities."""
DIVERGENCE = "divergence"
"""Divergence at each token of an answer, 0 on the prompt."""


_SAMPLED = ("sequences", ("prompt_length", "finished"), KEYS)
_RECORDED = ("tokens", ("loss_mask",), (Key("tokens", "int64"), Key("loss_mask", "int64", "tokens")))
"""The key of prompts with answers, the keys that mark which tokens count, and all keys of samples or records.

`loss_mask` is 1 on the tokens that count, but never on the first token of a row."""


def _make_graph(
    answers: tuple[str, tuple[str, ...], tuple[Key, ...]],
    top_k: int,
    kind: Kind,
    extra: tuple[str, ...] = (),
    minibatches: int = 1,
) -> DataflowGraph:
    """Make a graph that compares distributions over the teacher's likeliest tokens.

    `answers`: `_SAMPLED` or `_RECORDED`. `kind`: TRAIN to train the actor, INFERENCE to compute only the
    divergence. `extra`: further inputs of the actor's call.
    """
    rows, places, keys = answers
    setting, compared = "distillation.top_k", () if kind is Kind.TRAIN else (DIVERGENCE,)
    teacher = Call(
        "teacher.inference",
        "teacher",
        Kind.INFERENCE,
        (rows,),
        (IDS, TOP),
        work=(rows,),
        candidates=Candidates(top_k, setting=setting),
    )
    actor = Call(
        f"actor.{kind}",
        "actor",
        kind,
        (rows, *places, *extra, IDS, TOP),
        compared,
        work=(rows,),
        minibatches=minibatches,
        candidates=Candidates(top_k, IDS, setting),
    )
    made = (
        Key(IDS, "int32", rows, top_k),
        Key(TOP, "float32", rows, top_k),
        Key(DIVERGENCE, "float32", rows),
    )
    sampling = [GENERATE] if answers is _SAMPLED else []
    return DataflowGraph.using([*sampling, teacher, actor], (*keys, *made))


def _make_train_graph(experiment: DistillationExperiment) -> DataflowGraph:
    config = experiment.distillation
    if config.top_k is not None:
        return _make_graph(_SAMPLED, config.top_k, Kind.TRAIN, ("logprobs",), config.minibatches)
    teacher = infer_on_sequences("teacher.inference", DRAWN.name)
    train = train_on_sequences("actor", ("logprobs", DRAWN.name), config.minibatches)
    return DataflowGraph.using((GENERATE, teacher, train), (*KEYS, DRAWN))


def _make_eval_graph(experiment: DistillationExperiment) -> DataflowGraph:
    if experiment.distillation.top_k is not None:
        return _make_graph(_SAMPLED, experiment.distillation.top_k, Kind.INFERENCE)
    teacher = infer_on_sequences("teacher.inference", DRAWN.name, ("prompt_length", "logprobs", "finished"))
    return DataflowGraph.using((GENERATE, teacher), (*KEYS, DRAWN))


_ROLES = {"actor": RoleSpec("lm"), "teacher": RoleSpec("lm")}
_CURVE = {"divergence": "divergence from the teacher per token (nats)"}
_SUMMARY = (
    SummaryMetric("divergence_before", "divergence", "divergence from the teacher, before", at="first"),
    SummaryMetric("divergence_after", "divergence", "divergence from the teacher, after"),
)


DISTILLATION = AlgorithmSpec(
    name="distillation",
    recipe=DistillationExperiment,
    roles=_ROLES,
    form="prompt",
    train_graph=_make_train_graph,
    eval_graph=_make_eval_graph,
    generation=lambda experiment: experiment.generation,
    samples_per_prompt=lambda experiment: experiment.distillation.samples,
    epochs=lambda experiment: experiment.distillation.epochs,
    needs_whole_batch=lambda _: None,
    methods=import_later("realrl.algorithms.distillation_loss:make_algorithm"),
    # Evaluations compute the divergence in one of these calls: the teacher's if top_k=null, otherwise the actor's.
    optional_calls=("actor.inference", "teacher.inference"),
    optional_metrics=("teacher_mass", "teacher_kl"),
    headlines=(
        "actor.train/divergence",
        "actor.train/teacher_mass",
        "actor.train/teacher_kl",
        "actor.train/response_tokens",
        "actor.inference/divergence",
        "teacher.inference/divergence",
        "judge",
    ),
    curves={**_CURVE, "teacher_kl": "KL to the teacher per answer (nats)", "judge": "independent judge"},
    summary=(
        *_SUMMARY,
        SummaryMetric("judge_before", "judge", "independent judge, before", at="first"),
        SummaryMetric("judge_after", "judge", "independent judge, after"),
    ),
)

OFFLINE_DISTILLATION = AlgorithmSpec(
    name="offline_distillation",
    recipe=OfflineDistillationExperiment,
    roles=_ROLES,
    form="answer",
    train_graph=lambda experiment: _make_graph(_RECORDED, experiment.distillation.top_k, Kind.TRAIN),
    eval_graph=lambda experiment: _make_graph(_RECORDED, experiment.distillation.top_k, Kind.INFERENCE),
    generation=None,
    methods=import_later("realrl.algorithms.distillation_loss:make_offline_algorithm"),
    headlines=("actor.train/divergence", "actor.train/teacher_mass", "actor.inference/divergence"),
    curves=_CURVE,
    summary=_SUMMARY,
)
