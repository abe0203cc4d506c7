"""Algorithms of the family, each by its defaults. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from realrl.algorithms.policy_gradient.config import PolicyKLConfig


@dataclass(frozen=True)
class PolicyPreset:
    """Defaults of an algorithm that differ from those of `PolicyGradientConfig`."""

    title: str
    """First sentence of its documentation."""
    source: str
    """Paper that it is taken from."""
    defaults: Mapping[str, Any]


PRESETS: Mapping[str, PolicyPreset] = MappingProxyType(
    {
        "grpo": PolicyPreset(
            "GRPO: rewards relative to those of a group of answers to the same prompt",
            "Shao et al. 2024, arXiv 2402.03300",
            {"kl": PolicyKLConfig(coef=0.04)},
        ),
        "dr_grpo": PolicyPreset(
            "Dr. GRPO: GRPO without its biases towards long wrong answers and towards prompts of little variance",
            "Liu et al. 2025, arXiv 2503.20783",
            {"scale": "none", "aggregate": "constant"},
        ),
        "dapo": PolicyPreset(
            "DAPO: GRPO with dynamic sampling, a higher upper clip bound, token-level loss, and no reference",
            "Yu et al. 2025, arXiv 2503.14476",
            {"sampling_rounds": 4, "aggregate": "token_mean", "clip_high": 0.28},
        ),
        "gspo": PolicyPreset(
            "GSPO: GRPO with one importance ratio per answer",
            "Zheng et al. 2025, arXiv 2507.18071",
            {"ratio": "sequence_mean", "clip": 3e-4, "clip_high": 4e-4},
        ),
        "rloo": PolicyPreset(
            "RLOO: REINFORCE with the mean reward of the other answers to the prompt as baseline",
            "Ahmadian et al. 2024, arXiv 2402.14740",
            {
                "samples": 4,
                "baseline": "leave_one_out",
                "scale": "none",
                "ratio": "sequence",
                "kl": PolicyKLConfig(coef=0.05, place="reward", estimator="k1"),
            },
        ),
        "reinforce_pp": PolicyPreset(
            "REINFORCE++: one answer per prompt, advantages normalised over the batch",
            "Hu 2025, arXiv 2501.03262",
            {
                "samples": 1,
                "baseline": "none",
                "scale": "batch_norm",
                "aggregate": "token_mean",
                "kl": PolicyKLConfig(coef=0.01, place="token_reward", estimator="k1"),
            },
        ),
        "reinforce_pp_baseline": PolicyPreset(
            "REINFORCE++ with the mean reward of the group as baseline",
            "Hu 2025, arXiv 2501.03262",
            {
                "scale": "batch_norm",
                "aggregate": "token_mean",
                "kl": PolicyKLConfig(coef=0.01, place="loss", estimator="k2"),
            },
        ),
        "remax": PolicyPreset(
            "ReMax: REINFORCE with the reward of the greedy answer as baseline",
            "Li et al. 2023, arXiv 2310.10505",
            {
                "samples": 1,
                "baseline": "greedy",
                "scale": "none",
                "aggregate": "sequence_sum",
                "kl": PolicyKLConfig(coef=0.01, place="token_reward", estimator="k1"),
            },
        ),
    }
)
