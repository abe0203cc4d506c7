"""Methods of calls of distillation that compare distributions over the teacher's likeliest tokens."""

from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.distillation.answers import find_answers, measure_answers, select_rows
from realrl.algorithms.distillation.config import DivergenceConfig
from realrl.algorithms.distillation.graph import DIVERGENCE, IDS, TOP
from realrl.algorithms.distillation.losses import compute_divergence
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.policy.metrics import UpdateMetrics
from realrl.data.batch import Batch, Ragged


class TopTeacher:
    """Log-probabilities of the tokens that the teacher finds likeliest."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompts and answers."""
        return select_rows(batch)

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `teacher_ids` and `teacher_top_logprobs`: k numbers in the place of each token."""
        assert output.candidates is not None and output.candidate_logprobs is not None
        return {
            IDS: Ragged(output.candidates.int(), output.lengths),
            TOP: Ragged(output.candidate_logprobs.float(), output.lengths),
        }

    def metrics(self, batch: Batch) -> Metrics:
        """Report nothing."""
        return Metrics()


def _compute(config: DivergenceConfig, batch: Batch, output: ModelOutput, at: Tensor) -> Tensor:
    """Compute the divergence at the tokens `at` [A]. -> [A]"""
    assert output.candidate_logprobs is not None
    ours, theirs = output.candidate_logprobs[at].float(), batch[TOP].values[at]
    return compute_divergence(config, logprobs=ours, teacher_logprobs=theirs)


def _measure(divergence: Tensor, batch: Batch, at: Tensor) -> Metrics:
    """Compute means over tokens: `divergence`, and `teacher_mass`, the share of the teacher's probability that its
    likeliest tokens have. divergence: [A] at the tokens `at` [A]"""
    metrics = Metrics()
    metrics.mean("divergence", divergence.detach().double().sum(), len(at))
    metrics.mean("teacher_mass", batch[TOP].values[at].exp().double().sum(), len(at))
    return metrics


class DivergenceInference:
    """Divergence of the actor from the teacher, without training."""

    def __init__(self, config: DivergenceConfig) -> None:
        self._config = config

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompts and answers."""
        return select_rows(batch)

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `divergence`, one number per token, 0 on prompts."""
        at = find_answers(batch)
        found = _compute(self._config, batch, output, at)
        everywhere = found.new_zeros(sum(output.lengths)).index_copy_(0, at, found)
        return {DIVERGENCE: Ragged(everywhere, output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """Compute the metrics of evaluation."""
        at = find_answers(batch)
        metrics = _measure(batch[DIVERGENCE].values[at], batch, at)
        metrics.update(measure_answers(batch))
        return metrics


class DivergenceTrain(PlainTrain):
    """Gradient of the divergence at every token of the answers, which all weigh the same."""

    def __init__(self, config: DivergenceConfig, *, epochs: int = 1, sampled: bool = False) -> None:
        """`sampled`: whether the actor has drawn the answers."""
        self.epochs = epochs
        self.entropy = sampled
        self._config = config
        self._update_metrics = UpdateMetrics()

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Measure the answers."""
        self._update_metrics.begin_step()
        return batch, measure_answers(batch)

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompts and answers."""
        return select_rows(batch)

    def weight(self, batch: Batch) -> float:
        """Count the tokens of answers."""
        return len(find_answers(batch))

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the sum of the divergence over tokens of answers."""
        at = find_answers(batch)
        found = _compute(self._config, batch, output, at)
        metrics = _measure(found, batch, at)
        if self.entropy:
            assert output.logprobs is not None and output.entropy is not None
            metrics.mean("entropy", output.entropy[at].double().sum(), len(at))
            sampled = batch["logprobs"].values[at]
            self._update_metrics.add_mismatch(metrics, logprobs=output.logprobs[at], old_logprobs=sampled)
        return found.sum(), metrics

    def stop(self, metrics: dict[str, float]) -> bool:
        """Return False always; note that the update of a mini-batch follows."""
        self._update_metrics.note_update()
        return False
