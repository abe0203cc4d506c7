"""PPO on transformers' models, padded batches and torch's AdamW, written from the papers and not from our code.

The critic's last layer is normalised as PopArt does it (van Hasselt et al. 2016): it predicts in units of the
returns' deviation, and is rescaled, its moments with it, whenever the deviation changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from realrl.algorithms.ppo import PPOConfig


@dataclass(frozen=True)
class Setting:
    """What a run's recipe says, as far as PPO depends on it. The rates are constant."""

    ppo: PPOConfig
    temperature: float
    max_new_tokens: int
    lr: float
    weight_decay: float
    actor_grad_clip: float
    critic_grad_clip: float


@dataclass(frozen=True)
class Sample:
    """A sequence, of which the first `prompt` tokens were given."""

    tokens: list[int]
    prompt: int

    @property
    def answer(self) -> int:
        return len(self.tokens) - self.prompt


class Reference:
    """Four models, and the statistics that outlast a step."""

    def __init__(self, setting: Setting, actor: Path, reward: Path, eos: int) -> None:
        self.setting, self.eos = setting, eos
        self.actor, self.ref = (AutoModelForCausalLM.from_pretrained(actor).float() for _ in range(2))
        self.critic, self.reward = (
            AutoModelForSequenceClassification.from_pretrained(reward).float() for _ in range(2)
        )
        for model in (self.actor, self.critic):
            # A padding token that was sampled is a token like any other; transformers would not train its row.
            model.model.embed_tokens.padding_idx = None
        self.actor_optimizer, self.critic_optimizer = map(self._optimizer, (self.actor, self.critic))
        self.unit, self.coef = 1.0, setting.ppo.kl.coef
        self.count = self.total = self.squares = 0.0

    def _optimizer(self, model: Any) -> torch.optim.AdamW:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        decay, lr = self.setting.weight_decay, self.setting.lr
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)

    def step(self, samples: Sequence[Sample]) -> None:
        """Learn from one step's samples."""
        ppo = self.setting.ppo
        with torch.no_grad():
            old, ref = self._logprobs(self.actor, samples), self._logprobs(self.ref, samples)
            states = [(u * self.unit - ppo.reward_bias) * ppo.reward_scale for u in self._outputs(samples)]
            scores = list(self._scores(samples))
        kls = [a - b for a, b in zip(old, ref, strict=True)]
        estimates = [
            self._gae(sample, score, kl, state)
            for sample, score, kl, state in zip(samples, scores, kls, states, strict=True)
        ]
        advantages, returns = ([e[i] for e in estimates] for i in range(2))
        everything = torch.cat(advantages)
        advantages = [(a - everything.mean()) / (everything.std(correction=0) + 1e-8) for a in advantages]
        self._steer(float(torch.stack([kl.sum() for kl in kls]).mean()), len(samples))
        self._rescale(torch.cat(returns))
        old_outputs = [(state / ppo.reward_scale + ppo.reward_bias) / self.unit for state in states]
        targets = [(r / ppo.reward_scale + ppo.reward_bias) / self.unit for r in returns]
        size = len(samples) // ppo.minibatches
        for _ in range(ppo.epochs):
            for begin in range(0, len(samples), size):
                part = slice(begin, begin + size)
                self._update_actor(samples[part], old[part], advantages[part])
                self._update_critic(samples[part], old_outputs[part], targets[part])

    def _padded(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        longest = max(len(s.tokens) for s in samples)
        ids = torch.tensor([s.tokens + [0] * (longest - len(s.tokens)) for s in samples])
        mask = torch.tensor([[1] * len(s.tokens) + [0] * (longest - len(s.tokens)) for s in samples])
        return ids, mask

    def _logprobs(self, model: Any, samples: Sequence[Sample]) -> list[Tensor]:
        """Of each answer's tokens."""
        ids, mask = self._padded(samples)
        logits = model(ids, attention_mask=mask).logits / self.setting.temperature
        found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [row[s.prompt - 1 : len(s.tokens) - 1] for row, s in zip(found, samples, strict=True)]

    def _outputs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The critic's, from before an answer's first token to behind its last one."""
        ids, mask = self._padded(samples)
        found = self.critic.score(self.critic.model(ids, attention_mask=mask).last_hidden_state)[..., 0]
        return [row[s.prompt - 1 : len(s.tokens)] for row, s in zip(found, samples, strict=True)]

    def _scores(self, samples: Sequence[Sample]) -> Iterator[float]:
        for sample in samples:
            ids = torch.tensor([sample.tokens])
            yield float(self.reward.score(self.reward.model(ids).last_hidden_state)[0, -1])

    def _gae(self, sample: Sample, score: float, kl: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns, by the definition."""
        ppo = self.setting.ppo
        finished = sample.tokens[-1] == self.eos
        reward = (score - ppo.reward_bias) * ppo.reward_scale
        if ppo.reward_clip is not None:
            reward = min(max(reward, -ppo.reward_clip), ppo.reward_clip)
        boot = ppo.truncated == "bootstrap" and not finished
        rewards = -self.coef * kl
        rewards[-1] += 0.0 if boot else reward
        rewards[-1] -= 0.0 if finished else ppo.missing_eos_penalty
        following = torch.cat([states[1:-1], states[-1:] if boot else torch.zeros(1)])
        deltas = rewards + ppo.gamma * following - states[:-1]
        n = sample.answer
        advantages = torch.stack(
            [sum((ppo.gamma * ppo.lam) ** (k - i) * deltas[k] for k in range(i, n)) for i in range(n)]
        )
        return advantages, advantages + states[:-1]

    def _steer(self, kl: float, sequences: int) -> None:
        config = self.setting.ppo.kl
        error = min(max(kl / config.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * sequences / config.horizon

    def _rescale(self, returns: Tensor) -> None:
        """PopArt: new statistics, and the same predictions by a rescaled last layer."""
        ppo = self.setting.ppo
        beta = ppo.value_norm_beta
        keep, add = (1.0, float(len(returns))) if ppo.value_norm == "running" else (beta, 1 - beta)
        self.count = keep * self.count + add
        self.total = keep * self.total + add * float(returns.double().mean())
        self.squares = keep * self.squares + add * float(returns.double().square().mean())
        deviation = max(self.squares / self.count - (self.total / self.count) ** 2, 0.01) ** 0.5
        factor = deviation / ppo.reward_scale / self.unit
        self.unit *= factor
        head = self.critic.score.weight
        head.data /= factor
        state = self.critic_optimizer.state.get(head, {})
        if state:
            state["exp_avg"] *= factor
            state["exp_avg_sq"] *= factor**2

    def _update_actor(
        self, samples: Sequence[Sample], old: Sequence[Tensor], advantages: Sequence[Tensor]
    ) -> None:
        new, before, advantage = map(torch.cat, (self._logprobs(self.actor, samples), old, advantages))
        ratio, clip = (new - before).exp(), self.setting.ppo.clip
        loss = -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.actor.parameters(), self.setting.actor_grad_clip)
        self.actor_optimizer.step()

    def _update_critic(
        self, samples: Sequence[Sample], old: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> None:
        new = torch.cat([u[:-1] for u in self._outputs(samples)])
        before, target = torch.cat([u[:-1] for u in old]), torch.cat(list(targets))
        clip = self.setting.ppo.value_clip
        assert clip is not None
        near = torch.minimum(torch.maximum(new, before - clip), before + clip)
        loss = 0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), self.setting.critic_grad_clip)
        self.critic_optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Of actor and critic, the critic's last layer on the reward model's scale."""
        found = {f"actor {name}": p.detach() for name, p in self.actor.named_parameters()}
        found |= {f"critic {name}": p.detach().clone() for name, p in self.critic.named_parameters()}
        found["critic score.weight"] *= self.unit
        return found
