"""Advantages of groups of answers: tables [prompts, samples] float64, NaN for answers that have no reward."""

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to deviations that rewards are divided by, as in TRL."""


def subtract_baseline(rewards: Tensor, baseline: Literal["group_mean", "leave_one_out", "none"]) -> Tensor:
    """Subtract from each reward the baseline of its group. rewards: [prompts, samples] -> the same shape

    `group_mean`: the mean (Shao et al. 2024, section 4.1.2); `leave_one_out`: the mean of the others, NaN where
    there are none (Kool et al. 2019; Ahmadian et al. 2024, equation 6). Equal rewards give exactly 0 with both.
    """
    match baseline:
        case "group_mean":
            advantages = rewards - rewards.nanmean(1, keepdim=True)
        case "leave_one_out":
            others = (~rewards.isnan()).sum(1, keepdim=True) - 1
            mean = (rewards.nansum(1, keepdim=True) - rewards.nan_to_num()) / others
            advantages = torch.where(others > 0, rewards - mean, torch.nan)
        case "none":
            return rewards.clone()
    # The mean of three times 0.1 is not 0.1, and an advantage of 1e-17 would count as something to learn.
    median = rewards.nanmedian(1, keepdim=True).values
    equal = ((rewards == median) | rewards.isnan()).all(1, keepdim=True) & median.isfinite()
    return advantages.masked_fill(equal & ~advantages.isnan(), 0.0)


def compute_std(values: Tensor) -> Tensor:
    """Compute standard deviations of the numbers of each row, unbiased. values: [R, C] -> [R, 1]

    0 where a row has fewer than two.
    """
    count = (~values.isnan()).sum(1, keepdim=True)
    squares = (values - values.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def scale_by_std(advantages: Tensor, rewards: Tensor, scale: Literal["group_std", "batch_std"]) -> Tensor:
    """Divide advantages by the deviation of the rewards of their group, or of all. Both [prompts, samples]"""
    std = compute_std(rewards if scale == "group_std" else rewards.reshape(1, -1))
    return advantages / (std + EPSILON)


def punish_overlong(lengths: Tensor, *, most: int, buffer: int, penalty: float) -> Tensor:
    """Compute the soft overlong punishment (Yu et al. 2025, equation 13). lengths: [N] tokens -> [N], at most 0

    0 up to most - buffer tokens, then falling linearly to -penalty at `most`.
    """
    excess = (lengths.double() - (most - buffer)) / buffer
    return -penalty * excess.clamp(0, 1)
