"""Log-probabilities of tokens without the whole [T, V] matrix of logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.model.ops import product

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""Logits computed at a time: on a CPU what its caches hold, on a GPU 256 MiB of float32."""


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        size = max(1, CHUNK[hidden.device.type] // len(weight))
        chosen = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(chosen) if with_entropy else None
        ctx.size, ctx.temperature = size, temperature
        logp = None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = _logits(hidden[part], weight, temperature)
            logp = torch.log_softmax(logits, 1, out=logits)
            chosen[part] = logp.gather(1, targets[part, None]).squeeze(1)
            if entropy is not None:
                entropy[part] = -(logp.exp() * logp).sum(1)
        # A single chunk is kept; more are computed again, which costs less than the memory.
        ctx.save_for_backward(hidden, weight, targets, logp if len(hidden) <= size else None)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, kept = ctx.saved_tensors
        scaled = grad / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        # Transposed, as `product` is fastest when its narrower operand comes first.
        grad_weight = torch.zeros(weight.shape[::-1], dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), ctx.size):
            part = slice(start, start + ctx.size)
            if kept is None:
                logits = _logits(hidden[part], weight, ctx.temperature)
                chances = torch.softmax(logits, 1, out=logits)
            else:
                chances = kept.exp()
            factor = scaled[part, None]
            grad_logits = chances.mul_(-factor).scatter_add_(1, targets[part, None], factor)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = product(grad_logits, weight.T)
            grad_weight += product(hidden[part].T, grad_logits.T)
        return grad_hidden, grad_weight.T, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = product(hidden, weight).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and optionally the entropy in nats.

    hidden: [N, H], weight: [V, H], targets: [N] int64 -> [N] float32, and [N] float32 without gradient.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, entropy)
