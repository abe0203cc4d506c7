"""Policy gradients without a critic: advantages, the train call, and the algorithm as a whole."""

from typing import Literal

import torch
from torch import Tensor

from realrl.algorithms.base.method import GenerateMethod, Metrics, ModelOutput, StatelessAlgorithm, Sum
from realrl.algorithms.base.rows import Responses, add_answer_means, gather_samples
from realrl.algorithms.base.scoring import UnscoredError
from realrl.algorithms.clipped_policy_loss import (
    LogprobsInference,
    PolicyTrain,
    compute_policy_loss,
    find_old_logprobs,
    global_moments,
    make_sampling_methods,
    weigh,
    whiten,
)
from realrl.algorithms.kl import KLController, estimate_kl, sequence_kl
from realrl.algorithms.policy import count_prompts, samples_are_stale
from realrl.algorithms.policy_gradient import GREEDY, PolicyGradientConfig, PolicyGradientExperiment
from realrl.algorithms.rewards.config import may_skip
from realrl.algorithms.rewards.reward_methods import make_reward_methods
from realrl.data.batch import Batch, Ragged, copy_numbers
from realrl.dataflow.graph import DataflowGraph

# Advantages of groups are tables [prompts, samples] of float64, with NaN for answers that have no reward.

STD_EPSILON = 1e-4
"""Number that is added to a standard deviation before advantages are divided by it, as in TRL."""


def subtract_baseline(rewards: Tensor, baseline: Literal["group_mean", "leave_one_out", "none"]) -> Tensor:
    """Subtract from each reward the baseline of its group. rewards: [prompts, samples] -> the same shape

    `group_mean`: the mean reward (Shao et al. 2024, section 4.1.2). `leave_one_out`: the mean of the other rewards,
    NaN if there are none (Kool et al. 2019; Ahmadian et al. 2024, equation 6). With either of them, equal rewards
    give exactly 0.
    """
    match baseline:
        case "group_mean":
            advantages = rewards - rewards.nanmean(1, keepdim=True)
        case "leave_one_out":
            others = (~rewards.isnan()).sum(1, keepdim=True) - 1
            mean = (rewards.nansum(1, keepdim=True) - rewards.nan_to_num()) / others
            advantages = torch.where(others > 0, rewards - mean, torch.nan)
        case "none":
            return rewards.clone()
    # In floating point the mean of three times 0.1 is not 0.1, and training would follow an advantage of 1e-17.
    median = rewards.nanmedian(1, keepdim=True).values
    equal = ((rewards == median) | rewards.isnan()).all(1, keepdim=True) & median.isfinite()
    return advantages.masked_fill(equal & ~advantages.isnan(), 0.0)


