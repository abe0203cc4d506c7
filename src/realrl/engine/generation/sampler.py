"""Token sampling: logits and noise in, tokens and their log-probabilities out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from realrl.engine.generation.row_buffers import RowChoices
from realrl.model.cpu.choice import choose_tokens_on_cpu
from realrl.model.gpu.library import register_default
from realrl.model.gpu.path import load_kernels, on_gpu
from realrl.model.logprobs import compute_logprobs
from realrl.recipe.generation import GenerationConfig

_BISECTIONS = 30
"""Bisection steps that single out one float from 0 to 1. Read as an integer, its bits are at most 0x3F800000 <
2^30."""


def keep_top_k(probabilities: Tensor, count: int) -> Tensor:
    """Zero all but the `count` largest probabilities of each row. Ties with the smallest of them are kept too.
    [B, V]"""
    if not 0 < count < probabilities.shape[-1]:
        return probabilities
    kept: Tensor = _restrict_to_top_k(probabilities, count)
    return kept


@register_default("restrict_to_top_k(Tensor probabilities, int count) -> Tensor")
def _restrict_to_top_k(probabilities: Tensor, count: int) -> Tensor:
    lowest = probabilities.topk(count, dim=-1).values[:, -1:]
    return probabilities.masked_fill(probabilities < lowest, 0.0)


def keep_top_p(probabilities: Tensor, share: float) -> Tensor:
    """In each row, keep the fewest largest probabilities that sum to at least `share` of the row's sum; zero the
    others. [B, V]

    So a token is kept if the tokens before it, in descending order of probability, sum to less than the share.
    Among equal probabilities, earlier tokens come first.
    """
    if share >= 1:
        return probabilities
    kept: Tensor = _restrict_to_top_p(probabilities, share)
    return kept


@register_default("restrict_to_top_p(Tensor probabilities, float share) -> Tensor")
def _restrict_to_top_p(probabilities: Tensor, share: float) -> Tensor:
    if on_gpu(probabilities):
        kept: Tensor = load_kernels().nucleus.keep_top_p_on_gpu(probabilities.contiguous(), share)
        return kept
    return _keep_share(probabilities, share)


def _keep_share(probabilities: Tensor, share: float | Tensor) -> Tensor:
    """Compute `keep_top_p`; `share` may differ between rows, [B, 1]."""
    # Non-negative floats are ordered like their bits.
    bits = probabilities.view(torch.int32)
    target = share * probabilities.sum(-1, keepdim=True, dtype=torch.float64)
    lowest = torch.zeros_like(bits[:, :1])
    highest = bits.amax(-1, keepdim=True)
    # Find the largest threshold such that all probabilities from it upwards sum to at least the share.
    for _ in range(_BISECTIONS):
        middle = highest - (highest - lowest) // 2
        enough = _sum_where(bits >= middle, probabilities) >= target
        lowest = torch.where(enough, middle, lowest)
        highest = torch.where(enough, highest, middle - 1)
    larger = bits > lowest
    equal = bits == lowest
    before = (equal.cumsum(-1, dtype=torch.int32) - 1).double() * lowest.view(torch.float32)
    kept = larger | (equal & (before + _sum_where(larger, probabilities) < target))
    return probabilities.masked_fill(~kept, 0.0)


def _keep_most_likely(probabilities: Tensor, counts: Tensor) -> Tensor:
    """Compute `keep_top_k` with a count for each row; 0 for all tokens. counts: [B, 1] int64"""
    bits = probabilities.view(torch.int32)
    lowest = torch.zeros_like(bits[:, :1])
    highest = bits.amax(-1, keepdim=True)
    # Find the largest threshold that enough probabilities reach.
    for _ in range(_BISECTIONS):
        middle = highest - (highest - lowest) // 2
        enough = (bits >= middle).sum(-1, keepdim=True) >= counts
        lowest = torch.where(enough, middle, lowest)
        highest = torch.where(enough, highest, middle - 1)
    return probabilities.masked_fill((bits < lowest) & (counts > 0), 0.0)


def _sum_where(chosen: Tensor, values: Tensor) -> Tensor:
    return values.masked_fill(~chosen, 0.0).sum(-1, keepdim=True, dtype=torch.float64)


_BLOCK = 128
"""Number of neighbouring tokens in a block. Probabilities are summed within blocks first; cumulative sums run over
blocks."""


class Sampler:
    """Sampler of the next token of each row."""

    def __init__(
        self,
        sampling: GenerationConfig,
        *,
        temperature: float,
        stop_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """`temperature` divides logits before the recorded log-probabilities are computed, as in training."""
        self._sampling = sampling
        self._temperature = temperature
        self._stop_token_ids = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
        self._forbids = sampling.min_new_tokens > 0 and len(stop_token_ids) > 0

    def sample(self, logits: Tensor, positions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token per row. Each token depends only on the logits and the noise of its row.

        logits: [B, V] float32; positions: [B], index of each token in its continuation; noise: [B] float64 in [0,
        1).

        Returns tokens [B] and their log-probabilities [B] over the whole vocabulary. Top-k, top-p and minimum
        lengths restrict the choice, but not these log-probabilities, because the trainer computes log-probabilities
        without such limits.
        """
        sampling = self._sampling
        logprobs = compute_logprobs(logits, self._temperature)
        if self._forbids:
            logits = self._forbid_ends(logits, positions, sampling.min_new_tokens)
        if sampling.greedy:
            tokens = logits.argmax(-1)
        else:
            as_recorded = not self._forbids and sampling.temperature == self._temperature
            probabilities = (
                logprobs.exp() if as_recorded else _scale(logits, sampling.temperature).softmax(-1)
            )
            # Two statements, so that the unrestricted probabilities are freed before the second restriction.
            probabilities = keep_top_k(probabilities, sampling.top_k)
            probabilities = keep_top_p(probabilities, sampling.top_p)
            tokens = choose_tokens(probabilities, noise)
        return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def sample_by_row(
        self, logits: Tensor, positions: Tensor, noise: Tensor, choices: RowChoices
    ) -> tuple[Tensor, Tensor]:
        """Compute `sample` with choices that differ between rows."""
        logprobs = compute_logprobs(logits, self._temperature)
        if len(self._stop_token_ids):
            logits = self._forbid_ends(logits, positions, choices.first_ends)
        is_greedy = choices.temperatures == 0
        temperatures = choices.temperatures.masked_fill(is_greedy, 1.0)
        probabilities = (logits / temperatures.unsqueeze(-1)).softmax(-1)
        counts, shares = choices.top_k.unsqueeze(-1), choices.top_p.unsqueeze(-1)
        # A look at the values would make the host wait for a GPU.
        if on_gpu(logits) or counts.any():
            probabilities = _keep_most_likely(probabilities, counts)
        if on_gpu(logits) or (shares < 1).any():
            probabilities = torch.where(shares < 1, _keep_share(probabilities, shares), probabilities)
        tokens = torch.where(is_greedy, logits.argmax(-1), choose_tokens(probabilities, noise))
        return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def _forbid_ends(self, logits: Tensor, positions: Tensor, first: int | Tensor) -> Tensor:
        """Set the logits of stop tokens to -inf before position `first` of the continuation."""
        ids = self._stop_token_ids
        too_early = (positions < first).unsqueeze(-1)
        return logits.index_copy(-1, ids, logits.index_select(-1, ids).masked_fill(too_early, -torch.inf))


