"""Expert iteration: selection of answers, the train call, and the algorithm as a whole."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from realrl.algorithms.base.method import Metrics, ModelOutput, PlainTrain, StatelessAlgorithm, Sum
from realrl.algorithms.base.rows import Responses, add_answer_means, gather_samples
from realrl.algorithms.base.scoring import UnscoredError
from realrl.algorithms.clipped_policy_loss import make_sampling_methods
from realrl.algorithms.expert_iteration import ExpertIterationConfig, ExpertIterationExperiment
from realrl.algorithms.kl import sequence_kl
from realrl.algorithms.policy import count_prompts
from realrl.algorithms.rewards.config import may_skip
from realrl.data.batch import Batch, Ragged, copy_numbers
from realrl.dataflow.environment import ACTION_MASK
from realrl.dataflow.graph import DataflowGraph


def select_answers(scores: Tensor, *, keep: int | None, threshold: float | None) -> Tensor:
    """Select the answers to learn.

    scores: [prompts, samples], NaN for an answer without a score; result: the same shape, bool

    Among the answers that score at least `threshold` (Singh et al. 2023), select the `keep` highest scores of each
    prompt (Dong et al. 2023, with keep=1). Among equal scores, earlier answers come first. None means no limit. A
    score that is not finite is never selected.
    """
    chosen = scores.isfinite()
    if threshold is not None:
        chosen &= scores >= threshold
    if keep is not None:
        ranked = torch.where(chosen, scores, -torch.inf).argsort(dim=1, descending=True, stable=True)
        best = torch.zeros_like(chosen)
        chosen &= best.scatter(1, ranked[:, :keep], True)
    return chosen


class ExpertIterationTrain(PlainTrain):
    """Train method that raises the likelihood of the best sampled answers."""

    def __init__(
        self,
        config: ExpertIterationConfig,
        *,
        prompts: int | None,
        restricted: bool = False,
        skips: bool = False,
    ) -> None:
        """`prompts`: as for `gather_samples`. `restricted`: whether sampling excludes some tokens.

        `skips`: whether a score of NaN marks an answer that its reward skipped. Otherwise NaN is an error, and must
        reach the gradient.
        """
        self.epochs = config.epochs
        self._config, self._prompts = config, prompts
        self._restricted, self._skips = restricted, skips

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `kept`, 1 for learnt answers, and `learnt`, their sequences.

        Other sequences are cut to their first token, so that they cost next to nothing.
        """
        scores = batch["score"].values
        table = gather_samples(
            scores, batch.ids, prompts=self._prompts, samples=self._config.samples, dp_sum=dp_sum
        )
        if self._skips and self._prompts is not None and table.isnan().all():
            raise UnscoredError
        chosen = select_answers(table, keep=self._config.keep, threshold=self._config.threshold)
        kept = chosen.flatten()[copy_numbers(batch.ids, scores.device)].double()
        metrics = self._summarize(batch, scores, kept, chosen)
        # A score that is not finite must reach the loss, so that the step is not applied and a message names it.
        wrong = scores.isinf() if self._skips else ~scores.isfinite()
        kept = torch.where(wrong, torch.nan, kept).float()
        counts = (kept != 0).tolist()
        batch = batch.with_fields(kept=Ragged.scalars(kept), learnt=_cut_others(batch["sequences"], counts))
        if ACTION_MASK in batch.fields:
            batch = batch.with_fields(learnt_mask=_cut_others(batch[ACTION_MASK], counts))
        return batch, metrics

    def _summarize(self, batch: Batch, scores: Tensor, kept: Tensor, chosen: Tensor) -> Metrics:
        metrics, count = Metrics(), len(batch)
        answers = Responses.find(batch)
        given = ~scores.isnan() | (not self._skips)
        metrics.mean("score", scores[given].sum(), given.sum())
        metrics.mean("kept_score", scores[kept > 0].sum(), kept.sum())
        metrics.mean("kept", kept.sum(), count)
        metrics.mean("prompts_without_kept", (~chosen.any(1)).double().sum(), len(chosen))
        add_answer_means(metrics, batch)
        if self._skips:
            metrics.mean("skipped", (~given).double().sum(), count)
        if "ref_logprobs" in batch.fields:
            metrics.mean("kl", sequence_kl(batch, answers, restricted=self._restricted).sum(), count)
        return metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Return learnt sequences in full, and only the first token of all other sequences."""
        return batch["learnt"]

    def weight(self, batch: Batch) -> float:
        """Count the learnt tokens or, with aggregate=sequence_mean, the learnt answers."""
        answers = self._answers(batch)
        return answers.total if self._config.aggregate == "token_mean" else int((answers.counts > 0).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Sum -log p over the learnt tokens. With aggregate=sequence_mean, sum its means over each answer's tokens.

        Let L be the learnt answers (Dong et al. 2023; Singh et al. 2023) and W the number of tokens in L. After
        division by `weight`, the loss is -1 / W sum over y in L of sum over t of log p(y_t | x, y_<t) or, with
        sequence_mean, -1 / |L| sum over y in L of 1 / |y| sum over t of log p(y_t | x, y_<t).
        """
        assert output.logprobs is not None
        answers = self._answers(batch)
        nll = -output.logprobs[answers.index] * batch["kept"].values[answers.row]
        if self._config.aggregate == "sequence_mean":
            nll = nll / answers.counts[answers.row]
        return nll.sum(), Metrics()

    def _answers(self, batch: Batch) -> Responses:
        mask = batch["learnt_mask"].values if "learnt_mask" in batch.fields else None
        return Responses.of(batch["learnt"], batch["prompt_length"], kept=batch["kept"].values, mask=mask)


def _cut_others(rows: Ragged, kept: Sequence[bool]) -> Ragged:
    """Keep rows in full where `kept` says so, and only the first number of all other rows."""
    cut = [row if whole else row[:1] for row, whole in zip(rows.rows(), kept, strict=True)]
    return Ragged.of(cut, dtype=rows.values.dtype)


class ExpertIterationAlgorithm(StatelessAlgorithm):
    """Expert iteration, with a note on steps that learn nothing."""

    def __init__(
        self, experiment: ExpertIterationExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
    ) -> None:
        generation = experiment.generation
        train = ExpertIterationTrain(
            experiment.expert_iteration,
            prompts=count_prompts(experiment),
            restricted=generation.restricted,
            skips=may_skip(experiment.reward),
        )
        methods = {**make_sampling_methods(experiment), "actor.train": train}
        super().__init__(graph, eval_graph, methods, generation.temperature)
        self._threshold = experiment.expert_iteration.threshold

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        if metrics.get("actor.train/kept") != 0:
            return []
        bound = (
            "" if self._threshold is None else f" of expert_iteration.threshold={self._threshold:g} or more"
        )
        return [
            f"no answer has a score{bound}, so the step learnt nothing; actor.train/kept is the share of answers"
            " that steps learn"
        ]
