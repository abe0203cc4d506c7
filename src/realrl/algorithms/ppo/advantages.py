"""Generalised advantage estimation."""

import torch
from torch import Tensor


def gae(
    *, rewards: Tensor, values: Tensor, terminal: Tensor, counts: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16) of N episodes of up to L actions.

    A_i = sum over k >= 0 of (gamma lam)^k delta_{i+k}, delta_i = rewards_i + gamma V_{i+1} - V_i.

    rewards: [N, L] reward of action i. values: [N, L] V_i, value of the state before action i.
    terminal: [N] value of the state after the last action, 0 where the episode truly ended there.
    counts: [N] actions of each episode; what lies behind them is ignored. Result: [N, L], 0 behind them.
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
