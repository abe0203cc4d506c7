"""PPO that takes stale samples for samples of the present policy, which `realrl` refuses. Only for comparison."""

from dataclasses import replace
from typing import Self

from pydantic import model_validator

from realrl.algorithms import ppo


class UncorrectedPPO(ppo.PPOExperiment):
    """PPO without the check that recomputed log-probabilities come with a correction."""

    @model_validator(mode="after")
    def _correction(self) -> Self:
        return self


ALGORITHM = replace(ppo.ALGORITHM, recipe=UncorrectedPPO)
