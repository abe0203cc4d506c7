"""Inputs of the per-call time model."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.dataflow.call import Candidates
from realrl.layout.ranges import stage_layers
from realrl.planner.cost.network import Network
from realrl.planner.cost.timing import DeviceHostTime, Timing
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Floats, Ints, Real, tabulate_stages


@dataclass(frozen=True)
class CallContext:
    """Inputs of the time model of one call under each of some strategies.

    Times are arrays with an entry for each, of a call's stages [stages, strategies].
    """

    timing: Timing
    network: Network
    strategies: Strategies
    work: CallWork
    candidates: Candidates | None = None
    """Those of the call."""

    @cached_property
    def layers(self) -> Ints:
        """Number of layers by stage."""
        layers = self.timing.sizes.shape.layers
        return tabulate_stages(lambda pp: list(map(len, stage_layers(layers, pp))), self.strategies.pp)

    @property
    def overlap(self) -> float:
        """Fraction of compute that can overlap communication; 0 on a CPU, where the same cores do both."""
        return 0.0 if self.timing.device.cpu else self.timing.efficiency.overlap

    def layer_communication(self, tokens: Real) -> DeviceHostTime:
        """Time the TP communication of a layer, forward or backward: two all-reduces of the hidden states.

        With sequence parallelism, which generation does not use, an all-gather and a reduce-scatter each. The
        embedding takes half of it.
        """
        if self.strategies.tp == 1:
            return DeviceHostTime(0.0)
        ring = self.network.tp_group
        size = self._hidden(tokens)
        if self.strategies.sequence_parallel and not self.work.answers:
            return DeviceHostTime(
                2 * (ring.all_gather(size) + ring.reduce_scatter(size)), 2 * self.collective_host
            )
        return DeviceHostTime(2 * ring.all_reduce(size), 2 * self.collective_host)

    def head_communication(self, tokens: Real) -> Real:
        """Time the TP communication of the head forward.

        The maximum and the sum of each row of logits are all-reduced chunk by chunk, log-probabilities at once. Of
        the likeliest tokens, those of each rank are gathered chunk by chunk: ids in int64 and float32 numbers.
        """
        if self._head_is_local:
            return 0.0
        group, further = self.network.tp_group, self.candidates
        rows, count = self._logit_chunks(tokens)
        seconds = 2 * count * group.all_reduce(4 * rows)
        if further is None or further.ids is not None:
            return seconds + group.all_reduce(4 * tokens * (1 + (further.count if further else 0)))
        each = rows * further.count * self.strategies.tp
        gathered = group.all_gather(8 * each) + group.all_gather(4 * each)
        return seconds + count * gathered + group.all_reduce(4 * tokens)

    def head_backward_communication(self, tokens: Real) -> Real:
        """Time the TP communication of the head backward: the hidden gradient, and logits that are not kept."""
        if self._head_is_local:
            return 0.0
        rows, count = self._logit_chunks(tokens)
        kept = self.timing.sizes.keeps_logits(tokens, cpu=self.timing.device.cpu)
        again = np.where(kept, 0.0, 2 * count * self.network.tp_group.all_reduce(4 * rows))
        return again + self.network.tp_group.all_reduce(self._hidden(tokens))

    def sample_communication(self, rows: Real) -> Real:
        """Time the all-gather of the next tokens' logits to every TP rank."""
        if self._head_is_local:
            return 0.0
        return self.network.tp_group.all_gather(
            4 * rows * self.timing.sizes.padded_vocab * self.strategies.tp
        )

    def hop(self, tokens: Real) -> Floats:
        """Time sending hidden states, or their gradient, to the next stage; the receiving host blocks on it."""
        rows = tokens / (self.strategies.tp if self.strategies.sequence_parallel else 1)
        return np.where(
            self.strategies.pp == 1, 0.0, self.network.hop(self._hidden(rows)) + self.collective_host
        )

    @property
    def _head_is_local(self) -> bool:
        """Whether every TP rank has all of the head."""
        return self.timing.sizes.head == "scalar"

    @property
    def collective_host(self) -> float:
        """Host seconds per collective; on a CPU they are part of the collective itself."""
        return 0.0 if self.timing.device.cpu else self.timing.efficiency.collective_host_s

    def _logit_chunks(self, tokens: Real) -> tuple[Real, Ints]:
        """Rows of logits per chunk, and number of chunks."""
        return self.timing.sizes.count_logit_chunks(tokens, cpu=self.timing.device.cpu)

    def _hidden(self, tokens: Real) -> Real:
        return tokens * self.timing.sizes.shape.hidden_size * self.timing.element_bytes
