"""Algorithms of the family, each by its defaults. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class PreferencePreset:
    """Defaults of an algorithm that differ from those of `PreferenceConfig`."""

    title: str
    """First sentence of its documentation."""
    source: str
    """Paper that it is taken from."""
    defaults: Mapping[str, Any]


PRESETS: Mapping[str, PreferencePreset] = MappingProxyType(
    {
        "dpo": PreferencePreset(
            "DPO: preference pairs without a reward model or samples; IPO, hinge and robust losses",
            "Rafailov et al. 2023, arXiv 2305.18290",
            {},
        ),
        "orpo": PreferencePreset(
            "ORPO: fine-tuning on chosen answers with a penalty on the odds of rejected ones, without a reference",
            "Hong et al. 2024, arXiv 2403.07691",
            {
                "loss": "odds_ratio",
                "length_normalization": True,
                "reference": "none",
                "nll_coef": 1.0,
                "nll_prompts": True,
            },
        ),
        "simpo": PreferencePreset(
            "SimPO: preference pairs by mean log-probabilities and a margin, without a reference",
            "Meng et al. 2024, arXiv 2405.14734",
            {"beta": 2.0, "gamma": 1.0, "length_normalization": True, "reference": "none"},
        ),
    }
)
