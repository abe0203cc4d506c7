"""Strategies of a call as arrays, for formulas that compute the costs of many strategies at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from realrl.plan.axes import Degrees
from realrl.plan.placement import Dtype, Strategy
from realrl.planner.workload.stages import Stages
from realrl.program.arrays import Bools, Ints
from realrl.program.memory import StoredModel


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """Strategies with the same kinds of operations, which differ only in numbers. Arrays have an entry for each
    strategy."""

    tp: int
    ep: int
    sequence_parallel: bool
    dtype: Dtype | None
    zero: int
    degrees: tuple[Degrees, ...]
    expert_degrees: tuple[Degrees, ...]
    """Degrees of the experts' own layouts."""
    dp: Ints
    cp: Ints
    pp: Ints
    vpp: Ints
    micro_batch_tokens: Ints
    recompute: Bools
    zero_bubble: Bools

    @classmethod
    def of(cls, alike: Sequence[Strategy]) -> Self:
        """Build from strategies that agree in TP and EP degree, data type, sequence parallelism and ZeRO stage."""
        first = alike[0]
        return cls(
            tp=first.tp,
            ep=first.ep,
            sequence_parallel=first.sequence_parallel,
            dtype=first.dtype,
            zero=first.zero,
            degrees=tuple(s.degrees for s in alike),
            expert_degrees=tuple(s.for_experts().degrees for s in alike),
            dp=np.array([s.dp for s in alike]),
            cp=np.array([s.cp for s in alike]),
            pp=np.array([s.pp for s in alike]),
            vpp=np.array([s.vpp for s in alike]),
            micro_batch_tokens=np.array([s.micro_batch_tokens for s in alike]),
            recompute=np.array([s.recompute for s in alike]),
            zero_bubble=np.array([s.zero_bubble for s in alike]),
        )

    @property
    def copies(self) -> Ints:
        """Number of ranks that compute with the same parameters."""
        return self.dp * self.cp

    @property
    def expert_copies(self) -> Ints:
        """Number of ranks that compute with the same experts."""
        return self.copies if self.ep == 1 else self.copies * self.tp // self.ep

    @cached_property
    def stages(self) -> Stages:
        return Stages(self.pp, self.vpp)

    def dtype_of(self, model: StoredModel) -> Dtype:
        """Find the data type of a model's parameters and activations under these strategies."""
        return model.dtype if self.dtype is None else self.dtype


def group_strategies(strategies: Sequence[Strategy]) -> list[tuple[Ints, Strategies]]:
    """Group strategies that `Strategies` can hold together. Returns the indices and the strategies of each
    group."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, s in enumerate(strategies):
        groups.setdefault((s.tp, s.ep, s.sequence_parallel, s.dtype, s.zero), []).append(i)
    return [
        (np.array(members), Strategies.of([strategies[i] for i in members])) for members in groups.values()
    ]
