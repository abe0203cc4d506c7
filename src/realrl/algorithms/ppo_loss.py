"""PPO: methods of the actor and the critic, and the algorithm as a whole."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from realrl.algorithms.base.method import (
    Metrics,
    ModelOutput,
    PlainInference,
    PlainTrain,
    StatelessAlgorithm,
    Sum,
)
from realrl.algorithms.base.rows import Responses, add_answer_means
from realrl.algorithms.clipped_policy_loss import (
    LogprobsInference,
    OnSequences,
    PolicyTrain,
    global_moments,
    make_sampling_methods,
    whiten,
)
from realrl.algorithms.policy import samples_are_stale
from realrl.algorithms.ppo import PPOConfig, PPOExperiment
from realrl.algorithms.ppo_experience import (
    Experience,
    ExperienceMaker,
    add_to_batch,
    scored,
    to_reward_scale,
)
from realrl.algorithms.rewards.config import find_environment_weight, may_skip
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


class ActorTrain(PolicyTrain):
    """Clipped policy gradient over action tokens. All of them count equally, but for `sampler_correction`."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        restricted: bool = False,
        skips: bool = False,
        turn_weight: float = 0.0,
        stale: bool = False,
    ) -> None:
        """`restricted`, `skips` and `turn_weight`: see `ExperienceMaker`. `stale`: see `PolicyTrain`."""
        self._config, self._skips, self.stale = config, skips, stale
        self.epochs = config.epochs
        self.experience_maker = ExperienceMaker(
            config, restricted=restricted, skips=skips, turn_weight=turn_weight
        )
        self._stopped = False

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `advantages`: one number per token of `sequences`, 0 on prompts. Add the fields of `correct_sampler`.

        With `advantage_norm`, advantages are normalised over all ranks.
        """
        self.begin_step()
        self._stopped = False
        experience = self.experience_maker.make_experience(batch, dp_sum)
        advantages = experience.advantages
        moments = global_moments(advantages, dp_sum)
        if self._config.advantage_norm:
            advantages = whiten(advantages, moments)
        metrics = self._summarize(batch, experience)
        number = experience.kl.new_tensor
        metrics.mean("advantage_mean", number(moments.mean), 1.0)
        metrics.mean("advantage_std", number(moments.std), 1.0)
        if "ref_logprobs" in batch.fields:
            metrics.mean("kl_coef", number(experience.kl_coef), 1.0)
        batch, correction = self.correct_sampler(self._config, batch, experience.actions, dp_sum)
        metrics.update(correction)
        return add_to_batch(batch, experience, advantages=advantages), metrics

    def _summarize(self, batch: Batch, experience: Experience) -> Metrics:
        """Compute metrics as means over sequences. `score` is a mean over sequences whose score counts."""
        metrics, count = Metrics(), len(batch)
        kept = experience.kept
        trained_on = scored(batch["finished"].values, self._config) & kept
        metrics.mean("score", batch["score"].values[trained_on].sum(), trained_on.sum())
        metrics.mean("reward", experience.rewards.double()[kept].sum(), kept.sum())
        if "ref_logprobs" in batch.fields:
            metrics.mean("kl", experience.kl.sum(), count)
        if self._skips:
            metrics.mean("skipped", (~kept).double().sum(), count)
        add_answer_means(metrics, batch)
        return metrics

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        return self.sum_clipped_loss(batch, output, Responses.find(batch).index, self._config.clip)

    def stop(self, metrics: dict[str, float]) -> bool:
        """Stop if the mean probability ratio of the mini-batch exceeds `early_stop_ratio`.

        A ratio that is not finite does not stop training, because the optimizer skips and counts such a step.
        """
        super().stop(metrics)
        limit = self._config.early_stop_ratio
        self._stopped = limit is not None and metrics["importance_ratio"] > limit
        return self._stopped

    def finish(self) -> Metrics:
        """Report `early_stopped`: 1 if mini-batches of the step were skipped, else 0."""
        metrics = Metrics()
        metrics.mean("early_stopped", torch.tensor(float(self._stopped)), 1.0)
        return metrics


class CriticInference(OnSequences, PlainInference):
    """The critic's value of the state after each token. The call `critic.train` reports metrics of values."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `values`, one number per token on the scale of rewards."""
        assert output.values is not None
        return {"values": Ragged(to_reward_scale(output.values.float(), self._config), output.lengths)}


class ValueLoss(NamedTuple):
    """Value loss per token. loss: [A]; clipped: [A] bool, whether clipping took effect."""

    loss: Tensor
    clipped: Tensor


