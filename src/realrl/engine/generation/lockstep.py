"""Ranks that take the turns of a generate call together, because they divide experts among themselves.

In each layer of a mixture, such a rank waits for the tokens of the others. So all of them run the same prefill
passes and decode steps, with the same number of rows. A rank with nothing to do runs them on rows that do not
count.
"""

from dataclasses import dataclass

import torch

from realrl.engine.model import Model
from realrl.model.group import Group


@dataclass(frozen=True)
class Pace:
    """What every rank does in a turn."""

    goes_on: bool
    """Whether a rank has rows that are not complete."""
    prefills: bool
    """Whether a rank has sequences to prefill."""
    steps: int
    """Number of decode steps: one if a rank has more sequences to prefill."""
    width: int
    """Number of rows of a decode step."""


class Lockstep:
    """Agreement of ranks on their turns. A rank alone agrees with itself."""

    def __init__(self, model: Model) -> None:
        self._device = model.device
        strategy, groups = model.layout.placement.strategy, model.groups
        self._group: Group | None = None
        if model.decodes_together:
            whole_replicas = strategy.ep % (strategy.cp * strategy.tp) == 0
            self._group = groups.experts if whole_replicas else groups.mesh

    @property
    def joint(self) -> bool:
        """Whether there are other ranks."""
        return self._group is not None

    def agree(self, own: Pace) -> Pace:
        """Return the pace that is enough for all ranks."""
        if self._group is None:
            return own
        numbers = [own.goes_on, own.prefills, own.steps == 1, own.steps, own.width]
        found = self._group.max(torch.tensor([*map(int, numbers)], device=self._device)).tolist()
        goes_on, prefills, hurries, steps, width = found
        return Pace(bool(goes_on), bool(prefills), 1 if hurries else steps, width)

    def agree_on_rows(self, most: int) -> int:
        """Return the largest number of rows that a rank has room for."""
        return self.agree(Pace(False, False, 0, most)).width
