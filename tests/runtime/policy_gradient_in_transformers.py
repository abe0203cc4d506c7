"""GRPO and REINFORCE++ on transformers' models and torch's AdamW, written from the papers and not from our code."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from realrl.algorithms.policy_gradient import PolicyGradientConfig
from tests.runtime.ppo_in_transformers import (
    Sample,
    Update,
    Version,
    compute_logprobs,
    compute_outputs,
    compute_sampled,
    correct_sampler,
    measure_updates,
    measure_weights,
    newest,
    update,
)


class GRPO:
    """Group-relative policy optimisation. Each answer counts with the mean over its tokens."""

    def __init__(
        self, config: PolicyGradientConfig, actor: str, reward: str, *, lr: float = 1e-3, eps: float = 1e-5
    ) -> None:
        self.config = config
        self.actor, self.ref = (AutoModelForCausalLM.from_pretrained(actor).float() for _ in range(2))
        self.reward = AutoModelForSequenceClassification.from_pretrained(reward).float()
        self.actor.model.embed_tokens.padding_idx = None
        self.optimizer = torch.optim.AdamW(
            self.actor.parameters(), lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0
        )
        self.versions = [copy.deepcopy(self.actor)]
        """The actor before the first step, and after each step."""

    def step(self, samples: Sequence[Sample], version: Version = newest) -> dict[str, float]:
        """Learn from one step's samples, and return metrics."""
        config = self.config
        with torch.no_grad():
            sampled = compute_sampled(self.versions, samples, version)
            old = compute_logprobs(self.actor, samples) if config.recompute_logprobs else sampled
            ref = compute_logprobs(self.ref, samples)
            scores = self._score(samples)
        weights = correct_sampler(config, old, sampled)
        advantages = self._find_advantages(scores, sampled, ref)
        size, updates = len(samples) // config.minibatches, []
        for begin in range(0, len(samples), size):
            losses = []
            for i, new in enumerate(compute_logprobs(self.actor, samples[begin : begin + size]), begin):
                ratio = (new - old[i]).exp()
                bounded = ratio.clamp(1 - config.clip, 1 + config.clip)
                surrogate = torch.minimum(ratio * advantages[i], bounded * advantages[i])
                losses.append(self._add_divergence(-weights[i] * surrogate, new, ref[i]))
            updates.append(self._update(losses))
        self.versions.append(copy.deepcopy(self.actor))
        for mean, new in zip(self.ref.parameters(), self.actor.parameters(), strict=True):
            mean.data.lerp_(new.data, config.ref_ema or 0.0)
        found = measure_updates(updates) | measure_weights(config, weights)
        return {f"actor.train/{name}": value for name, value in found.items()}

    def _score(self, samples: Sequence[Sample]) -> Tensor:
        return torch.stack([row[-1] for row in compute_outputs(self.reward, samples)])

    def _find_advantages(
        self, scores: Tensor, sampled: Sequence[Tensor], ref: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Of each answer's tokens, or one number for all of them."""
        groups = scores.view(-1, self.config.samples)
        deviation = groups.std(1, keepdim=True) + 1e-4
        return [*((groups - groups.mean(1, keepdim=True)) / deviation).flatten()]

    def _add_divergence(self, losses: Tensor, new: Tensor, ref: Tensor) -> Tensor:
        return losses + self.config.kl.coef * ((ref - new).exp() - (ref - new) - 1)

    def _update(self, losses: Sequence[Tensor]) -> Update:
        loss = torch.stack([tokens.mean() for tokens in losses]).mean()
        return update(self.actor, self.optimizer, loss, weight=len(losses), grad_clip=1.0)

    def weights(self) -> dict[str, Tensor]:
        return {f"actor {name}": p.detach() for name, p in self.actor.named_parameters()}


class ReinforcePlusPlus(GRPO):
    """The reward of a token is the divergence from the reference; all tokens of a mini-batch count equally."""

    def _find_advantages(
        self, scores: Tensor, sampled: Sequence[Tensor], ref: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        returns = []
        for score, own, other in zip(scores, sampled, ref, strict=True):
            penalties = self.config.kl.coef * (own - other)
            returns.append(torch.stack([score - penalties[i:].sum() for i in range(len(penalties))]))
        everything = torch.cat(returns)
        return [(row - everything.mean()) / (everything.std(correction=0) + 1e-8) for row in returns]

    def _add_divergence(self, losses: Tensor, new: Tensor, ref: Tensor) -> Tensor:
        return losses

    def _update(self, losses: Sequence[Tensor]) -> Update:
        tokens = torch.cat(list(losses))
        return update(self.actor, self.optimizer, tokens.mean(), weight=len(tokens), grad_clip=1.0)
