"""Inputs of the time model of a call, and the communication that its passes share."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from realrl.dataflow.call import Candidates
from realrl.planner.cost.network import Network
from realrl.planner.cost.timing import DeviceHostTime, Timing
from realrl.planner.workload.batching import Chunks
from realrl.planner.workload.shard_sizes import KindSizes
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Floats, Ints, Real


@dataclass(frozen=True)
class CallContext:
    """Inputs of the time model of one call under several strategies.

    Times are in seconds, in arrays with one entry per strategy. Their shape is [strategies], or [stages,
    strategies] if times differ between pipeline stages.
    """

    timing: Timing
    network: Network
    strategies: Strategies
    work: CallWork
    candidates: Candidates | None = None
    """The call's candidates: further tokens whose log-probabilities it computes at each position."""
    kind: KindSizes | None = None
    """The only layers that a context is about; None if it is about the whole model."""

    @cached_property
    def layers(self) -> Ints:
        """Number of layers on each stage, [stages, strategies]."""
        return self.strategies.stages.count_layers(self.timing.sizes.shape.layers)

    @cached_property
    def kinds(self) -> "tuple[CallContext, ...]":
        """A context for each kind of layer, whose times of layers are those of this kind."""
        timing = self.timing
        return tuple(
            replace(self, timing=replace(timing, sizes=kind.sizes), kind=kind) for kind in timing.sizes.kinds
        )

    @cached_property
    def counts(self) -> Ints:
        """Number of layers of this kind on each stage, [stages, strategies]."""
        return self.one_kind.count(self.strategies.stages)

    @property
    def one_kind(self) -> KindSizes:
        """The only kind of layers in this context."""
        assert self.kind is not None, "times of layers belong to one of `kinds`"
        return self.kind

    def find_kind(self, layer: int) -> "CallContext":
        """Return the context of the kind of a layer."""
        return next(of for of in self.kinds if layer in of.one_kind.layers)

    @property
    def overlap(self) -> float:
        """Fraction of compute time that can hide communication. 0 on a CPU, because the same cores do both."""
        return 0.0 if self.timing.device.cpu else self.timing.efficiency.overlap

    def layer_communication(self, tokens: Real) -> DeviceHostTime:
        """Predict the time of a layer's TP communication, forward or backward: two all-reduces of the hidden
        states of a rank's `tokens`.

        With sequence parallelism, an all-gather and a reduce-scatter replace each all-reduce. Generation does not
        use sequence parallelism.
        """
        if self.strategies.tp == 1:
            return DeviceHostTime(0.0)
        ring = self.network.group("tp")
        size = self._hidden(tokens)
        if self.strategies.sequence_parallel and not self.work.answers:
            # Ranks that divide experts send their own tokens to them, so that a block of experts gathers none.
            sizes = self.timing.sizes
            blocks = 1 if sizes.ep > 1 and not sizes.shared_blocks else 2
            return DeviceHostTime(
                blocks * (ring.all_gather(size) + ring.reduce_scatter(size)), blocks * self.collective_host
            )
        return DeviceHostTime(2 * ring.all_reduce(size), 2 * self.collective_host)

    def embedding_communication(self, tokens: Real) -> Real:
        """Predict the seconds of the embedding's TP communication, which is half of a layer's."""
        return self.kinds[0].layer_communication(tokens).device / 2

    def key_communication(self, tokens: Real, chunks: Chunks) -> DeviceHostTime:
        """Predict the time in which CP ranks gather the keys and values of a layer, each for its own `tokens`, as
        far as they divide sequences. In the backward pass, they reduce-scatter the gradients in the same time."""
        whole = tokens * self.strategies.cp * chunks.exchanged
        keys = 2 * whole * self.timing.sizes.cache_dim * self.timing.element_bytes
        host = np.where(self.strategies.cp > 1, self.collective_host * chunks.divided, 0.0)
        seconds = np.where(chunks.divided > 0, self.network.group("cp").all_gather(keys), 0.0)
        return DeviceHostTime(seconds, host)

    def output_communication(self, rows: Real) -> DeviceHostTime:
        """Predict the time in which CP ranks gather a layer's attention outputs in a decode step of `rows` rows,
        each with the log-sum-exp of every head, in float32. Each rank has attended to its own part of the cache."""
        return DeviceHostTime(
            self.network.group("cp").all_gather(self.strategies.cp * self.timing.roofline.output_bytes(rows)),
            np.where(self.strategies.cp > 1, self.collective_host, 0.0),
        )

    def part_communication(self, tokens: Real) -> DeviceHostTime:
        """Predict the time of a layer's exchanges of CP ranks, if each of them prefills `tokens` tokens of
        sequences that go on. They gather queries, keys and values, and the outputs of each rank's part of the
        cache."""
        sizes, ring = self.timing.sizes, self.network.group("cp")
        whole = tokens * self.strategies.cp
        inputs = whole * (sizes.q_dim + 2 * sizes.cache_dim) * self.timing.element_bytes
        outputs = self.strategies.cp * self.timing.roofline.output_bytes(whole)
        return DeviceHostTime(
            ring.all_gather(inputs) + ring.all_gather(outputs),
            np.where(self.strategies.cp > 1, 2 * self.collective_host, 0.0),
        )

    def token_communication(self, rows: Real) -> DeviceHostTime:
        """Predict the time in which one CP rank broadcasts the sampled tokens of `rows` rows and their
        log-probabilities, both in float64."""
        return DeviceHostTime(
            self.network.group("cp").broadcast(16 * rows),
            np.where(self.strategies.cp > 1, self.collective_host, 0.0),
        )

    def expert_communication(self, tokens: Real, *, backward: bool = False) -> DeviceHostTime:
        """Predict the time in which EP ranks send a layer's `tokens` of each TP group to their experts and back,
        forward or backward, as far as the device waits for it.

        The ranks exchange the numbers of rows, the rows, their float32 weights, and the outputs. With sequence
        parallelism, TP ranks also gather the scores of experts. Each half of a shared block hides one exchange of
        rows (`model.expert_parallel`).
        """
        sizes, roofline = self.timing.sizes, self.timing.roofline
        if sizes.ep == 1 or not sizes.experts:
            return DeviceHostTime(0.0)
        group, rows = self.network.group("ep"), tokens * sizes.copies * roofline.busiest
        returned = group.all_to_all(rows * sizes.shape.hidden_size * self.timing.element_bytes)
        sent = returned + group.all_to_all(4 * rows)
        first, second = self._hide_exchanges(tokens, backward=backward)
        seconds = np.maximum(0.0, sent - first) + np.maximum(0.0, returned - second)
        seconds = seconds + group.all_to_all(8 * sizes.experts)
        if self.strategies.sequence_parallel and self.strategies.tp > 1:
            seconds = seconds + self.network.group("tp").all_gather(4 * tokens * sizes.experts)
        return DeviceHostTime(seconds, 4 * self.collective_host)

    def _hide_exchanges(self, tokens: Real, *, backward: bool) -> tuple[Real, Real]:
        """Predict the seconds of communication that the two halves of a layer's shared block can hide."""
        roofline = self.timing.roofline
        if not self.timing.sizes.shared_blocks or self.overlap == 0:
            return 0.0, 0.0
        if backward:
            first, second = roofline.shared_block_backward(tokens, apart=self.strategies.zero_bubble)
        else:
            first, second = roofline.shared_block(tokens)
        return self.overlap * first, self.overlap * second

    def gather_communication(self, rows: Real) -> DeviceHostTime:
        """Predict the time in which EP ranks gather a layer's tokens in a decode step of `rows` sequences, each
        with its experts and their weights, and sum the outputs. CP ranks hand on the same tokens."""
        sizes, mixture = self.timing.sizes, self.timing.sizes.shape.mixture
        if sizes.ep == 1 or not sizes.experts or mixture is None:
            return DeviceHostTime(0.0)
        group, tokens = self.network.group("ep"), np.ceil(rows / sizes.tp) * sizes.ep
        states = tokens * sizes.shape.hidden_size * self.timing.element_bytes
        seconds = group.all_gather(states + 8 * tokens * mixture.per_token) + group.reduce_scatter(states)
        return DeviceHostTime(seconds, 2 * self.collective_host)

    def result_communication(self, tokens: Real, chunks: Chunks) -> Real:
        """Predict the seconds in which CP ranks that divide sequences exchange the results of the head, in an
        all-reduce.

        Ids of tokens that the call selects are int64; other results are float32.
        """
        candidates = self.candidates
        numbers = 1 if candidates is None else 1 + candidates.count * (1 if candidates.ids is not None else 3)
        results = 4 * tokens * self.strategies.cp * chunks.exchanged * numbers
        return np.where(chunks.divided > 0, self.network.group("cp").all_reduce(results), 0.0)

    def head_communication(self, tokens: Real) -> Real:
        """Predict the seconds of TP communication in the head's forward pass.

        The maximum and the sum of each row of logits are all-reduced chunk by chunk. The log-probabilities of all
        chunks are all-reduced once. If the call selects the likeliest tokens, each rank's selection is gathered
        chunk by chunk: ids in int64 and log-probabilities in float32.
        """
        if self._head_is_local:
            return 0.0
        group, candidates = self.network.group("tp"), self.candidates
        rows, count = self._logit_chunks(tokens)
        seconds = 2 * count * group.all_reduce(4 * rows)
        if candidates is None or candidates.ids is not None:
            return seconds + group.all_reduce(4 * tokens * (1 + (candidates.count if candidates else 0)))
        each = rows * candidates.count * self.strategies.tp
        gathered = group.all_gather(8 * each) + group.all_gather(4 * each)
        return seconds + count * gathered + group.all_reduce(4 * tokens)

    def head_backward_communication(self, tokens: Real) -> Real:
        """Predict the seconds of TP communication in the head's backward pass: an all-reduce of the hidden states'
        gradient.

        If the forward pass did not keep its logits, their maxima and sums are also all-reduced again.
        """
        if self._head_is_local:
            return 0.0
        rows, count = self._logit_chunks(tokens)
        kept = self.timing.sizes.keeps_logits(tokens, cpu=self.timing.device.cpu)
        again = np.where(kept, 0.0, 2 * count * self.network.group("tp").all_reduce(4 * rows))
        return again + self.network.group("tp").all_reduce(self._hidden(tokens))

    def sample_communication(self, rows: Real) -> Real:
        """Predict the seconds of the all-gather that gives every TP rank the logits of the next tokens."""
        if self._head_is_local:
            return 0.0
        return self.network.group("tp").all_gather(
            4 * rows * self.timing.sizes.padded_vocab * self.strategies.tp
        )

    def hop(self, tokens: Real) -> Floats:
        """Predict the seconds to send hidden states, or their gradient, to the next stage.

        The prediction includes host time, because the receiving host blocks until the message has arrived.
        """
        rows = tokens / (self.strategies.tp if self.strategies.sequence_parallel else 1)
        return np.where(
            self.strategies.pp == 1, 0.0, self.network.hop(self._hidden(rows)) + self.collective_host
        )

    @property
    def _head_is_local(self) -> bool:
        """Whether every TP rank holds the whole head, so that the head needs no communication."""
        return self.timing.sizes.head == "scalar"

    @property
    def collective_host(self) -> float:
        """Host seconds per collective. 0 on a CPU, because the collective's own time includes them."""
        return 0.0 if self.timing.device.cpu else self.timing.efficiency.collective_host_s

    def _logit_chunks(self, tokens: Real) -> tuple[Real, Ints]:
        """Return the rows of logits per chunk, and the number of chunks."""
        return self.timing.sizes.count_logit_chunks(tokens, cpu=self.timing.device.cpu)

    def _hidden(self, tokens: Real) -> Real:
        """Bytes of the hidden states of `tokens`."""
        return tokens * self.timing.sizes.shape.hidden_size * self.timing.element_bytes