def compute_std(values: Tensor) -> Tensor:
    """Compute the unbiased standard deviation of each row, 0 for fewer than two numbers. [R, C] -> [R, 1]"""
    count = (~values.isnan()).sum(1, keepdim=True)
    squares = (values - values.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def scale_by_std(advantages: Tensor, rewards: Tensor, scale: Literal["group_std", "batch_std"]) -> Tensor:
    """Divide advantages by the standard deviation of the rewards in their group or in the batch.

    advantages, rewards: [prompts, samples]; result: the same shape
    """
    std = compute_std(rewards if scale == "group_std" else rewards.reshape(1, -1))
    return advantages / (std + STD_EPSILON)


def punish_overlong(lengths: Tensor, *, most: int, buffer: int, penalty: float) -> Tensor:
    """Compute the soft overlong punishment (Yu et al. 2025, equation 13). lengths: [N] tokens -> [N], at most 0

    The punishment is 0 up to most - buffer tokens, and falls linearly to -penalty at `most` tokens.
    """
    excess = (lengths.double() - (most - buffer)) / buffer
    return -penalty * excess.clamp(0, 1)


def sum_ahead(answers: Responses, values: Tensor) -> Tensor:
    """Sum each token's value and the values after it in its answer. values: [A] -> [A]"""
    padded = answers.pad(values.double())
    return answers.unpad(padded.flip(1).cumsum(1).flip(1))


class PolicyGradientTrain(PolicyTrain):
    """Policy gradient over sampled answers; their advantages come from rewards alone."""

    def __init__(
        self,
        config: PolicyGradientConfig,
        *,
        prompts: int | None,
        max_new_tokens: int,
        restricted: bool = False,
        skips: bool = False,
        stale: bool = False,
    ) -> None:
        """prompts: as for `gather_samples`. max_new_tokens: limit of an answer.

        restricted: whether sampling excludes tokens.
        skips: whether NaN is the score of an answer that its reward skipped. Otherwise NaN is a mistake, and must
        make the gradient not finite.
        stale: see `PolicyTrain`.
        """
        self.epochs, self.stale = config.epochs, stale
        self.kl = KLController(config.kl)
        self._config, self._prompts, self._max_new_tokens = config, prompts, max_new_tokens
        self._restricted, self._skips = restricted, skips
        self._coef = config.kl.coef

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `advantages`, `kept` and the fields of `correct_sampler`.

        `advantages` has one number per token of `sequences`, 0 on prompts. `kept` is 1 for answers in the loss.
        """
        config = self._config
        self.begin_step()
        self._coef = self.kl.coef
        answers = Responses.find(batch)
        rewards = self._rewards(batch, answers)
        table = self._gather(rewards, batch, dp_sum)
        if config.baseline == "greedy":
            advantages = table - self._gather(batch[f"{GREEDY}score"].values, batch, dp_sum)
        else:
            advantages = subtract_baseline(table, config.baseline)
        if config.scale in ("group_std", "batch_std"):
            advantages = scale_by_std(advantages, table, config.scale)
        if self._skips:
            if self._prompts is not None and table.isnan().all():
                raise UnscoredError
            # An infinite score is a mistake that must reach the loss; the baseline may have turned it into NaN.
            advantages = torch.where(table.isinf(), torch.inf, advantages)
        own = advantages.flatten()[copy_numbers(batch.ids, rewards.device)]
        kept = torch.ones_like(own)
        if self._skips:
            kept = torch.where(own.isnan(), 0.0, kept)
        if config.mask_truncated:
            kept = torch.where(batch["finished"].values != 0, kept, 0.0)
        counted = Responses.find(batch, kept)
        per_token = own[counted.row]
        if config.kl.place == "token_reward":
            per_token = per_token - self._coef * sum_ahead(counted, self._divergence(batch, counted))
        if config.scale == "batch_norm":
            per_token = whiten(per_token, global_moments(per_token, dp_sum))
        metrics = self._summarize(batch, answers, rewards=rewards, table=table, dp_sum=dp_sum)
        metrics.mean("zero_advantages", (per_token == 0).double().sum(), len(per_token))
        batch, correction = self.correct_sampler(config, batch, counted, dp_sum)
        metrics.update(correction)
        rows = counted.spread(per_token.float())
        return batch.with_fields(advantages=rows, kept=Ragged.scalars(kept.float())), metrics

    def _rewards(self, batch: Batch, answers: Responses) -> Tensor:
        """Compute the reward of each answer, minus penalties on the answer as a whole. [N] float64"""
        config = self._config
        rewards = batch["score"].values
        if config.overlong_buffer is not None:
            rewards = rewards + punish_overlong(
                answers.counts,
                most=self._max_new_tokens,
                buffer=config.overlong_buffer,
                penalty=config.overlong_penalty,
            )
        if config.kl.place == "reward" and self._coef > 0:
            rewards = rewards - self._coef * answers.row_sums(self._divergence(batch, answers))
        return rewards

    def _gather(self, values: Tensor, batch: Batch, dp_sum: Sum) -> Tensor:
        """Gather a value of every answer of the step. [N] of this rank -> [prompts, samples] float64"""
        samples = self._config.samples
        return gather_samples(values, batch.ids, prompts=self._prompts, samples=samples, dp_sum=dp_sum)

    def _divergence(self, batch: Batch, answers: Responses) -> Tensor:
        """Estimate the divergence from the reference at each answer token: [A], 0 without a reference."""
        logprobs = batch["logprobs"].values[answers.index]
        if "ref_logprobs" not in batch.fields:
            return torch.zeros_like(logprobs)
        reference = batch["ref_logprobs"].values[answers.index]
        return estimate_kl(self._config.kl.estimator, logprobs=logprobs, ref_logprobs=reference)

    def _summarize(
        self, batch: Batch, answers: Responses, *, rewards: Tensor, table: Tensor, dp_sum: Sum
    ) -> Metrics:
        metrics, count = Metrics(), len(batch)
        given = ~rewards.isnan() | (not self._skips)
        metrics.mean("score", batch["score"].values[given].sum(), given.sum())
        metrics.mean("reward", rewards[given].sum(), given.sum())
        add_answer_means(metrics, batch)
        if self._skips:
            metrics.mean("skipped", (~given).double().sum(), count)
        if self._config.samples > 1:
            present = ~table.isnan() if self._skips else torch.ones_like(table, dtype=torch.bool)
            lowest = torch.where(present, table, torch.inf).amin(1, keepdim=True)
            equal = ((table == lowest) | ~present).all(1)
            metrics.mean("groups_of_equal_rewards", equal.double().sum(), len(equal))
        if "ref_logprobs" in batch.fields:
            kl = sequence_kl(batch, answers, restricted=self._restricted)
            metrics.mean("kl", kl.sum(), count)
            metrics.mean("kl_coef", kl.new_tensor(self._coef), 1.0)
            moments = global_moments(kl, dp_sum)
            self.kl.update(kl=moments.mean, sequences=int(moments.count))
        return metrics

    def weight(self, batch: Batch) -> float:
        """Count the answer tokens with aggregate=token_mean, and the answers otherwise."""
        answers = Responses.find(batch)
        return answers.total if self._config.aggregate == "token_mean" else int((answers.counts > 0).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Sum the policy loss of all tokens, weighted by `aggregate`; with kl.place=loss, add the divergence."""
        assert output.logprobs is not None and output.entropy is not None
        config = self._config
        answers = Responses.find(batch)
        at = answers.index
        new = output.logprobs[at].float()
        low, high = config.clip_range
        result = compute_policy_loss(
            log_ratio=self._log_ratio(new - find_old_logprobs(batch, at), answers),
            advantages=batch["advantages"].values[at],
            clip_low=low,
            clip_high=high,
            dual_clip=config.dual_clip,
        )
        metrics = self.measure_update(result, batch, at, logprobs=new, entropy=output.entropy[at])
        loss = weigh(result.loss, batch, at)
        if config.kl.place == "loss" and self._coef > 0:
            reference = batch["ref_logprobs"].values[at]
            loss = loss + self._coef * estimate_kl(config.kl.estimator, logprobs=new, ref_logprobs=reference)
        return self._aggregate(loss, answers), metrics

    def _log_ratio(self, log_ratio: Tensor, answers: Responses) -> Tensor:
        """Convert log ratios of tokens to the log ratios that are clipped, see `PolicyGradientConfig.ratio`.

        [A] -> [A]
        """
        if self._config.ratio == "token":
            return log_ratio
        per_answer = answers.row_sums(log_ratio)
        if self._config.ratio == "sequence_mean":
            per_answer = per_answer / answers.counts.clamp(min=1)
        return per_answer[answers.row].float()

    def _aggregate(self, loss: Tensor, answers: Responses) -> Tensor:
        """Sum the losses of tokens with the weights of `aggregate`. The engine then divides the sum by `weight`."""
        match self._config.aggregate:
            case "token_mean" | "sequence_sum":
                return loss.sum()
            case "constant":
                return loss.sum() / self._max_new_tokens
            case "sequence_mean":
                return (loss / answers.counts[answers.row]).sum()


class PolicyGradientAlgorithm(StatelessAlgorithm):
    """Any policy gradient without a critic. Its state is the KL coefficient."""

    def __init__(
        self, experiment: PolicyGradientExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
    ) -> None:
        generation, reward = experiment.generation, experiment.reward
        greedy = generation.model_copy(update={"greedy": True})
        self._train = PolicyGradientTrain(
            experiment.policy,
            prompts=count_prompts(experiment),
            max_new_tokens=generation.max_new_tokens,
            restricted=generation.restricted,
            skips=may_skip(reward),
            stale=samples_are_stale(experiment),
        )
        methods = {
            **make_sampling_methods(experiment),
            "actor.generate_greedy": GenerateMethod(greedy, greedy),
            "actor.inference": LogprobsInference("old_logprobs"),
            "actor.train": self._train,
            **make_reward_methods(reward, prefix=GREEDY),
        }
        super().__init__(graph, eval_graph, methods, generation.temperature)

    def state_dict(self) -> dict[str, float]:
        return self._train.kl.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._train.kl.load_state_dict(state)
