"""Distillation: divergences from a teacher, and the methods of all calls."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from realrl.algorithms.base.method import (
    GenerateMethod,
    Method,
    Metrics,
    ModelOutput,
    PlainInference,
    StatelessAlgorithm,
    Sum,
)
from realrl.algorithms.base.rows import Responses, add_answer_means
from realrl.algorithms.clipped_policy_loss import LogprobsInference, PolicyTrain
from realrl.algorithms.distillation import (
    DIVERGENCE,
    DRAWN,
    IDS,
    TOP,
    DistillationConfig,
    DistillationExperiment,
    DivergenceConfig,
    OfflineDistillationExperiment,
)
from realrl.algorithms.kl import MAX_LOG_RATIO
from realrl.algorithms.policy import samples_are_stale
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import get_eval_generation

MIN_OTHERS = 1e-6
"""Minimum probability of all tokens outside the k candidates together. Rounding in float32 would hide a smaller
value. If there are no other tokens, both models get this value, which adds almost nothing to the divergence."""


def compute_divergence(config: DivergenceConfig, *, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Compute the divergence of the actor p from the teacher q at each token.

    p and q are distributions over k + 1 outcomes: the k tokens, and any other token. Sums are over outcomes, and b
    is the share of the teacher (Agarwal et al. 2023, equation 1):

    - reverse KL: sum p (log p - log q);
    - forward KL: sum q (log q - log p);
    - Jensen-Shannon with m = b q + (1 - b) p: b sum q (log q - log m) + (1 - b) sum p (log p - log m).

    The result is at most the divergence over the whole vocabulary, and equals it if k is the size of the
    vocabulary.

    logprobs, teacher_logprobs: [A, k] of the same tokens; result: [A]
    """
    actor, teacher = _add_others(logprobs), _add_others(teacher_logprobs)
    match config.divergence:
        case "reverse_kl":
            return _kl(actor, teacher)
        case "forward_kl":
            return _kl(teacher, actor)
        case "jsd":
            beta = config.jsd_beta
            mixture = torch.logaddexp(teacher + math.log(beta), actor + math.log1p(-beta))
            return beta * _kl(teacher, mixture) + (1 - beta) * _kl(actor, mixture)


def _add_others(logprobs: Tensor) -> Tensor:
    """Add the log-probability of all other tokens together. [A, k] -> [A, k + 1]"""
    others = (1 - logprobs.exp().sum(1, keepdim=True)).clamp(min=MIN_OTHERS)
    return torch.cat([logprobs, others.log()], 1)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Compute KL(first || second) of log-probabilities. [A, outcomes] -> [A]"""
    return (first.exp() * (first - second)).sum(1)


class Divergence(NamedTuple):
    """Estimates per token. value: [A] numbers whose mean estimates the divergence; advantages: [A]."""

    value: Tensor
    advantages: Tensor


def estimate_divergence(
    config: DistillationConfig, *, logprobs: Tensor, teacher_logprobs: Tensor
) -> Divergence:
    """Estimate the divergence at each token, and the advantages with which a policy gradient lowers it.

    Let w = p_teacher / p_actor. An f-divergence is the mean of f(w) over tokens that the actor draws. Its gradient
    is the mean of (f(w) - w f'(w)) grad log p_actor. The advantage is -(f(w) - w f'(w)), up to a constant that has
    no effect on the mean:

    - reverse KL: f = -log w, advantage log w;
    - forward KL: f = w log w, advantage w - 1;
    - Jensen-Shannon with share b of the teacher, m = b w + 1 - b (Agarwal et al. 2023, equation 1):
      f = b w log(w / m) - (1 - b) log m, advantage (1 - b) log m.

    logprobs, teacher_logprobs: [A] of tokens drawn from the actor
    """
    log_ratio = (teacher_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match config.divergence:
        case "reverse_kl":
            return Divergence(-log_ratio, log_ratio)
        case "forward_kl":
            bounded = log_ratio.clamp(max=math.log(config.max_ratio))
            # f(w) - w + 1 has the same mean as f(w), and is never negative.
            return Divergence(bounded.exp() * bounded - bounded.expm1(), bounded.expm1())
        case "jsd":
            beta = config.jsd_beta
            teacher, actor = log_ratio + math.log(beta), torch.full_like(log_ratio, math.log1p(-beta))
            mixture = torch.logaddexp(teacher, actor)
            value = beta * log_ratio.exp() * (log_ratio - mixture) - (1 - beta) * mixture
            return Divergence(value, (1 - beta) * mixture)


class _OnAnswers:
    """Base of methods that run a model on sampled answers or on answers from records."""

    def sequences(self, batch: Batch) -> Ragged:
        return batch["sequences" if "sequences" in batch.fields else "tokens"]


def _find_answers(batch: Batch) -> Tensor:
    """Find the A tokens of answers among all T tokens. -> [A], ascending"""
    if "sequences" in batch.fields:
        return Responses.find(batch).index
    return batch["loss_mask"].values.nonzero().squeeze(1)


def _add_answer_means(metrics: Metrics, batch: Batch) -> None:
    """Add the means of answer lengths and ends to `metrics`, if the answers are sampled."""
    if "sequences" in batch.fields:
        add_answer_means(metrics, batch)


# Distributions over the teacher's likeliest tokens.


class TopTeacher(_OnAnswers, PlainInference):
    """Log-probabilities of the tokens that the teacher finds likeliest."""

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `teacher_ids` and `teacher_top_logprobs`, k numbers at each token."""
        assert output.candidates is not None and output.candidate_logprobs is not None
        return {
            IDS: Ragged(output.candidates.int(), output.lengths),
            TOP: Ragged(output.candidate_logprobs.float(), output.lengths),
        }


