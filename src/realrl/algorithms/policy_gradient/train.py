"""Method of the `actor.train` call of policy gradients without a critic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses
from realrl.algorithms.policy.kl import KLController, token_kl
from realrl.algorithms.policy.losses import MAX_LOG_RATIO, compute_policy_loss, estimate_kl
from realrl.algorithms.policy.metrics import UpdateMetrics
from realrl.algorithms.policy.normalization import global_moments, whiten
from realrl.algorithms.policy_gradient.advantages import punish_overlong, scale_by_std, subtract_baseline
from realrl.algorithms.policy_gradient.config import PolicyGradientConfig
from realrl.algorithms.policy_gradient.graph import GREEDY
from realrl.algorithms.rewards.scoring.scores import UnscoredError
from realrl.algorithms.samples import gather_samples
from realrl.data.batch import Batch, Ragged, copy_numbers


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a training step: prompts, and the bound on the tokens of an answer."""

    prompts: int
    max_new_tokens: int


class PolicyGradientTrain(PlainTrain):
    """Policy gradient over sampled answers, whose advantages are made of rewards alone."""

    entropy: bool = True

    def __init__(
        self,
        config: PolicyGradientConfig,
        sizes: StepSizes,
        *,
        restricted: bool = False,
        skips: bool = False,
    ) -> None:
        """`restricted`: whether sampling leaves tokens out. `skips`: whether a score that is NaN is one that its
        reward skipped; otherwise it is a mistake, and the gradient that it makes is not finite."""
        self.epochs = config.epochs
        self.kl = KLController(config.kl)
        self._config = config
        self._sizes = sizes
        self._restricted = restricted
        self._skips = skips
        self._coef = config.kl.coef
        self._update_metrics = UpdateMetrics()

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `advantages`, like `sequences`, 0 on prompts, and `kept`, 1 for answers that the loss counts."""
        config = self._config
        self._update_metrics.begin_step()
        self._coef = self.kl.coef
        answers = Responses.of(batch["sequences"], batch["prompt_length"])
        rewards = self._rewards(batch, answers)
        table = self._gather(rewards, batch, dp_sum)
        if config.baseline == "greedy":
            advantages = table - self._gather(batch[f"{GREEDY}score"].values, batch, dp_sum)
        else:
            advantages = subtract_baseline(table, config.baseline)
        if config.scale in ("group_std", "batch_std"):
            advantages = scale_by_std(advantages, table, config.scale)
        if self._skips:
            if table.isnan().all():
                raise UnscoredError
            # A score that a mistake made infinite must reach the loss; against others it may have become NaN.
            advantages = torch.where(table.isinf(), torch.inf, advantages)
        own = advantages.flatten()[copy_numbers(batch.ids, rewards.device)]
        kept = torch.ones_like(own)
        if self._skips:
            kept = torch.where(own.isnan(), 0.0, kept)
        if config.mask_truncated:
            kept = torch.where(batch["finished"].values != 0, kept, 0.0)
        counted = Responses.of(batch["sequences"], batch["prompt_length"], kept=kept)
        per_token = own[counted.row]
        if config.kl.place == "token_reward":
            per_token = per_token - self._coef * _sum_ahead(counted, self._divergence(batch, counted))
        if config.scale == "batch_norm":
            per_token = whiten(per_token, global_moments(per_token, dp_sum))
        metrics = self._summarize(batch, answers, rewards=rewards, table=table, dp_sum=dp_sum)
        metrics.mean("zero_advantages", (per_token == 0).double().sum(), len(per_token))
        return (
            batch.with_fields(
                advantages=counted.spread(per_token.float()), kept=Ragged.scalars(kept.float())
            ),
            metrics,
        )

    def _rewards(self, batch: Batch, answers: Responses) -> Tensor:
        """Compute the reward of each answer, with penalties that count for it as a whole. [N] float64"""
        config = self._config
        rewards = batch["score"].values
        if config.overlong_buffer is not None:
            rewards = rewards + punish_overlong(
                answers.counts,
                most=self._sizes.max_new_tokens,
                buffer=config.overlong_buffer,
                penalty=config.overlong_penalty,
            )
        if config.kl.place == "reward" and self._coef > 0:
            rewards = rewards - self._coef * answers.row_sums(self._divergence(batch, answers))
        return rewards

    def _gather(self, values: Tensor, batch: Batch, dp_sum: Sum) -> Tensor:
        """Gather a value of every answer of the step. [N] of this rank -> [prompts, samples] float64"""
        return gather_samples(
            values, batch.ids, prompts=self._sizes.prompts, samples=self._config.samples, dp_sum=dp_sum
        )

    def _divergence(self, batch: Batch, answers: Responses) -> Tensor:
        """Estimate the divergence from the reference at each token of the answers. [A]; 0 without a reference"""
        logprobs = batch["logprobs"].values[answers.index]
        if "ref_logprobs" not in batch.fields:
            return torch.zeros_like(logprobs)
        reference = batch["ref_logprobs"].values[answers.index]
        return estimate_kl(self._config.kl.estimator, logprobs=logprobs, ref_logprobs=reference)

    def _summarize(
        self, batch: Batch, answers: Responses, *, rewards: Tensor, table: Tensor, dp_sum: Sum
    ) -> Metrics:
        metrics = Metrics()
        count = len(batch)
        given = ~rewards.isnan() | (not self._skips)
        metrics.mean("score", batch["score"].values[given].sum(), given.sum())
        metrics.mean("reward", rewards[given].sum(), given.sum())
        metrics.mean("response_tokens", answers.counts.sum(), count)
        metrics.mean("finished", batch["finished"].values.double().sum(), count)
        if self._skips:
            metrics.mean("skipped", (~given).double().sum(), count)
        if self._config.samples > 1:
            present = ~table.isnan() if self._skips else torch.ones_like(table, dtype=torch.bool)
            lowest = torch.where(present, table, torch.inf).amin(1, keepdim=True)
            equal = ((table == lowest) | ~present).all(1)
            metrics.mean("groups_of_equal_rewards", equal.double().mean(), 1.0)
        if "ref_logprobs" in batch.fields:
            log_ratio = (batch["logprobs"].values - batch["ref_logprobs"].values)[answers.index]
            kl = answers.row_sums(token_kl(log_ratio, restricted=self._restricted))
            metrics.mean("kl", kl.sum(), count)
            metrics.mean("kl_coef", kl.new_tensor(self._coef), 1.0)
            moments = global_moments(kl, dp_sum)
            self.kl.update(kl=moments.mean, sequences=int(moments.count))
        return metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def weight(self, batch: Batch) -> float:
        """Count the action tokens or, where answers weigh the same, the answers."""
        answers = self._answers(batch)
        return answers.total if self._config.aggregate == "token_mean" else int((answers.counts > 0).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the policy loss, and the divergence where it belongs to it, summed as `aggregate` says."""
        assert output.logprobs is not None and output.entropy is not None
        config = self._config
        answers = self._answers(batch)
        at = answers.index
        new = output.logprobs[at].float()
        sampled = batch["logprobs"].values[at]
        old = batch["old_logprobs"].values[at] if config.recompute_logprobs else sampled
        low, high = config.clip_range
        result = compute_policy_loss(
            log_ratio=self._log_ratio(new - old, answers),
            advantages=batch["advantages"].values[at],
            clip_low=low,
            clip_high=high,
            dual_clip=config.dual_clip,
        )
        metrics = self._update_metrics.compute(
            result, logprobs=new, old_logprobs=old, entropy=output.entropy[at]
        )
        loss = result.loss * self._correct_sampler(old - sampled, metrics)
        if config.kl.place == "loss" and self._coef > 0:
            reference = batch["ref_logprobs"].values[at]
            loss = loss + self._coef * estimate_kl(config.kl.estimator, logprobs=new, ref_logprobs=reference)
        return self._aggregate(loss, answers), metrics

    def stop(self, metrics: dict[str, float]) -> bool:
        """Return False always; note that the update of a mini-batch follows."""
        self._update_metrics.note_update()
        return False

    def _answers(self, batch: Batch) -> Responses:
        return Responses.of(batch["sequences"], batch["prompt_length"], kept=batch["kept"].values)

    def _log_ratio(self, log_ratio: Tensor, answers: Responses) -> Tensor:
        """Turn log ratios of tokens into those that are clipped, see `PolicyGradientConfig.ratio`. [A] -> [A]"""
        if self._config.ratio == "token":
            return log_ratio
        per_answer = answers.row_sums(log_ratio)
        if self._config.ratio == "sequence_mean":
            per_answer = per_answer / answers.counts.clamp(min=1)
        return per_answer[answers.row].float()

    def _correct_sampler(self, log_ratio: Tensor, metrics: Metrics) -> Tensor:
        """Compute weights of tokens that the sampler drew from another policy than the trainer's. [A] -> [A]"""
        mode, cap = self._config.sampler_correction, self._config.sampler_cap
        if mode == "none":
            return torch.ones_like(log_ratio)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        beyond = ratio > cap if mode == "truncate" else (ratio > cap) | (ratio < 1 / cap)
        metrics.mean("sampler_corrections_beyond_cap", beyond.double().sum(), len(ratio))
        return ratio.clamp(max=cap) if mode == "truncate" else torch.where(beyond, 0.0, ratio)

    def _aggregate(self, loss: Tensor, answers: Responses) -> Tensor:
        """Sum losses of tokens as `PolicyGradientConfig.aggregate` says, but for the division by `weight`."""
        match self._config.aggregate:
            case "token_mean" | "sequence_sum":
                return loss.sum()
            case "constant":
                return loss.sum() / self._sizes.max_new_tokens
            case "sequence_mean":
                return (loss / answers.counts[answers.row]).sum()


def _sum_ahead(answers: Responses, values: Tensor) -> Tensor:
    """Sum each token's value and those of the tokens after it in its answer. values: [A] -> [A]"""
    padded = answers.pad(values.double())
    return answers.unpad(padded.flip(1).cumsum(1).flip(1))
