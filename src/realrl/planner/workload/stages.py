"""Pipeline stages of many strategies as arrays, and the schedule that interleaved stages follow."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from realrl.layout.ranges import virtual_stage_layers
from realrl.program.arrays import Floats, Ints, Real


@dataclass(frozen=True)
class Stages:
    """Pipeline stages and their turns (virtual stages), with an entry for each strategy.

    Each micro-batch passes all stages `vpp` times. In the turn k, a stage computes its run k of layers
    (`virtual_stage_layers`).
    """

    pp: Ints
    vpp: Ints

    def tabulate(self, of: Callable[[int, int], Sequence[int]]) -> Ints:
        """Tabulate a number for each pipeline stage, [stages, strategies]. Entries past the last stage are 0.

        `of(pp, vpp)` returns the numbers of all stages of a pipeline.
        """
        different, where = self._different
        table = np.zeros((len(different), int(self.pp.max())), dtype=np.int64)
        for row, (pp, vpp) in zip(table, different, strict=True):
            row[:pp] = of(pp, vpp)
        return table[where].T

    def count_layers(self, layers: int) -> Ints:
        """Count the layers of a model on each stage, [stages, strategies]."""
        return self.tabulate(
            lambda pp, vpp: [sum(map(len, runs)) for runs in virtual_stage_layers(layers, pp, vpp)]
        )

    @cached_property
    def _different(self) -> tuple[list[tuple[int, int]], Ints]:
        """List the different pipelines, and find the number of each strategy's pipeline."""
        _, first, where = np.unique(self.pp << 32 | self.vpp, return_index=True, return_inverse=True)
        return [*zip(self.pp[first].tolist(), self.vpp[first].tolist(), strict=True)], where

    @cached_property
    def interleaved(self) -> bool:
        """Whether any of the pipelines has several turns."""
        return bool((self.vpp > 1).any())

    def bubble(self, micro_batches: Ints, seconds: Floats) -> Floats:
        """Compute the seconds in which the slowest stage of each strategy is idle, if messages take no time.

        `seconds`: time of a micro-batch on each stage, in all turns, [stages, strategies]. It may be the time of
        its forward pass, or of its forward and backward pass. The first micro-batch reaches the last stage, and
        the last one leaves it, in the turns of one run of layers each. If the micro-batches are fewer than the
        stages, the slowest stage also waits for the first one of them to come round in every other turn.
        """
        whole, slowest = seconds.sum(axis=0), seconds.max(axis=0)
        turned = (self.vpp - 1) / self.vpp * np.maximum(0.0, whole - micro_batches * slowest)
        return np.asarray((whole - slowest) / self.vpp + turned)

    def zero_bubble(self, micro_batches: Ints, seconds: Floats, weights: Floats) -> Floats:
        """Compute what `bubble` computes, if stages leave the gradients of weights for the time in which they would
        wait. `weights`: time of a micro-batch for these gradients on each stage, which is a part of `seconds`.

        A stage waits for two ways of a micro-batch through the other stages, and these gradients fill a part of the
        second one (arXiv 2401.10241, table 1). If the micro-batches are fewer than the stages, the first stage
        waits until the first of them returns, and then goes on at the pace of the others.
        """
        slowest = seconds.argmax(axis=0), np.arange(seconds.shape[1])
        others, rest = seconds - 2 * weights, seconds - weights
        filled = (others.sum(axis=0) - others[slowest]) / self.vpp
        last = ((micro_batches - 1) * rest[slowest] + weights[slowest]) / self.vpp
        few = rest.sum(axis=0) + last - micro_batches * seconds[slowest]
        return np.asarray(np.maximum(0.0, np.maximum(filled, few)))

    def delay(self, micro_batches: Ints, seconds: Floats, hop: Real) -> Floats:
        """Compute the seconds that messages of `hop` seconds add to forward passes.

        A stage computes its next micro-batches while it sends. So only the first micro-batch of each group delays
        others: it must come round before the next turn begins, and the other micro-batches of the group fill a part
        of this time.
        """
        first = (self.pp - 1) * np.asarray(hop)
        if not self.interleaved:
            return first
        groups = np.maximum(1, micro_batches // self.pp)
        whole, slowest = seconds.sum(axis=0), seconds.max(axis=0)
        least, larger = micro_batches // groups, micro_batches % groups
        waits: Real = 0.0
        for size, number in ((least, groups - larger), (least + 1, larger)):
            idle = (whole - size * slowest) / self.vpp
            waits = waits + number * (np.maximum(0.0, idle + self.pp * hop) - np.maximum(0.0, idle))
        return np.asarray(first + (self.vpp - 1) * waits)

    def count_waits(self, micro_batches: Ints) -> Ints:
        """Count the messages that a stage waits for in a training step, if it posts each receive when it needs the
        message. Then nothing hides a transfer.

        A stage waits for two messages per pass, and for those of the first and the last micro-batch between all
        other stages. If the micro-batches are fewer than the stages, a turn still takes as many messages as there
        are stages.
        """
        turns = (self.vpp - 1) * np.maximum(micro_batches, self.pp)
        return 2 * (micro_batches + turns + self.pp - 1)

    def count_flying(self, micro_batches: Ints) -> Ints:
        """Count the passes of one turn whose activations each stage keeps at a time, at most, [stages, strategies].
        The count is 0 or less past a strategy's last stage."""
        flying = np.minimum(micro_batches, self.pp - np.arange(int(self.pp.max()))[:, None])
        return self._count_interleaved(flying, micro_batches, lambda pp, vpp: ((1,) * vpp,) * pp)

    def count_flying_layers(self, micro_batches: Ints, layers: tuple[int, ...], of_model: int) -> Ints:
        """Count the layers of all passes whose activations each stage keeps at a time, at most, [stages,
        strategies]. Only the given layers of the model, in ascending order, count."""

        def list_sizes(pp: int, vpp: int) -> _Sizes:
            runs = virtual_stage_layers(of_model, pp, vpp)
            return tuple(tuple(count_within(layers, run) for run in own) for own in runs)

        own = self.tabulate(lambda pp, vpp: [*map(sum, list_sizes(pp, vpp))])
        whole = np.minimum(micro_batches, self.pp - np.arange(len(own))[:, None])
        return self._count_interleaved(whole * own, micro_batches, list_sizes)

    def _count_interleaved(
        self, counts: Ints, micro_batches: Ints, list_sizes: "Callable[[int, int], _Sizes]"
    ) -> Ints:
        """Replace the counts of interleaved pipelines by the most that they keep. `list_sizes` returns what a pass
        of each turn keeps, [stage][turn]."""
        if not self.interleaved:
            return counts
        counts = counts.copy()
        for i in np.flatnonzero(self.vpp > 1):
            pp, vpp = int(self.pp[i]), int(self.vpp[i])
            sizes = list_sizes(pp, vpp)
            counts[:pp, i] = [
                _find_most_kept(int(micro_batches[i]), pp, stage, own) for stage, own in enumerate(sizes)
            ]
        return counts


_Sizes = tuple[tuple[int, ...], ...]


def count_within(layers: Sequence[int], run: range) -> int:
    """Count the layers, given in ascending order, that are in a range."""
    return bisect_left(layers, run.stop) - bisect_left(layers, run.start)


@lru_cache(maxsize=1 << 14)
def _find_most_kept(micro_batches: int, pp: int, stage: int, sizes: tuple[int, ...]) -> int:
    """Find the most that an interleaved stage keeps at a time. `sizes`: what a pass of each turn keeps.

    Micro-batches come in groups. The passes are ordered by group, turn and micro-batch, and backward passes go
    through the turns of a group from the last to the first. After some forward passes at the start, the stage
    alternates between forward and backward passes.
    """
    count = max(1, micro_batches // pp)
    least, larger = divmod(micro_batches, count)
    groups = [least + 1] * larger + [least] * (count - larger)
    ahead = 2 * (pp - stage - 1) + (len(sizes) - 1) * groups[0]
    forward = np.cumsum(np.concatenate([np.repeat(sizes, group) for group in groups]))
    backward = np.cumsum(np.concatenate([np.repeat(sizes[::-1], group) for group in groups]))
    freed = np.concatenate([np.zeros(min(ahead + 1, len(forward)), dtype=np.int64), backward])
    return int((forward - freed[: len(forward)]).max())
