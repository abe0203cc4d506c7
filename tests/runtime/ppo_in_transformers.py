"""PPO on transformers' models, padded batches and torch's AdamW, written from the papers and not from our code.

The critic's last layer is normalised as PopArt does it (van Hasselt et al. 2016): it predicts in units of the
returns' deviation, and is rescaled, its moments with it, whenever the deviation changes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from realrl.algorithms.policy import ClippedPolicyConfig
from realrl.algorithms.ppo import PPOConfig
from realrl.testing.ranks import Tokens


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
    eps: float = 1e-8


@dataclass(frozen=True)
class Sample:
    """A sequence, of which the first `prompt` tokens were given."""

    tokens: list[int]
    prompt: int

    @property
    def answer(self) -> int:
        return len(self.tokens) - self.prompt


def read_samples(tokens: Tokens, step: int, count: int) -> list[Sample]:
    """Take the samples that a run trained on in a step from all that it sampled."""
    names = [f"{step}/{i}" for i in range(count)]
    return [Sample(tokens[name][0], int(tokens[f"{name} prompt"][0][0])) for name in names]


def pad(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Token numbers and attention mask."""
    longest = max(len(s.tokens) for s in samples)
    ids = torch.tensor([s.tokens + [0] * (longest - len(s.tokens)) for s in samples])
    mask = torch.tensor([[1] * len(s.tokens) + [0] * (longest - len(s.tokens)) for s in samples])
    return ids, mask


def compute_logprobs(model: Any, samples: Sequence[Sample], temperature: float = 1.0) -> list[Tensor]:
    """Of each answer's tokens."""
    ids, mask = pad(samples)
    logits = model(ids, attention_mask=mask).logits / temperature
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return [row[s.prompt - 1 : len(s.tokens) - 1] for row, s in zip(found, samples, strict=True)]


Version = Callable[[int], int]
"""Finds the number of steps after which the actor drew token j of the answers; -1 for all steps so far."""


def newest(token: int) -> int:
    """Find the version in synchronous training."""
    return -1


def compute_sampled(
    actors: Sequence[Any], samples: Sequence[Sample], version: Version, temperature: float = 1.0
) -> list[Tensor]:
    """Compute the log-probability of each answer token under the actor that drew it.

    actors: the actor before the first step, and after each step
    """
    drawn = [[version(j) for j in range(s.answer)] for s in samples]
    found = {v: compute_logprobs(actors[v], samples, temperature) for v in {v for row in drawn for v in row}}
    return [torch.stack([found[v][i][j] for j, v in enumerate(row)]) for i, row in enumerate(drawn)]


def compute_outputs(model: Any, samples: Sequence[Sample]) -> list[Tensor]:
    """A scalar model's, from before an answer's first token to behind its last one."""
    ids, mask = pad(samples)
    found = model.score(model.model(ids, attention_mask=mask).last_hidden_state)[..., 0]
    return [row[s.prompt - 1 : len(s.tokens)] for row, s in zip(found, samples, strict=True)]


def correct_sampler(
    config: ClippedPolicyConfig, old: Sequence[Tensor], sampled: Sequence[Tensor]
) -> list[Tensor]:
    """Compute the weight of each token's loss.

    old, sampled: log-probabilities of each answer's tokens under the old policy and under the sampler's
    """
    cap, mode = config.sampler_cap, config.sampler_correction
    if mode == "none":
        return [torch.ones_like(row) for row in old]
    ratios = [(a - b).exp() for a, b in zip(old, sampled, strict=True)]
    if mode.startswith("sequence"):
        ratios = [ratio.prod().expand_as(ratio) for ratio in ratios]
    if mode.endswith("truncate"):
        return [ratio.minimum(torch.tensor(cap)) for ratio in ratios]
    return [torch.where((ratio > cap) | (ratio < 1 / cap), 0.0, ratio) for ratio in ratios]


def measure_weights(config: ClippedPolicyConfig, weights: Sequence[Tensor]) -> dict[str, float]:
    """Mean and effective sample size of the weights of a step, if the samples are corrected."""
    if config.sampler_correction == "none":
        return {}
    flat = torch.cat(list(weights)).double()
    size = flat.sum() ** 2 / (len(flat) * flat.square().sum())
    return {"sampler_weight": float(flat.mean()), "effective_sample_size": float(size)}


