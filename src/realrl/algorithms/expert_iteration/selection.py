"""Choice of the answers that are learnt: tables [prompts, samples] of scores, NaN for answers that have none."""

import torch
from torch import Tensor


def select_answers(scores: Tensor, *, keep: int | None, threshold: float | None) -> Tensor:
    """Select the answers to learn. scores: [prompts, samples] -> the same shape, bool

    Those with the `keep` highest scores of their prompt, of equal ones the first (Dong et al. 2023, with keep=1),
    among those with at least `threshold` (Singh et al. 2023); None for no such bound. An answer whose score is not
    finite is never selected.
    """
    chosen = scores.isfinite()
    if threshold is not None:
        chosen &= scores >= threshold
    if keep is not None:
        ranked = torch.where(chosen, scores, -torch.inf).argsort(dim=1, descending=True, stable=True)
        best = torch.zeros_like(chosen)
        chosen &= best.scatter(1, ranked[:, :keep], True)
    return chosen
