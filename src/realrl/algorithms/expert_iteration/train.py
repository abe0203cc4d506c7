"""Method of the `actor.train` call of expert iteration."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.expert_iteration.config import ExpertIterationConfig
from realrl.algorithms.expert_iteration.selection import select_answers
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses
from realrl.algorithms.policy.kl import token_kl
from realrl.algorithms.rewards.scoring.scores import UnscoredError
from realrl.algorithms.samples import gather_samples
from realrl.data.batch import Batch, Ragged, copy_numbers


class ExpertIterationTrain(PlainTrain):
    """Likelihood of the best sampled answers."""

    def __init__(
        self,
        config: ExpertIterationConfig,
        *,
        prompts: int,
        restricted: bool = False,
        skips: bool = False,
    ) -> None:
        """`prompts`: their number in a step. `restricted`: whether sampling leaves tokens out. `skips`: whether a
        score that is NaN is one that its reward skipped; otherwise it is a mistake, and the gradient that it makes
        is not finite."""
        self.epochs = config.epochs
        self._config = config
        self._prompts = prompts
        self._restricted = restricted
        self._skips = skips

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `kept`, 1 for answers that are learnt, and `learnt`, their sequences.

        Of other sequences `learnt` has the first token alone, so that they cost next to nothing.
        """
        scores = batch["score"].values
        table = gather_samples(
            scores, batch.ids, prompts=self._prompts, samples=self._config.samples, dp_sum=dp_sum
        )
        if self._skips and table.isnan().all():
            raise UnscoredError
        chosen = select_answers(table, keep=self._config.keep, threshold=self._config.threshold)
        kept = chosen.flatten()[copy_numbers(batch.ids, scores.device)].double()
        metrics = self._summarize(batch, scores, kept, chosen)
        # A mistake must reach the loss, so that the step is not applied, and names the score.
        wrong = scores.isinf() if self._skips else ~scores.isfinite()
        kept = torch.where(wrong, torch.nan, kept).float()
        rows = [
            row if counts else row[:1]
            for row, counts in zip(batch["sequences"].rows(), (kept != 0).tolist(), strict=True)
        ]
        learnt = Ragged.of(rows, dtype=batch["sequences"].values.dtype)
        return batch.with_fields(kept=Ragged.scalars(kept), learnt=learnt), metrics

    def _summarize(self, batch: Batch, scores: Tensor, kept: Tensor, chosen: Tensor) -> Metrics:
        metrics = Metrics()
        count = len(batch)
        answers = Responses.of(batch["sequences"], batch["prompt_length"])
        given = ~scores.isnan() | (not self._skips)
        metrics.mean("score", scores[given].sum(), given.sum())
        metrics.mean("kept_score", scores[kept > 0].sum(), kept.sum())
        metrics.mean("kept", kept.sum(), count)
        metrics.mean("prompts_without_kept", (~chosen.any(1)).double().mean(), 1.0)
        metrics.mean("response_tokens", answers.counts.sum(), count)
        metrics.mean("finished", batch["finished"].values.double().sum(), count)
        if self._skips:
            metrics.mean("skipped", (~given).double().sum(), count)
        if "ref_logprobs" in batch.fields:
            log_ratio = (batch["logprobs"].values - batch["ref_logprobs"].values)[answers.index]
            kl = answers.row_sums(token_kl(log_ratio, restricted=self._restricted))
            metrics.mean("kl", kl.sum(), count)
        return metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select the sequences that are learnt, and the first token of the others."""
        return batch["learnt"]

    def weight(self, batch: Batch) -> float:
        """Count the tokens that are learnt or, where answers weigh the same, the answers."""
        answers = self._answers(batch)
        return answers.total if self._config.aggregate == "token_mean" else int((answers.counts > 0).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute -log p summed over the tokens that are learnt, or over answers of the mean over their tokens.

        With L the answers that are learnt (Dong et al. 2023; Singh et al. 2023), the loss is
        -1 / W sum over y in L of sum over t of log p(y_t | x, y_<t), W the tokens in L, or
        -1 / |L| sum over y in L of 1 / |y| sum over t of log p(y_t | x, y_<t).
        """
        assert output.logprobs is not None
        answers = self._answers(batch)
        nll = -output.logprobs[answers.index] * batch["kept"].values[answers.row]
        if self._config.aggregate == "sequence_mean":
            nll = nll / answers.counts[answers.row]
        return nll.sum(), Metrics()

    def _answers(self, batch: Batch) -> Responses:
        return Responses.of(batch["learnt"], batch["prompt_length"], kept=batch["kept"].values)
