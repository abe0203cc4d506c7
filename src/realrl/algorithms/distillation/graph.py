"""Distillation: the teacher looks at sampled answers, or at those of records, and the actor trains. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from realrl.algorithms.distillation.config import DistillationExperiment, OfflineDistillationExperiment
from realrl.algorithms.policy.graph import GENERATE, KEYS, infer_on_sequences, make_graph
from realrl.dataflow.call import Call, Candidates, Key, Kind
from realrl.dataflow.graph import DataflowGraph

DRAWN = Key("teacher_logprobs", "float32", "sequences")
"""The teacher's log-probabilities of the tokens that were drawn."""
TOKENS = Key("tokens", "int64")
LOSS_MASK = Key("loss_mask", "int64", "tokens")
"""Prompts and answers of records, and which of their tokens count: never the first of a row."""
IDS, TOP = "teacher_ids", "teacher_top_logprobs"
"""The teacher's likeliest tokens in the place of each token, and their log-probabilities."""
DIVERGENCE = "divergence"
"""Divergence at each token of an answer, 0 on the prompt."""


@dataclass(frozen=True)
class _Answers:
    """Answers to learn from: the key of the rows, and the keys that say which tokens of them count."""

    rows: str
    places: tuple[str, ...]


_SAMPLED = _Answers("sequences", ("prompt_length", "finished"))
_RECORDED = _Answers(TOKENS.name, (LOSS_MASK.name,))


def make_distillation_graph(experiment: DistillationExperiment) -> DataflowGraph:
    """Make the calls of one training step on samples."""
    config = experiment.distillation
    if config.top_k is not None:
        train = _train(_SAMPLED, config.top_k, ("logprobs",), config.minibatches)
        calls = GENERATE, _look_up_likeliest(_SAMPLED, config.top_k), train
        return make_graph(calls, (*KEYS, *_make_keys(_SAMPLED, config.top_k)))
    train = Call(
        "actor.train",
        "actor",
        Kind.TRAIN,
        ("sequences", "prompt_length", "finished", "logprobs", DRAWN.name),
        work=("sequences",),
        minibatches=config.minibatches,
    )
    return make_graph((GENERATE, infer_on_sequences("teacher.inference", DRAWN.name), train), (*KEYS, DRAWN))


def make_distillation_eval_graph(experiment: DistillationExperiment) -> DataflowGraph:
    """Sample, and compare with the teacher."""
    top_k = experiment.distillation.top_k
    if top_k is not None:
        return make_graph((GENERATE, *_compare(_SAMPLED, top_k)), (*KEYS, *_make_keys(_SAMPLED, top_k)))
    teacher = infer_on_sequences("teacher.inference", DRAWN.name, ("prompt_length", "logprobs", "finished"))
    return make_graph((GENERATE, teacher), (*KEYS, DRAWN))


def make_offline_graph(experiment: OfflineDistillationExperiment) -> DataflowGraph:
    """Make the calls of one training step on records."""
    top_k = experiment.distillation.top_k
    return _make_offline((_look_up_likeliest(_RECORDED, top_k), _train(_RECORDED, top_k)), top_k)


def make_offline_eval_graph(experiment: OfflineDistillationExperiment) -> DataflowGraph:
    """Compare with the teacher on records."""
    top_k = experiment.distillation.top_k
    return _make_offline(_compare(_RECORDED, top_k), top_k)


def _make_offline(calls: Iterable[Call], top_k: int) -> DataflowGraph:
    return make_graph(calls, (TOKENS, LOSS_MASK, *_make_keys(_RECORDED, top_k)))


def _make_keys(answers: _Answers, top_k: int) -> tuple[Key, ...]:
    return (
        Key(IDS, "int32", answers.rows, top_k),
        Key(TOP, "float32", answers.rows, top_k),
        Key(DIVERGENCE, "float32", answers.rows),
    )


def _look_up_likeliest(answers: _Answers, top_k: int) -> Call:
    return Call(
        "teacher.inference",
        "teacher",
        Kind.INFERENCE,
        (answers.rows,),
        (IDS, TOP),
        work=(answers.rows,),
        candidates=Candidates(top_k, setting="distillation.top_k"),
    )


def _train(answers: _Answers, top_k: int, extra: tuple[str, ...] = (), minibatches: int = 1) -> Call:
    return Call(
        "actor.train",
        "actor",
        Kind.TRAIN,
        (answers.rows, *answers.places, *extra, IDS, TOP),
        work=(answers.rows,),
        minibatches=minibatches,
        candidates=Candidates(top_k, IDS, "distillation.top_k"),
    )


def _compare(answers: _Answers, top_k: int) -> tuple[Call, Call]:
    """Make the calls that compute the divergence without training."""
    actor = Call(
        "actor.inference",
        "actor",
        Kind.INFERENCE,
        (answers.rows, *answers.places, IDS, TOP),
        (DIVERGENCE,),
        work=(answers.rows,),
        candidates=Candidates(top_k, IDS, "distillation.top_k"),
    )
    return _look_up_likeliest(answers, top_k), actor
