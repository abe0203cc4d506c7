"""Method of the inference call of a reward model, and metrics of scored sequences."""

from realrl.algorithms.method import Metrics, ModelOutput
from realrl.algorithms.packed import Responses, last_of_rows
from realrl.data.batch import Batch, Ragged


def compute_score_metrics(batch: Batch, *, finished_only: bool = False, skips: bool = True) -> Metrics:
    """Compute metrics of evaluation, see `RewardInference.metrics`; none without `finished`.

    `skips`: whether a score that is NaN is one that was skipped, which means leave out.
    """
    metrics, count = Metrics(), len(batch)
    if "prompt_length" in batch.fields and "finished" in batch.fields:
        responses = Responses.of(batch["sequences"], batch["prompt_length"])
        trained_on = (batch["finished"].values != 0) | (not finished_only)
        if skips:
            trained_on &= ~batch["score"].values.isnan()
        metrics.mean("score", batch["score"].values[trained_on].sum(), trained_on.sum())
        metrics.mean("response_tokens", responses.counts.sum(), count)
        metrics.mean("finished", batch["finished"].values.double().sum(), count)
    return metrics


class RewardInference:
    """Score of each sequence: the reward model's value at its last token."""

    def __init__(
        self,
        *,
        key: str | None = None,
        in_mixture: bool = False,
        finished_only: bool = False,
        prefix: str = "",
    ) -> None:
        """`finished_only`: whether training uses the scores of those sequences alone that ended by themselves.
        `prefix` is that of the keys of sequences; `key` the output, PREFIXscore if not given. `in_mixture`: whether
        it is one term of several."""
        self._key = key or f"{prefix}score"
        self._in_mixture = in_mixture
        self._finished_only = finished_only
        self._prefix = prefix

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch[f"{self._prefix}sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `score`: one number per sequence."""
        assert output.values is not None
        return {self._key: Ragged.scalars(last_of_rows(output.values, output.lengths).double())}

    def metrics(self, batch: Batch) -> Metrics:
        """Compute metrics of evaluation.

        Means of `response_tokens` and `finished` over sequences, and of `score` over
        those whose score would be trained on.

        In training, where the call's inputs do not suffice, the train call reports them; so it does of sequences
        whose keys have a prefix. As a term of a mixture, the mean `term_score` over all sequences.
        """
        if self._prefix:
            return Metrics()
        if self._in_mixture:
            metrics = Metrics()
            metrics.mean("term_score", batch[self._key].values.sum(), len(batch))
            return metrics
        return compute_score_metrics(batch, finished_only=self._finished_only, skips=False)
