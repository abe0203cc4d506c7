"""Methods of calls of on-policy distillation that know log-probabilities of drawn tokens only."""

from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.distillation.answers import measure_answers
from realrl.algorithms.distillation.config import DistillationConfig
from realrl.algorithms.distillation.graph import DRAWN
from realrl.algorithms.distillation.losses import Divergence, estimate_divergence
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses
from realrl.algorithms.policy.inference import LogprobsInference
from realrl.algorithms.policy.losses import compute_policy_loss
from realrl.algorithms.policy.metrics import UpdateMetrics
from realrl.data.batch import Batch, Ragged


def _compare(config: DistillationConfig, batch: Batch) -> tuple[Responses, Divergence, Metrics]:
    """Compare actor and teacher on sampled answers. Metrics: `divergence`, mean per token of what training lowers;
    `teacher_kl`, reverse KL summed over the answer, mean over answers; `response_tokens`; `finished`."""
    answers = Responses.of(batch["sequences"], batch["prompt_length"])
    logprobs, teacher = (batch[key].values[answers.index] for key in ("logprobs", DRAWN.name))
    found = estimate_divergence(config, logprobs=logprobs, teacher_logprobs=teacher)
    metrics = Metrics()
    metrics.mean("divergence", found.value.double().sum(), answers.total)
    metrics.mean("teacher_kl", (logprobs - teacher).double().sum(), len(batch))
    metrics.update(measure_answers(batch))
    return answers, found, metrics


class DrawnTeacher(LogprobsInference):
    """Log-probabilities of each sequence under the teacher."""

    def __init__(self, config: DistillationConfig) -> None:
        super().__init__(DRAWN.name)
        self._config = config

    def metrics(self, batch: Batch) -> Metrics:
        """Compute metrics of evaluation; in training the train call reports them."""
        return _compare(self._config, batch)[2] if "logprobs" in batch.fields else Metrics()


class DrawnTrain(PlainTrain):
    """Policy gradient that lowers the divergence from the teacher at every token of the answers."""

    entropy: bool = True

    def __init__(self, config: DistillationConfig) -> None:
        self.epochs = config.epochs
        self._config = config
        self._update_metrics = UpdateMetrics()

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `advantages`, like `sequences`, 0 on prompts."""
        self._update_metrics.begin_step()
        answers, found, metrics = _compare(self._config, batch)
        return batch.with_fields(advantages=answers.spread(found.advantages.float())), metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def weight(self, batch: Batch) -> float:
        """Count the tokens of answers."""
        return Responses.of(batch["sequences"], batch["prompt_length"]).total

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the sum of the clipped surrogate over tokens of answers."""
        assert output.logprobs is not None and output.entropy is not None
        at = Responses.of(batch["sequences"], batch["prompt_length"]).index
        new, old = output.logprobs[at].float(), batch["logprobs"].values[at]
        result = compute_policy_loss(
            log_ratio=new - old,
            advantages=batch["advantages"].values[at],
            clip_low=self._config.clip,
            clip_high=self._config.clip,
        )
        metrics = self._update_metrics.compute(
            result, logprobs=new, old_logprobs=old, entropy=output.entropy[at]
        )
        return result.loss.sum(), metrics

    def stop(self, metrics: dict[str, float]) -> bool:
        """Return False always; note that the update of a mini-batch follows."""
        self._update_metrics.note_update()
        return False
