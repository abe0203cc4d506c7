"""Activation memory of calls on one rank: layers, logits, KV cache, packed weights, pipeline messages.

Counted are the tensors that the engine allocates, at the moment of their peak. Not counted are a few numbers per
token (tokens, positions, log-probabilities and what a loss computes from them), and what libraries and kernels
allocate outside torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from realrl.dataflow.call import Candidates
from realrl.layout.limits import SENDS_PER_STAGE
from realrl.plan.placement import ELEMENT_BYTES, Dtype, Strategy
from realrl.planner.memory.gathered import GatheredMemory
from realrl.planner.memory.kv_cache import kv_cache_bytes
from realrl.planner.memory.layer import LayerMemory
from realrl.planner.memory.logits import Logits
from realrl.planner.memory.packed_weights import (
    packed_weight_bytes,
    packing_bytes,
    widened_matrix_bytes,
)
from realrl.planner.workload.shard_sizes import LocalSizes

GATHERED = "gathered layers"
Parts = Mapping[str, int]
"""Bytes of `activations`, `gathered layers`, `logits`, `cache`, `packed weights` and `graphs` at one moment."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activation memory of a model under a strategy, in bytes per rank.

    `lengths` are a sample of sequence lengths. In methods, `tokens` are those of the largest micro-batch and
    `chunks` is the number of micro-batches.
    """

    sizes: LocalSizes
    strategy: Strategy
    dtype: Dtype
    cpu: bool
    lengths: tuple[int, ...]
    candidates: Candidates | None = None
    """Those of the call."""
    decode_graphs: bool = False
    """Whether decode steps are CUDA graphs."""

    def inferring(self, tokens: float, *, layers: int, stage: int, chunks: int) -> Parts:
        """Compute the peak of an inference call: in the embedding, in a layer, or at the logits."""
        expected = self._expected(tokens, stage, chunks - 1)
        gathered, last = self.gathered, stage == self._last
        layer: Parts = {
            "activations": self._forward(tokens, stage, chunks) + expected,
            GATHERED: gathered.layer(last_stage=last, layers=layers),
        }
        if stage == 0:
            embedded = self.layer.bytes(tokens, self.layer.stream)
            layer = _peak(layer, {"activations": embedded, GATHERED: gathered.embedding()})
        if not last:
            return layer
        states = self.layer.bytes(tokens, self.layer.stream + self.layer.hidden) + self.layer.index_bytes(
            tokens
        )
        logits = {"logits": self.logits.scored(tokens), GATHERED: gathered.head()}
        return _peak(layer, {"activations": states + expected, **logits})

    def generating(
        self, tokens: float, *, rows: float, cached: int, batches: int, layers: int, stage: int
    ) -> Parts:
        """Compute the peak of a generate call: as weights are packed, in a layer, or while tokens are sampled.

        `tokens` count the prompts of a forward pass, `rows` the sequences of one of the `batches` of rows that are
        decoded, and `cached` the tokens that the KV cache has room for. Graphs of decode steps hold in memory of
        their own what such a step takes; the first step of each number of rows is none.
        """
        last = stage == self._last
        held = {"cache": self.cache(cached, layers)}
        moments: list[Parts] = []
        if self.cpu:
            packed = packed_weight_bytes(self.sizes, self.dtype, layers=layers, head=last)
            packing = packing_bytes(self.sizes, self.dtype, head=last)
            moments.append({"packed weights": packed + packing})
            held["packed weights"] = packed
        decoded = {"activations": self._forward(rows, stage, batches)}
        sampled = {"logits": self.logits.sampled(rows)} if last else {}
        if self.decode_graphs:
            held["graphs"] = sum(_peak(decoded, sampled).values())
        # The receives of other batches are posted.
        expected = (batches - 1) * self._expected(tokens, stage, batches - 1)
        prefill = {"activations": self._forward(tokens, stage, batches) + expected}
        if last and layers == 1:
            # Of its only layer nothing is computed but queries, keys and values.
            received = self.layer.stream if stage else 0
            prefill["activations"] = expected + self.layer.rotation_bytes(tokens)
            prefill["activations"] += self.layer.bytes(tokens, received + self.layer.projected)
        moments += [held | prefill, held | decoded, held | sampled]
        return _peak(*moments)

    def training(
        self, tokens: float, *, layers: int, stage: int, chunks: int, frozen_layers: int = 0
    ) -> Parts:
        """Compute the peak of a train call: in the backward pass of the logits, of a layer, or of the embedding.

        `layers` are those of the stage that have a backward pass; `frozen_layers`, which come before them, have
        none, and keep nothing.
        """
        gathered, last_stage = self.gathered, stage == self._last
        forward = gathered.layer(last_stage=last_stage, layers=layers + frozen_layers)
        if frozen_layers and not layers and not last_stage:
            expected = self._expected(tokens, stage, chunks - 1)
            return {"activations": self._forward(tokens, stage, chunks) + expected, GATHERED: forward}
        layer = self.layer
        trains_embedding = any(self.sizes.trained.embedding)
        flying = min(chunks, self.strategy.pp - stage)
        back = trains_embedding or any(self.sizes.trained.stage_layers(self.strategy.pp)[:stage])
        sent = self._sent(tokens, chunks * ((stage > 0 and back) + (stage < self._last)))
        sent += self._expected(tokens, stage, chunks - flying)
        if stage < self._last and chunks > 1:
            sent += layer.bytes(tokens, layer.stream)  # the posted receive of the next gradient
        each = self.kept(tokens, layers)
        inside = layer.backward_bytes(tokens)
        if self.strategy.recompute:
            # All of the layer, recomputed. Its input was kept anyway, but its output is held needlessly.
            inside += layer.bytes(tokens, layer.kept)
        moments: list[Parts] = [{"activations": 0, GATHERED: gathered.update()}]
        if last_stage:
            # Input of the final norm, its output at predicted tokens, and the gradient of that output.
            states = layer.bytes(tokens, layer.stream + 2 * layer.hidden)
            kept = sent + flying * each + states
            logits = self.logits.backward(tokens)
            moments.append({"activations": kept, "logits": logits, GATHERED: gathered.head_backward()})
        if layers:
            all_kept = sent + flying * each
            there = gathered.first_layer_backward(last_stage=last_stage, layers=layers)
            moments.append({"activations": all_kept + inside, "logits": 0, GATHERED: there})
            there = gathered.later_layer_backward(last_stage=last_stage, layers=layers)
            one_less = self.kept(tokens, layers) - self.kept(tokens, layers - 1)
            moments.append({"activations": all_kept - one_less, "logits": 0, GATHERED: there})
        if frozen_layers:
            # A later micro-batch, in the layers that keep nothing.
            kept = sent + (flying - 1) * each + self._shared(tokens)
            moments.append(
                {"activations": kept + layer.forward_bytes(tokens, layer.stream), GATHERED: forward}
            )
        if stage == 0 and trains_embedding:
            embedded = layer.bytes(tokens, layer.stream) + 4 * int(tokens * layer.hidden)
            later = sent + (flying - 1) * each
            moments.append({"activations": later + embedded, "logits": 0})
            moments.append({"activations": later, "logits": 0, GATHERED: gathered.embedding_backward()})
        return _peak(*moments)

    def kept(self, tokens: float, layers: int) -> int:
        """Compute the bytes kept for backward by one micro-batch; with checkpointing, the input of each layer."""
        each = self.layer.stream if self.strategy.recompute else self.layer.kept
        return self.layer.bytes(tokens, layers * each) + (self._shared(tokens) if layers else 0)

    def cache(self, tokens: float, layers: int) -> int:
        """Compute the bytes of a KV cache."""
        return kv_cache_bytes(self.sizes, tokens=tokens, layers=layers, element_bytes=self.element_bytes)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @cached_property
    def layer(self) -> LayerMemory:
        """Activation sizes of one layer."""
        return LayerMemory(
            sizes=self.sizes,
            strategy=self.strategy,
            element_bytes=self.element_bytes,
            cpu=self.cpu,
            lengths=self.lengths,
        )

    @cached_property
    def gathered(self) -> GatheredMemory:
        """Sections that are there while they are computed."""
        return GatheredMemory(self.sizes, self.strategy, self.element_bytes)

    @cached_property
    def logits(self) -> Logits:
        """Activation sizes of the output head."""
        return Logits(self.sizes, self.element_bytes, self.cpu, self.candidates)

    def _forward(self, tokens: float, stage: int, chunks: int) -> int:
        """Bytes in a stage's layers without gradients, when all chunks but one have been sent on.

        A quantised matrix is widened while activations are; which of them are at their peak is not looked at.
        """
        sent = self._sent(tokens, 0 if stage == self._last else chunks - 1)
        received = self.layer.stream if stage else 0
        widened = widened_matrix_bytes(self.sizes, self.dtype)
        return sent + self.layer.forward_bytes(tokens, received) + self._shared(tokens) + widened

    def _expected(self, tokens: float, stage: int, later: int) -> int:
        """Bytes of the posted receive from the previous stage, if there is a later micro-batch."""
        return self.layer.bytes(tokens, self.layer.stream) if stage and later > 0 else 0

    def _shared(self, tokens: float) -> int:
        """Bytes shared by all layers: rotary tables, and indices of padded heads."""
        return self.layer.rotation_bytes(tokens) + self.layer.index_bytes(tokens)

    def _sent(self, tokens: float, sends: int) -> int:
        """Bytes of sent hidden states and gradients whose sends have not completed."""
        sends = min(sends, SENDS_PER_STAGE * self.strategy.pp) if self.strategy.pp > 1 else 0
        return self.layer.bytes(tokens, sends * self.layer.stream)

    @property
    def _last(self) -> int:
        return self.strategy.pp - 1


def _peak(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))