def _scale(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def choose_tokens(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Choose the first token at which the cumulative sum of probabilities exceeds noise times their total.

    probabilities: [B, V] float32, not normalised; noise: [B] float64 in [0, 1) -> [B] int64
    """
    choose = choose_tokens_on_gpu if on_gpu(probabilities) else choose_tokens_on_cpu
    return choose(probabilities, noise)


def choose_tokens_on_gpu(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Compute `choose_tokens` without waiting for the device.

    Probabilities are summed in float32 within blocks. Only the block sums and the chosen block are summed in
    float64, because torch would otherwise copy all probabilities to float64 first.
    """
    rows, vocabulary = probabilities.shape
    missing = -vocabulary % _BLOCK
    padded = F.pad(probabilities, (0, missing)) if missing else probabilities  # F.pad always copies
    padded = padded.reshape(rows, -1, _BLOCK)
    until = padded.sum(-1).cumsum(-1, dtype=torch.float64)
    threshold = noise.unsqueeze(-1) * until[:, -1:]
    block = torch.searchsorted(until, threshold, right=True).clamp_max_(until.shape[-1] - 1)
    before = F.pad(until, (1, 0)).gather(-1, block)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    inside = inside.cumsum(-1, dtype=torch.float64)
    # Rounding must not select a token after the block's last token with a positive probability.
    rest = torch.minimum(threshold - before, inside[:, -1:] * (1 - 2.0**-52))
    place = torch.searchsorted(inside, rest, right=True)
    return (block * _BLOCK + place).squeeze(-1).clamp_max_(vocabulary - 1)