def value_loss(*, values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Compute the clipped squared error of values (as in OpenAI baselines' ppo2).

    The loss of a value v with return R is 0.5 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2). If `clip` is
    None, the loss is 0.5 (v - R)^2.

    values, old_values, returns: [A]; the gradient flows through `values` only.
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach())


class CriticTrain(OnSequences, PlainTrain):
    """Train method of the critic: clipped squared error between the value before each action and its return.

    Errors are divided by the standard deviation of the returns (see `ReturnScale`).
    """

    def __init__(
        self, config: PPOConfig, *, restricted: bool = False, skips: bool = False, turn_weight: float = 0.0
    ) -> None:
        """`restricted`, `skips` and `turn_weight`: see `ExperienceMaker`."""
        self._config = config
        self.epochs = config.epochs
        self.experience_maker = ExperienceMaker(
            config, restricted=restricted, skips=skips, turn_weight=turn_weight
        )

    @property
    def head_scale(self) -> float:
        """Standard deviation of the returns, on the scale of the critic's output.

        Adam's steps do not depend on the scale of gradients. Dividing errors by the deviation, and multiplying the
        head's learning rate by it, therefore trains like PopArt (van Hasselt et al. 2016). No weight needs to be
        rewritten when the deviation changes.
        """
        if self._config.value_norm == "none":
            return 1.0
        return self.experience_maker.return_scale.std / self._config.reward_scale

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `returns`: one number per token of `sequences`, 0 on prompts, on the scale of rewards.

        The return at position t is the target of the value at position t - 1.
        """
        experience = self.experience_maker.make_experience(batch, dp_sum)
        returns = experience.return_moments
        unexplained = global_moments(experience.returns - experience.values, dp_sum).variance
        explained = 1 - unexplained / returns.variance if returns.variance else math.nan
        metrics, number = Metrics(), experience.kl.new_tensor
        metrics.mean("return_mean", number(returns.mean), 1.0)
        metrics.mean("explained_variance", number(explained), 1.0)
        return add_to_batch(batch, experience, returns=experience.returns), metrics

    def weight(self, batch: Batch) -> float:
        return Responses.find(batch).total

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        assert output.values is not None
        actions = Responses.find(batch)
        at, unit = actions.index, self.experience_maker.return_scale.std
        result = value_loss(
            values=to_reward_scale(output.values[at - 1].float(), self._config) / unit,
            old_values=batch["values"].values[at - 1] / unit,
            returns=batch["returns"].values[at] / unit,
            clip=self._config.value_clip,
        )
        loss, metrics = result.loss.sum(), Metrics()
        metrics.mean("value_loss", loss, actions.total)
        metrics.mean("value_clip_fraction", result.clipped.double().sum(), actions.total)
        return loss, metrics


FEW_FINISHED = 0.5
"""Share of finished answers below which a note says that most answers are cut off."""


class PPOAlgorithm(StatelessAlgorithm):
    """Proximal policy optimisation (Schulman et al. 2017) from a reward model (Ouyang et al. 2022) or function."""

    def __init__(
        self, experiment: PPOExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
    ) -> None:
        config, generation = experiment.ppo, experiment.generation
        self._config, self._generation = config, generation
        restricted, skips = generation.restricted, may_skip(experiment.reward)
        turn_weight = find_environment_weight(experiment.reward)
        actor = ActorTrain(
            config,
            restricted=restricted,
            skips=skips,
            turn_weight=turn_weight,
            stale=samples_are_stale(experiment),
        )
        critic = CriticTrain(config, restricted=restricted, skips=skips, turn_weight=turn_weight)
        methods = make_sampling_methods(experiment, finished_only=config.truncated == "bootstrap")
        methods |= {
            "actor.inference": LogprobsInference("old_logprobs"),
            "critic.inference": CriticInference(config),
            "actor.train": actor,
            "critic.train": critic,
        }
        super().__init__(graph, eval_graph, methods, generation.temperature)
        self._experience_makers = (actor.experience_maker, critic.experience_maker)

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        finished = metrics.get("actor.train/finished", 1.0)
        if self._config.truncated != "bootstrap" or not finished < FEW_FINISHED:
            return []
        return [
            f"most answers are cut off at generation.max_new_tokens={self._generation.max_new_tokens}, and under"
            " ppo.truncated=bootstrap their scores are not trained on; raise max_new_tokens, or set"
            " ppo.truncated=score"
        ]

    def state_dict(self) -> dict[str, float]:
        """Return the KL coefficient, the statistics of returns, and the number of steps so far.

        Only ranks that run a train call know these numbers. After a step, all these ranks have the same numbers.
        """
        return max(self._experience_makers, key=lambda maker: maker.steps).state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        for maker in self._experience_makers:
            maker.load_state_dict(state)
