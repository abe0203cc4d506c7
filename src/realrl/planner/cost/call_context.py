"""All that the time of a call depends on."""

from dataclasses import dataclass
from math import ceil

from realrl.layout.limits import max_logits
from realrl.layout.padding import bucket_lengths
from realrl.layout.ranges import stage_layers
from realrl.plan.placement import Strategy
from realrl.planner.cost.network import Network
from realrl.planner.cost.timing import BatchSize, DeviceHostTime, Timing
from realrl.planner.workload.batching import Chunks
from realrl.planner.workload.workload import CallWork


@dataclass(frozen=True)
class CallContext:
    """One call on the ranks of its placement."""

    timing: Timing
    network: Network
    strategy: Strategy
    work: CallWork

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(len(part) for part in stage_layers(self.timing.sizes.shape.layers, self.strategy.pp))

    @property
    def overlap(self) -> float:
        """Of computation, that hides communication. On a CPU it is the same cores that do both."""
        return 0.0 if self.timing.device.cpu else self.timing.efficiency.overlap

    def size(self, chunks: Chunks) -> BatchSize:
        """Of a chunk. On a CPU attention pads sequences to those of like length (`model.packing`), which is what
        chunks hold, since the longest are packed first."""
        lengths = self.work.lengths
        if not self.timing.device.cpu or lengths[0] == lengths[-1]:
            return BatchSize(chunks.tokens, chunks.squares)
        each = max(1, round(chunks.sequences))
        squares, groups, tokens = 0, 0, 0
        for i in range(chunks.count):
            part = lengths[len(lengths) * i // chunks.count : len(lengths) * (i + 1) // chunks.count]
            part = part or lengths[i * len(lengths) // chunks.count :][:1]
            held = [part[(2 * j + 1) * len(part) // (2 * each)] for j in range(each)]
            buckets = bucket_lengths(held)
            squares += sum(len(bucket.sequences) * bucket.length**2 for bucket in buckets)
            groups, tokens = groups + len(buckets), tokens + sum(held)
        return BatchSize(chunks.tokens, chunks.tokens * squares / tokens, groups / chunks.count)

    def layer_communication(self, tokens: float) -> DeviceHostTime:
        """What tensor ranks tell each other in a layer, in one direction: twice the sum of the hidden states.

        With sequence parallelism, which generation does without, a gather and a scatter each. Embedding is half
        of it.
        """
        if self.strategy.tp == 1:
            return DeviceHostTime(0.0)
        ring, size = self.network.tp_group, self._hidden(tokens)
        if self.strategy.sequence_parallel and not self.work.answers:
            return DeviceHostTime(2 * (ring.all_gather(size) + ring.reduce_scatter(size)), 2 * self._host)
        return DeviceHostTime(2 * ring.all_reduce(size), 2 * self._host)

    def head_communication(self, tokens: float) -> float:
        """What tensor ranks tell each other in the head, forward: the maximum and the sum of each row of logits,
        so many rows at a time as are computed at once, and the log-probabilities."""
        if self._head_is_local:
            return 0.0
        rows, count = self._logit_chunks(tokens)
        return 2 * count * self.network.tp_group.all_reduce(4 * rows) + self.network.tp_group.all_reduce(
            4 * tokens
        )

    def head_backward_communication(self, tokens: float) -> float:
        """Backward: the sum of the hidden states' gradient, and logits that were not kept once more."""
        if self._head_is_local:
            return 0.0
        rows, count = self._logit_chunks(tokens)
        again = 2 * count * self.network.tp_group.all_reduce(4 * rows) if count > 1 else 0.0
        return again + self.network.tp_group.all_reduce(self._hidden(tokens))

    def sample_communication(self, rows: float) -> float:
        """Every tensor rank gets all logits of the next tokens."""
        if self._head_is_local:
            return 0.0
        return self.network.tp_group.all_gather(4 * rows * self.timing.sizes.padded_vocab * self.strategy.tp)

    def hop(self, tokens: float) -> float:
        """Hidden states, or their gradient, from stage to stage; the receiving host cannot go on before."""
        if self.strategy.pp == 1:
            return 0.0
        rows = tokens / (self.strategy.tp if self.strategy.sequence_parallel else 1)
        return self.network.hop(self._hidden(rows)) + self._host

    @property
    def _head_is_local(self) -> bool:
        return self.strategy.tp == 1 or self.timing.sizes.head == "scalar"

    @property
    def _host(self) -> float:
        """On a CPU it is part of what a collective takes."""
        return 0.0 if self.timing.device.cpu else self.timing.efficiency.collective_host_s

    def _logit_chunks(self, tokens: float) -> tuple[float, int]:
        """Rows of logits that are computed at once, and how often."""
        rows = max(1, max_logits(cpu=self.timing.device.cpu) // self.timing.sizes.padded_vocab)
        return min(rows, tokens), ceil(tokens / rows)

    def _hidden(self, tokens: float) -> float:
        return tokens * self.timing.sizes.shape.hidden_size * self.timing.element_bytes
