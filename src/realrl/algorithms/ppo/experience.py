"""Experience of a step: rewards, advantages and returns from the outputs of inference calls."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.algorithms.method import Sum
from realrl.algorithms.packed import Responses, last_of_rows
from realrl.algorithms.policy.kl import KLController, token_kl
from realrl.algorithms.policy.normalization import Moments, global_moments
from realrl.algorithms.ppo.advantages import gae
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.return_scale import ReturnScale
from realrl.algorithms.rewards.scoring.scores import UnscoredError
from realrl.data.batch import Batch, Ragged


@dataclass(frozen=True, eq=False, kw_only=True)
class Experience:
    """N sequences with A action tokens in all, on the scale of rewards.

    rewards: [N] given at the last action, without the KL penalty. kl: [N] divergence from the reference,
    summed over actions (see `token_kl`). values: [A] of the state before each action. advantages, returns: [A].
    All but kl are float64, and rounded to float32 by `add_to_batch`.
    kl_coef: the weight of the penalty. return_moments: over all ranks. kept: [N] bool, whether a sequence is learnt
    from; one whose reward was skipped has no action tokens, and 0 as its reward.
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
    """Add values of action tokens, [A] each, as rows like `sequences`, and `kept`, 1 where a sequence is kept."""
    rows = {name: experience.actions.spread(value.float()) for name, value in values.items()}
    return batch.with_fields(**rows, kept=Ragged.scalars(experience.kept.float()))


def find_actions(batch: Batch) -> Responses:
    """Find the action tokens of the sequences that are kept."""
    return Responses.of(batch["sequences"], batch["prompt_length"], kept=batch["kept"].values)


def to_reward_scale(values: Tensor, config: PPOConfig) -> Tensor:
    """Convert scores, or the critic's outputs, to the scale of rewards. values: any shape

    (value - bias) * scale
    """
    return (values - config.reward_bias) * config.reward_scale


def scored(finished: Tensor, config: PPOConfig) -> Tensor:
    """Mask the sequences whose score is trained on. finished: [N] -> [N] bool

    Under `truncated: bootstrap` those that ended by themselves, else all.
    """
    return (finished != 0) | (config.truncated == "score")


def shape_rewards(*, score: Tensor, finished: Tensor, config: PPOConfig) -> Tensor:
    """Compute clip((score - bias) * scale) per sequence. score: [N] float64, finished: [N] -> [N] float64

    A sequence cut off without end of sequence loses the penalty for it and, under `truncated: bootstrap`, has no
    score.
    """
    rewards = to_reward_scale(score, config)
    if config.reward_clip is not None:
        rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
    cut_off = finished == 0
    rewards = torch.where(scored(finished, config), rewards, 0.0)
    return torch.where(cut_off, rewards - config.missing_eos_penalty, rewards)


class ExperienceMaker:
    """Converter of each step's batch into experience, with the statistics that outlast a step.

    Every train call owns one: the calls may run on different ranks, in any order, and all of them must see
    the statistics from before the step and end the step with the same new ones.
    """

    def __init__(self, config: PPOConfig, *, restricted: bool = False, skips: bool = False) -> None:
        """`restricted`: whether sampling leaves tokens out. `skips`: whether a score that is NaN is one that its
        reward skipped; otherwise it is a mistake, and the gradient that it makes is not finite."""
        self._config, self._restricted, self._skips = config, restricted, skips
        self._kl = KLController(config.kl)
        self.return_scale = ReturnScale(config.value_norm, beta=config.value_norm_beta)
        self.steps = 0

    def make_experience(self, batch: Batch, dp_sum: Sum) -> Experience:
        """Compute the experience of this rank's items; updates KL coefficient and value statistics.

        Called once per step.
        """
        config, coef = self._config, self._kl.coef
        score, kept = self._keep(batch["score"].values, dp_sum)
        answers = Responses.of(batch["sequences"], batch["prompt_length"])
        actions = Responses.of(batch["sequences"], batch["prompt_length"], kept=kept)
        reference = batch["ref_logprobs" if "ref_logprobs" in batch.fields else "logprobs"]
        differences = batch["logprobs"].values - reference.values
        log_ratio = differences[actions.index]
        finished = batch["finished"].values
        rewards = shape_rewards(score=score, finished=finished, config=config)
        is_last = actions.column == actions.counts[actions.row] - 1
        token_rewards = torch.where(is_last, rewards[actions.row], 0.0) - coef * log_ratio

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
        # Of all answers: how far the actor has gone does not depend on their rewards.
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

    def _keep(self, score: Tensor, dp_sum: Sum) -> tuple[Tensor, Tensor]:
        """Decide which sequences are kept: scores, 0 for others, and [N] bool.

        UnscoredError if no rank keeps any.
        """
        if not self._skips:
            return score, torch.ones_like(score, dtype=torch.bool)
        kept = ~score.isnan()
        if dp_sum(kept.sum().double()[None]).item() == 0:
            raise UnscoredError
        # What a mistake made infinite must reach the loss, and not be clipped to a good reward.
        return torch.where(score.isinf(), torch.nan, torch.where(kept, score, 0.0)), kept

    def state_dict(self) -> dict[str, float]:
        """Save the statistics, and the number of steps they have seen."""
        return {"steps": self.steps, **self._kl.state_dict(), **self.return_scale.state_dict()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load what `state_dict` saved."""
        self.steps = int(state["steps"])
        self._kl.load_state_dict(state)
        self.return_scale.load_state_dict(state)