@dataclass(frozen=True)
class Update:
    """One optimizer step: its loss, a mean of `weight` numbers, and the norm of its gradient before clipping."""

    loss: float
    weight: int
    norm: float


def update(
    model: Any, optimizer: torch.optim.Optimizer, loss: Tensor, *, weight: int, grad_clip: float
) -> Update:
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    return Update(loss.item(), weight, norm.item())


def measure_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Loss and gradient norm of a step, as means over its updates."""
    loss = sum(u.loss * u.weight for u in updates) / sum(u.weight for u in updates)
    return {"loss": loss, "grad_norm": sum(u.norm for u in updates) / len(updates)}


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
        self.versions = [copy.deepcopy(self.actor)]
        """The actor before the first step, and after each step."""

    def _optimizer(self, model: Any) -> torch.optim.AdamW:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        decay, lr = self.setting.weight_decay, self.setting.lr
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=self.setting.eps, weight_decay=decay)

    def step(self, samples: Sequence[Sample], version: Version = newest) -> dict[str, float]:
        """Learn from one step's samples, and return metrics."""
        ppo = self.setting.ppo
        with torch.no_grad():
            sampled = compute_sampled(self.versions, samples, version, self.setting.temperature)
            old = self._logprobs(self.actor, samples) if ppo.recompute_logprobs else sampled
            ref = self._logprobs(self.ref, samples)
            outputs = compute_outputs(self.critic, samples)
            states = [(u * self.unit - ppo.reward_bias) * ppo.reward_scale for u in outputs]
            scores = [float(row[-1]) for row in compute_outputs(self.reward, samples)]
        weights = correct_sampler(ppo, old, sampled)
        kls = [a - b for a, b in zip(sampled, ref, strict=True)]
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
        actor, critic = [], []
        for _ in range(ppo.epochs):
            for begin in range(0, len(samples), size):
                part = slice(begin, begin + size)
                actor.append(self._update_actor(samples[part], old[part], advantages[part], weights[part]))
                critic.append(self._update_critic(samples[part], old_outputs[part], targets[part]))
        self.versions.append(copy.deepcopy(self.actor))
        found = {f"actor.train/{name}": value for name, value in measure_updates(actor).items()}
        found |= {f"critic.train/{name}": value for name, value in measure_updates(critic).items()}
        return found | {f"actor.train/{name}": value for name, value in measure_weights(ppo, weights).items()}

    def _logprobs(self, model: Any, samples: Sequence[Sample]) -> list[Tensor]:
        return compute_logprobs(model, samples, self.setting.temperature)

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
        if not config.adaptive:
            return
        error = min(max(kl / config.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * sequences / config.horizon

    def _rescale(self, returns: Tensor) -> None:
        """PopArt: new statistics, and the same predictions by a rescaled last layer."""
        ppo = self.setting.ppo
        if ppo.value_norm == "none":
            return
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
        self,
        samples: Sequence[Sample],
        old: Sequence[Tensor],
        advantages: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> Update:
        new = torch.cat(self._logprobs(self.actor, samples))
        before, advantage, weight = (torch.cat(list(rows)) for rows in (old, advantages, weights))
        ratio, clip = (new - before).exp(), self.setting.ppo.clip
        surrogate = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
        return update(
            self.actor,
            self.actor_optimizer,
            -(weight * surrogate).mean(),
            weight=len(new),
            grad_clip=self.setting.actor_grad_clip,
        )

    def _update_critic(
        self, samples: Sequence[Sample], old: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> Update:
        new = torch.cat([u[:-1] for u in compute_outputs(self.critic, samples)])
        before, target = torch.cat([u[:-1] for u in old]), torch.cat(list(targets))
        clip = self.setting.ppo.value_clip
        assert clip is not None
        near = torch.minimum(torch.maximum(new, before - clip), before + clip)
        loss = 0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2).mean()
        grad_clip = self.setting.critic_grad_clip
        return update(self.critic, self.critic_optimizer, loss, weight=len(new), grad_clip=grad_clip)

    def weights(self) -> dict[str, Tensor]:
        """Of actor and critic, the critic's last layer on the reward model's scale."""
        found = {f"actor {name}": p.detach() for name, p in self.actor.named_parameters()}
        found |= {f"critic {name}": p.detach().clone() for name, p in self.critic.named_parameters()}
        found["critic score.weight"] *= self.unit
        return found