def _compute(config: DivergenceConfig, batch: Batch, output: ModelOutput, at: Tensor) -> Tensor:
    """Compute the divergence at the tokens `at` [A]. -> [A]"""
    assert output.candidate_logprobs is not None
    ours, theirs = output.candidate_logprobs[at].float(), batch[TOP].values[at]
    return compute_divergence(config, logprobs=ours, teacher_logprobs=theirs)


def _measure(divergence: Tensor, batch: Batch, at: Tensor) -> Metrics:
    """Compute means over tokens. divergence: [A] at the tokens `at` [A]

    `teacher_mass` is the probability that the teacher gives to its likeliest tokens.
    """
    metrics = Metrics()
    metrics.mean("divergence", divergence.detach().double().sum(), len(at))
    metrics.mean("teacher_mass", batch[TOP].values[at].exp().double().sum(), len(at))
    return metrics


class DivergenceInference(_OnAnswers):
    """Divergence of the actor from the teacher, without training."""

    def __init__(self, config: DivergenceConfig) -> None:
        self._config = config

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `divergence`, one number per token and 0 on prompts."""
        at = _find_answers(batch)
        found = _compute(self._config, batch, output, at)
        everywhere = found.new_zeros(sum(output.lengths)).index_copy_(0, at, found)
        return {DIVERGENCE: Ragged(everywhere, output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        at = _find_answers(batch)
        metrics = _measure(batch[DIVERGENCE].values[at], batch, at)
        _add_answer_means(metrics, batch)
        return metrics


class DivergenceTrain(_OnAnswers, PolicyTrain):
    """Train method that lowers the divergence at every answer token. All answer tokens have the same weight."""

    def __init__(
        self, config: DivergenceConfig, *, epochs: int = 1, sampled: bool = False, stale: bool = False
    ) -> None:
        """`sampled`: whether the actor has sampled the answers. `stale`: see `PolicyTrain`."""
        self.epochs, self.stale = epochs, stale
        self.entropy = sampled
        self._config = config

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        self.begin_step()
        metrics = Metrics()
        _add_answer_means(metrics, batch)
        return batch, metrics

    def weight(self, batch: Batch) -> float:
        return len(_find_answers(batch))

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        at = _find_answers(batch)
        found = _compute(self._config, batch, output, at)
        metrics = _measure(found, batch, at)
        if self.entropy:
            assert output.logprobs is not None and output.entropy is not None
            metrics.mean("entropy", output.entropy[at].double().sum(), len(at))
            sampled = batch["logprobs"].values[at]
            self.add_mismatch(metrics, logprobs=output.logprobs[at], sampled=sampled)
        return found.sum(), metrics


# Estimates from sampled tokens.


def _compare(config: DistillationConfig, batch: Batch) -> tuple[Responses, Divergence, Metrics]:
    """Compare actor and teacher on sampled answers.

    The metric `divergence`, which training lowers, is a mean over tokens. `teacher_kl` is the mean over answers of
    the reverse KL, summed over the tokens of each answer.
    """
    answers = Responses.find(batch)
    logprobs, teacher = (batch[key].values[answers.index] for key in ("logprobs", DRAWN.name))
    found = estimate_divergence(config, logprobs=logprobs, teacher_logprobs=teacher)
    metrics = Metrics()
    metrics.mean("divergence", found.value.double().sum(), answers.total)
    metrics.mean("teacher_kl", (logprobs - teacher).double().sum(), len(batch))
    _add_answer_means(metrics, batch)
    return answers, found, metrics


class DrawnTeacher(LogprobsInference):
    """Log-probabilities of each sequence's tokens under the teacher."""

    def __init__(self, config: DistillationConfig) -> None:
        super().__init__(DRAWN.name)
        self._config = config

    def metrics(self, batch: Batch) -> Metrics:
        """Report the metrics of `_compare` in evaluations. In training, the train call reports them."""
        return _compare(self._config, batch)[2] if "logprobs" in batch.fields else Metrics()


class DrawnTrain(PolicyTrain):
    """Policy gradient that lowers the divergence from the teacher at every answer token."""

    def __init__(self, config: DistillationConfig, *, stale: bool = False) -> None:
        """`stale`: see `PolicyTrain`."""
        self.epochs, self.stale = config.epochs, stale
        self._config = config

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `advantages`: one number per token of `sequences`, 0 on prompts."""
        self.begin_step()
        answers, found, metrics = _compare(self._config, batch)
        return batch.with_fields(advantages=answers.spread(found.advantages.float())), metrics

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        return self.sum_clipped_loss(batch, output, _find_answers(batch), self._config.clip)


def make_algorithm(
    experiment: DistillationExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    config, generation = experiment.distillation, experiment.generation
    stale = samples_are_stale(experiment)
    generate = GenerateMethod(generation, get_eval_generation(experiment))
    methods: dict[str, Method] = {"actor.generate": generate}
    if config.top_k is None:
        methods |= {"teacher.inference": DrawnTeacher(config), "actor.train": DrawnTrain(config, stale=stale)}
    else:
        methods |= {
            "teacher.inference": TopTeacher(),
            "actor.inference": DivergenceInference(config),
            "actor.train": DivergenceTrain(config, epochs=config.epochs, sampled=True, stale=stale),
        }
    return StatelessAlgorithm(graph, eval_graph, methods, generation.temperature)


def make_offline_algorithm(
    experiment: OfflineDistillationExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    config = experiment.distillation
    methods: dict[str, Method] = {
        "teacher.inference": TopTeacher(),
        "actor.inference": DivergenceInference(config),
        "actor.train": DivergenceTrain(config),
    }
    return StatelessAlgorithm(graph, eval_graph, methods, config.temperature)
