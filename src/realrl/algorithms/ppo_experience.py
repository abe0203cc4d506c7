"""Experience of PPO: rewards, advantages and returns of a step, from the outputs of its inference calls."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from realrl.algorithms.base.method import Sum
from realrl.algorithms.base.rows import Responses, last_of_rows
from realrl.algorithms.base.scoring import UnscoredError
from realrl.algorithms.clipped_policy_loss import Moments, global_moments
from realrl.algorithms.kl import KLController, token_kl
from realrl.algorithms.ppo import PPOConfig
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.environment import TURN_REWARDS


def gae(
    *, rewards: Tensor, values: Tensor, terminal: Tensor, counts: Tensor, gamma: float, lam: float
) -> Tensor:
    """Estimate advantages (Schulman et al. 2016, equation 16) of N episodes with up to L actions.

    The advantage of action i is A_i = sum over k >= 0 of (gamma lam)^k delta_{i+k}, with
    delta_i = rewards_i + gamma V_{i+1} - V_i.

    rewards: [N, L] reward of action i. values: [N, L] V_i, value of the state before action i.
    terminal: [N] value of the state after the last action, 0 if the episode truly ended there.
    counts: [N] actions of each episode; later columns are ignored. Result: [N, L], 0 after the last action.
    """
    advantages = torch.zeros_like(rewards)
    ahead, next_value = torch.zeros_like(terminal), terminal
    for i in reversed(range(rewards.shape[1])):
        alive = i < counts
        delta = rewards[:, i] + gamma * next_value - values[:, i]
        ahead = torch.where(alive, delta + gamma * lam * ahead, 0.0)
        next_value = torch.where(alive, values[:, i], terminal)
        advantages[:, i] = ahead
    return advantages


# Minimum variance of returns (Yu et al. 2022, MAPPO). It scales errors up tenfold at most.
MIN_VARIANCE = 1e-2


class ReturnScale:
    """Standard deviation of the returns of a run: the unit of the critic's errors.

    Steps are weighted by their number of returns (`running`), or by (1 - beta) beta^age with the usual correction
    for the start (`exponential`; Kingma and Ba 2015, section 3). The deviation is 1 before the first update. With
    `none`, it is always 1.

    The critic's output is never scaled, so its predictions stay the same when the statistics move. PopArt (van
    Hasselt et al. 2016) achieves this by rewriting the last layer.
    """

    def __init__(self, mode: Literal["none", "running", "exponential"], *, beta: float) -> None:
        self._mode = mode
        self._beta = beta
        self._weight = self._total = self._squares = 0.0

    def update(self, returns: Moments) -> None:
        if self._mode == "none" or not returns.count:
            return
        keep, add = (1.0, returns.count) if self._mode == "running" else (self._beta, 1 - self._beta)
        self._weight = keep * self._weight + add
        self._total = keep * self._total + add * returns.mean
        self._squares = keep * self._squares + add * (returns.mean**2 + returns.variance)

    @property
    def std(self) -> float:
        """Standard deviation, at least the root of MIN_VARIANCE."""
        if not self._weight:
            return 1.0
        mean = self._total / self._weight
        variance: float = max(self._squares / self._weight - mean**2, MIN_VARIANCE)
        return variance**0.5

    def state_dict(self) -> dict[str, float]:
        return {"value_weight": self._weight, "value_total": self._total, "value_squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the sums. With `none`, do nothing."""
        if self._mode != "none":
            self._weight = state["value_weight"]
            self._total = state["value_total"]
            self._squares = state["value_squares"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Experience:
    """Training data from N sequences with A action tokens in total, on the scale of rewards.

    actions: the action tokens. rewards: [N] given at the last action, without the KL penalty. kl: [N] divergence
    from the reference, summed over the tokens of each answer (see `token_kl`). values: [A] of the state before each
    action. advantages, returns: [A]. These tensors are float64; `add_to_batch` rounds to float32. kl_coef: weight
    of the penalty. return_moments: moments of the returns on all ranks. kept: [N] bool, whether training uses a
    sequence. A sequence whose reward was skipped has no action tokens, and the reward 0.
    """

    actions: Responses
    rewards: Tensor
    kl: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    kl_coef: float
    return_moments: Moments
    kept: Tensor


def add_to_batch(batch: Batch, experience: Experience, **values: Tensor) -> Batch:
    """Add rows with one number per token: `values` ([A] each) on the actions, 0 elsewhere. Add the mask `kept`."""
    rows = {name: experience.actions.spread(value.float()) for name, value in values.items()}
    return batch.with_fields(**rows, kept=Ragged.scalars(experience.kept.float()))


def to_reward_scale(values: Tensor, config: PPOConfig) -> Tensor:
    """Convert scores, or the critic's outputs, to the scale of rewards. Any shape"""
    return (values - config.reward_bias) * config.reward_scale


def scored(finished: Tensor, config: PPOConfig) -> Tensor:
    """Mark the sequences whose score counts. With `truncated: bootstrap`, only scores of finished sequences count.

    finished: [N] -> [N] bool
    """
    return (finished != 0) | (config.truncated == "score")


def shape_rewards(*, score: Tensor, finished: Tensor, config: PPOConfig) -> Tensor:
    """Compute the reward of each sequence: clip((score - bias) * scale), or 0 if its score does not count.

    Sequences without end of sequence then lose `missing_eos_penalty`.

    score: [N] float64, finished: [N] -> [N] float64
    """
    rewards = to_reward_scale(score, config)
    if config.reward_clip is not None:
        rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
    rewards = torch.where(scored(finished, config), rewards, 0.0)
    return torch.where(finished == 0, rewards - config.missing_eos_penalty, rewards)


class ExperienceMaker:
    """Turns the batch of each step into experience, with statistics that outlast the step.

    Each train call owns one maker. The calls may run on different ranks, in any order. So all makers use the
    statistics from before the step, and compute the same new statistics.
    """

    def __init__(
        self, config: PPOConfig, *, restricted: bool = False, skips: bool = False, turn_weight: float = 0.0
    ) -> None:
        """restricted: whether sampling excludes tokens. turn_weight: weight of the environment's reward in a score.

        skips: whether NaN is the score of an answer that its reward skipped. Otherwise NaN is a mistake, and must
        make the gradient not finite.
        """
        self._config, self._restricted, self._skips = config, restricted, skips
        self._turn_scale = turn_weight * config.reward_scale
        self._kl = KLController(config.kl)
        self.return_scale = ReturnScale(config.value_norm, beta=config.value_norm_beta)
        self.steps = 0

    def make_experience(self, batch: Batch, dp_sum: Sum) -> Experience:
        """Compute the experience of this rank's items, and update the statistics. Called once per step."""
        config, coef = self._config, self._kl.coef
        score, kept = self._keep(batch["score"].values, dp_sum)
        answers = Responses.find(batch)
        actions = Responses.find(batch, kept)
        reference = batch["ref_logprobs" if "ref_logprobs" in batch.fields else "logprobs"]
        # The sampler's log-probabilities, even if others were recomputed: the mean of log p - log p_ref is a
        # divergence only if p drew the tokens.
        differences = batch["logprobs"].values - reference.values
        finished = batch["finished"].values
        rewards = shape_rewards(score=score, finished=finished, config=config)
        token_rewards = self._place_rewards(batch, actions, rewards) - coef * differences[actions.index]

        state_values = batch["values"].values
        values = state_values[actions.index - 1].double()
        terminal = torch.zeros_like(finished)
        if config.truncated == "bootstrap":
            terminal = torch.where(finished == 0, last_of_rows(state_values, actions.lengths), 0.0)
        advantages = actions.unpad(
            gae(
                rewards=actions.pad(token_rewards),
                values=actions.pad(values),
                terminal=terminal,
                counts=actions.counts,
                gamma=config.gamma,
                lam=config.lam,
            )
        )
        returns = advantages + values
        # The mean includes answers that are not kept, because the actor's divergence does not depend on rewards.
        kl = answers.row_sums(token_kl(differences[answers.index], restricted=self._restricted))
        kl_moments, return_moments = global_moments(kl, dp_sum), global_moments(returns, dp_sum)
        self._kl.update(kl=kl_moments.mean, sequences=int(kl_moments.count))
        self.return_scale.update(return_moments)
        self.steps += 1
        return Experience(
            actions=actions,
            rewards=rewards,
            kl=kl,
            values=values,
            advantages=advantages,
            returns=returns,
            kl_coef=coef,
            return_moments=return_moments,
            kept=kept,
        )

    def _place_rewards(self, batch: Batch, actions: Responses, rewards: Tensor) -> Tensor:
        """Place the reward of each sequence at its actions. rewards: [N] -> [A] float64

        An environment may reward turns. These rewards are placed at the ends of the turns, and what is left of the
        sequence's reward at the last action. If the score of a sequence does not count, nothing is left.
        """
        at_turns = torch.zeros_like(rewards[actions.row])
        if self._turn_scale and TURN_REWARDS in batch.fields:
            at_turns = self._turn_scale * batch[TURN_REWARDS].values[actions.index].double()
        counts = scored(batch["finished"].values, self._config)
        left = rewards - torch.where(counts, actions.row_sums(at_turns), 0.0)
        is_last = actions.column == actions.counts[actions.row] - 1
        return at_turns + torch.where(is_last, left[actions.row], 0.0)

    def _keep(self, score: Tensor, dp_sum: Sum) -> tuple[Tensor, Tensor]:
        """Return the scores, with 0 for skipped sequences, and whether each sequence is kept ([N] bool).

        Raises UnscoredError if no rank keeps a sequence.
        """
        if not self._skips:
            return score, torch.ones_like(score, dtype=torch.bool)
        kept = ~score.isnan()
        if dp_sum(kept.sum().double()[None]).item() == 0:
            raise UnscoredError
        # An infinite score is a mistake that must reach the loss, instead of being clipped to a good reward.
        return torch.where(score.isinf(), torch.nan, torch.where(kept, score, 0.0)), kept

    def state_dict(self) -> dict[str, float]:
        return {"steps": self.steps, **self._kl.state_dict(), **self.return_scale.state_dict()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.steps = int(state["steps"])
        self._kl.load_state_dict(state)
        self.return_scale.load_state_dict(state)
