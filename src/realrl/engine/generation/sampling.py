"""Token sampling with counter-based noise: a function of what is sampled, not of a generator's history."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.recipe.settings import GenerationConfig

_MASK53 = (1 << 53) - 1


@dataclass(frozen=True)
class SamplingSeed:
    """Seed of the sampling noise, besides the sequence and the position."""

    seed: int
    step: int
    first_sequence: int = 0
    """Number of the sequence whose item is 0; the others follow."""
    call: int = 0
    """Number of the generate call among those of its graph, so that two of them draw different answers."""


def _signed(value: int) -> int:
    """Convert the low 64 bits of `value` to a two's complement number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014) to int64 tensors, with wrap-around."""

    def shift_right(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def compute_uniform(seed: int, step: int, sequences: Tensor, positions: Tensor, *, call: int = 0) -> Tensor:
    """Compute uniform numbers in [0, 1), float64, of the shape of `sequences` and `positions` (int64).

    A function of (seed, step, sequence, position, call) alone: the same under every plan, batch split and restart.
    """
    golden = _signed(0x9E3779B97F4A7C15)
    key = _mix(torch.tensor([seed], dtype=torch.int64, device=sequences.device) + golden)
    parts = [torch.full_like(sequences, step), sequences, positions]
    if call:
        parts.append(torch.full_like(sequences, call))
    for part in parts:
        key = _mix((key ^ part) + golden)
    return ((key >> 11) & _MASK53).double() * 2.0**-53


def sample(logits: Tensor, sampling: GenerationConfig, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token per row. logits: [B, V] float32, noise: [B] in [0, 1).

    Returns tokens [B] and their log-probabilities [B] at the temperature, over the whole vocabulary: top-k
    and top-p choose among tokens, but the trainer's log-probabilities do not depend on them.
    """
    logprobs = (logits / sampling.temperature).log_softmax(-1)
    if sampling.greedy:
        tokens = logits.argmax(-1)
    else:
        probabilities = _restrict(logprobs.exp(), sampling)
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        threshold = noise.unsqueeze(-1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        tokens = tokens.clamp_max(logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _restrict(probabilities: Tensor, sampling: GenerationConfig) -> Tensor:
    """Zero the probabilities that top-k and then top-p exclude. probabilities: [B, V]"""
    vocabulary = probabilities.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        lowest = probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.masked_fill(probabilities < lowest, 0.0)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        preceding = ordered.cumsum(-1, dtype=torch.float64) - ordered
        keep = preceding < sampling.top_p * ordered.sum(-1, keepdim=True)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered * keep)
    return probabilities
