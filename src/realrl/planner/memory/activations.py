"""Bytes of what calls compute on the way, on one rank.

Counted are the tensors that the engine allocates, at the moment when they take most: those of layers, of logits,
of key/value caches, and what stages have sent to each other. Not counted are a few numbers per token (tokens,
positions, log-probabilities and what a loss makes of them), and what libraries allocate outside torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from realrl.plan.placement import Strategy
from realrl.planner.memory.layer import Layer
from realrl.planner.memory.logits import Logits
from realrl.planner.workload.sizes import LocalSizes

Parts = Mapping[str, int]
"""activations, logits and cache: bytes, all at the same moment."""
SENDS_PER_STAGE = 4
"""Messages to other stages that are kept, times the number of stages (`engine.pipeline`)."""


@dataclass(frozen=True)
class Activations:
    """A model's activations under a strategy.

    `lengths` are a sample of the sequences' lengths. In methods, `tokens` are those of the fullest micro-batch and
    `chunks` the number of micro-batches, or of continuations.
    """

    sizes: LocalSizes
    strategy: Strategy
    element_bytes: int
    cpu: bool
    lengths: tuple[int, ...]

    def inferring(self, tokens: float, *, stage: int, chunks: int) -> Parts:
        """Of an inference call: in a layer, or at the logits."""
        expected = self._expected(tokens, stage, chunks - 1)
        layer = {"activations": self._forward(tokens, stage, chunks) + expected}
        if stage < self._last:
            return layer
        states = self.layer.bytes(tokens, self.layer.stream + self.layer.hidden) + self.layer.index_bytes(
            tokens
        )
        return _fullest(layer, {"activations": states + expected, "logits": self.logits.scored(tokens)})

    def generating(
        self, tokens: float, *, rows: float, room: int, layers: int, stage: int, chunks: int
    ) -> Parts:
        """Of a generate call: while prompts pass a layer, or when a token is drawn.

        `tokens` and `rows` are those of the prompts in a continuation; `room` is the most tokens of a sequence.
        """
        active = min(self.strategy.pp, chunks)
        cache = active * self.cache(rows, room, layers)
        forward = self._forward(tokens, stage, active)
        if stage < self._last:
            return {"activations": forward, "cache": cache}
        # During the turn of the first continuation the prompts of the others are expected, without caches as yet.
        expected = (active - 1) * self._expected(tokens, stage, active - 1)
        logits = self.logits.sampled(rows)
        return _fullest(
            {"activations": forward + expected, "cache": cache // active},
            {"activations": forward, "cache": cache},
            {"activations": expected, "cache": cache // active, "logits": logits},
            {"cache": cache, "logits": logits},
        )

    def training(
        self, tokens: float, *, layers: int, stage: int, chunks: int, frozen_layers: int = 0
    ) -> Parts:
        """Of a train call: when the backward pass is at the logits, in a layer, or at the embedding.

        `layers` are those of the stage that have a backward pass; `frozen_layers`, which come before them, have
        none, and keep nothing.
        """
        if frozen_layers and not layers and stage < self._last:
            expected = self._expected(tokens, stage, chunks - 1)
            return {"activations": self._forward(tokens, stage, chunks) + expected}
        layer, trains_embedding = self.layer, any(self.sizes.trained.embedding)
        flying = min(chunks, self.strategy.pp - stage)
        back = trains_embedding or any(self.sizes.trained.stage_layers(self.strategy.pp)[:stage])
        sent = self._sent(tokens, chunks * ((stage > 0 and back) + (stage < self._last)))
        sent += self._expected(tokens, stage, chunks - flying)
        if stage < self._last and chunks > 1:
            sent += layer.bytes(tokens, layer.stream)  # the next gradient
        each = self.kept(tokens, layers)
        inside = layer.backward_bytes(tokens)
        if self.strategy.recompute:
            # The whole layer; its input was there already, but there is an output, which is of no use.
            inside += layer.bytes(tokens, layer.kept)
        waiting, moments = 0, []
        if stage == self._last:
            # The input of the final norm, its output where a token is predicted, and that one's gradient.
            states = layer.bytes(tokens, layer.stream + 2 * layer.hidden)
            kept = sent + flying * each + states
            moments.append({"activations": kept, "logits": self.logits.learnt(tokens)})
            if stage == 0 and self.sizes.trained.tied and trains_embedding:
                # What the head adds to the gradient of the embedding table waits for what the embedding adds.
                waiting = self.logits.table_bytes
        if layers:
            moments.append({"activations": sent + flying * each + inside, "logits": waiting})
        if frozen_layers:
            # A later micro-batch, in the layers that keep nothing.
            kept = sent + (flying - 1) * each + self._shared(tokens)
            moments.append({"activations": kept + layer.bytes(tokens, layer.stream + layer.computed)})
        if stage == 0 and trains_embedding:
            table = layer.matrix_bytes(self.sizes.vocabulary * layer.hidden)
            moments.append({"activations": sent + (flying - 1) * each + table, "logits": waiting})
        return _fullest(*moments)

    def kept(self, tokens: float, layers: int) -> int:
        """Of one micro-batch, until its backward pass: of each layer all that it needs, or its input alone."""
        each = self.layer.stream if self.strategy.recompute else self.layer.kept
        return self.layer.bytes(tokens, layers * each) + self._shared(tokens)

    def cache(self, rows: float, room: int, layers: int) -> int:
        """Keys and values of one continuation, whose rows all have room for the longest."""
        return self.layer.bytes(rows * room, 2 * layers * self.sizes.cached)

    @cached_property
    def layer(self) -> Layer:
        """What a layer computes."""
        return Layer(self.sizes, self.strategy, self.element_bytes, self.cpu, self.lengths)

    @cached_property
    def logits(self) -> Logits:
        """What is computed after the layers."""
        return Logits(self.sizes, self.element_bytes, self.cpu)

    def _forward(self, tokens: float, stage: int, chunks: int) -> int:
        """In a stage's layers without gradients, when it has sent on all chunks but one."""
        sent = self._sent(tokens, 0 if stage == self._last else chunks - 1)
        received = self.layer.stream if stage else 0
        return sent + self.layer.bytes(tokens, received + self.layer.computed) + self._shared(tokens)

    def _expected(self, tokens: float, stage: int, later: int) -> int:
        """Hidden states that a stage expects of the one before, if there is a later micro-batch."""
        return self.layer.bytes(tokens, self.layer.stream) if stage and later > 0 else 0

    def _shared(self, tokens: float) -> int:
        """For all layers once."""
        return self.layer.rotation_bytes(tokens) + self.layer.index_bytes(tokens)

    def _sent(self, tokens: float, sends: int) -> int:
        """Hidden states and gradients that a stage has sent and still keeps."""
        sends = min(sends, SENDS_PER_STAGE * self.strategy.pp) if self.strategy.pp > 1 else 0
        return self.layer.bytes(tokens, sends * self.layer.stream)

    @property
    def _last(self) -> int:
        return self.strategy.pp - 1


def _fullest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))
