"""Activation memory of calls on one rank: layers, logits, KV cache, packed weights, pipeline messages.

The formulas count the tensors that the engine holds at the moment of its peak. They ignore a few numbers per token:
token ids, positions, log-probabilities and the inputs of a loss. They also ignore memory that libraries and kernels
allocate outside torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from realrl.dataflow.call import Candidates
from realrl.layout.limits import SENDS_PER_STAGE
from realrl.plan.placement import ELEMENT_BYTES, Dtype
from realrl.planner.memory.gathered import GatheredMemory
from realrl.planner.memory.layer import LayerMemory, Phase
from realrl.planner.memory.logits import Logits
from realrl.planner.memory.packed_weights import (
    packed_weight_bytes,
    packing_bytes,
    widened_matrix_bytes,
)
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.program.arrays import Bools, Ints, Real, truncate


def kv_cache_bytes(sizes: LocalSizes, *, tokens: Real, layers: Real, element_bytes: int) -> Ints:
    """Compute the bytes of the keys and values of `tokens` tokens in `layers` layers on one TP rank."""
    return truncate(2 * layers * tokens * sizes.cache_dim * element_bytes)


GATHERED = "gathered layers"
Parts = Mapping[str, Ints]
"""Bytes of `activations`, `gathered layers`, `logits`, `cache`, `packed weights` and `graphs` at one moment,
[stages, strategies]."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activation memory of a model under several strategies, in bytes per rank.

    `lengths` is a sample of sequence lengths for each strategy. In methods, `tokens` counts the tokens that a rank
    has of each strategy's largest micro-batch, and `chunks` counts its micro-batches. `layers` counts the layers of
    each stage, [stages, strategies], and `stage` numbers the stages, [stages, 1]. If a stage has several kinds of
    layers, what layers keep is added up, and the largest layer determines the peak inside a layer.
    """

    sizes: LocalSizes
    strategies: Strategies
    dtype: Dtype
    cpu: bool
    lengths: Sequence[tuple[int, ...]]
    candidates: Candidates | None = None
    """The call's candidates."""
    decode_graphs: bool = False
    """Whether decode steps are CUDA graphs."""
    expert_spread: float = 0.0
    """`Efficiency.expert_spread`."""
    phase: Phase = "pass"
    """See `LayerMemory`."""

    def inferring(self, tokens: Real, *, layers: Ints, stage: Ints, chunks: Ints) -> Parts:
        """Compute the peak of an inference call: in the embedding, in a layer, or at the logits."""
        expected = self._expected(tokens, stage, chunks * self.strategies.vpp - 1)
        layer: Parts = {"activations": self._forward(tokens, stage, chunks) + expected}
        states = self.layer.bytes(tokens, self.layer.stream + self.layer.hidden)
        states = states + self.layer.index_bytes(tokens) + expected
        last = stage == self._last
        scored: Parts = {"activations": states, "logits": self.logits.scored(tokens)}
        if self.strategies.zero == 1:
            return _peak(layer, _only(last, scored))
        gathered = self.gathered
        embedded = {
            "activations": self.layer.bytes(tokens, self.layer.stream),
            GATHERED: gathered.embedding(),
        }
        layer = {**layer, GATHERED: gathered.layer(last_stage=last, layers=layers)}
        scored = {**scored, GATHERED: gathered.head()}
        return _peak(layer, _only(stage == 0, embedded), _only(last, scored))

    def generating(
        self,
        tokens: Real,
        *,
        rows: Real,
        cached: Real,
        batches: Ints,
        layers: Ints,
        stage: Ints,
        resumes: bool,
    ) -> Parts:
        """Compute the peak of a generate call: while weights are packed, in a layer, or while tokens are sampled.

        `tokens` counts a rank's prompt tokens of a forward pass, and `cached` the tokens that it stores in the KV
        cache. There are `batches` decode batches of `rows` sequences each. CUDA graphs hold the memory of a decode
        step in a pool of their own. The first step with a number of rows runs without a graph, so it needs this
        memory once more. If it `resumes` rows, the prompts of prefilled rows may be in the cache.
        """
        last = stage == self._last
        held: dict[str, Ints] = {"cache": self.cache(cached, layers)}
        moments: list[Parts] = []
        if self.cpu:
            counts = [kind.count(self.strategies.stages) for kind in self.sizes.kinds]
            packed = packed_weight_bytes(self.sizes, self.dtype, layers=counts, head=last)
            packing = packing_bytes(self.sizes, self.dtype, head=last)
            moments.append({"packed weights": packed + packing})
            held["packed weights"] = packed
        decoded = {"activations": replace(self, phase="decode")._forward(rows, stage, batches)}
        sampled = _only(last, {"logits": self.logits.sampled(rows)})
        if self.decode_graphs:
            held["graphs"] = total(_peak(decoded, sampled))
        # The rank has already allocated buffers to receive the other decode batches.
        expected = (batches - 1) * self._expected(tokens, stage, batches - 1)
        prefilled = replace(self, phase="prefill") if resumes else self
        prefill = {"activations": prefilled._forward(tokens, stage, batches) + expected}
        # A prefill ends with the keys and values of the last layer. If the last stage has only this layer, it
        # computes nothing else.
        received = np.where(stage > 0, self.layer.stream, 0)
        little = expected + self.layer.rotation_bytes(tokens)
        little = little + self.layer.bytes(tokens, received + self.layer.projected)
        prefill["activations"] = np.where(last & (layers == 1), little, prefill["activations"])
        moments += [held | prefill, held | decoded, {**held, **sampled}]
        return _peak(*moments)

    def training(
        self, tokens: Real, *, layers: Ints, stage: Ints, chunks: Ints, frozen_layers: Ints
    ) -> Parts:
        """Compute the peak of a train call: in the backward pass of the logits, of a layer, or of the embedding.

        `layers` counts the layers of a stage that have a backward pass. `frozen_layers` counts the layers before
        them, which keep no activations.
        """
        layer, last = self.layer, self._last
        trains_embedding = any(self.sizes.trained.embedding)
        stages, vpp = self.strategies.stages, self.strategies.vpp
        # Passes of one turn whose activations the stage keeps at a time.
        flying = stages.count_flying(chunks)
        back = trains_embedding | (layers.cumsum(axis=0) > layers) | (vpp > 1)
        # In every turn but the first, the first stage sends gradients to the last one, which sends it hidden states
        # in every turn but the last.
        sends = (vpp - (stage == 0)) * back + (vpp - (stage == last))
        sent = self._sent(tokens, chunks * sends)
        sent = sent + self._expected(tokens, stage, chunks * vpp - flying)
        # The buffer in which the stage receives the next gradient.
        returned = ((stage < last) | (vpp > 1)) & (chunks * vpp > 1)
        sent = sent + np.where(returned, layer.bytes(tokens, layer.stream), 0)
        differentiated = self.sizes.differentiated_layers
        counts = [kind.count(stages, within=differentiated) for kind in self.sizes.kinds]
        fewest, most = (
            [kind.count_in_turns(stages, within=differentiated, most=m) for kind in self.sizes.kinds]
            for m in (False, True)
        )
        # The smallest pass, and all passes whose activations the stage keeps.
        each = self.kept(tokens, fewest)
        flying_layers = [
            kind.count_flying(stages, chunks, within=differentiated) for kind in self.sizes.kinds
        ]
        every = self.kept(tokens, flying_layers, passes=flying)
        if self.strategies.zero_bubble.any():
            apart = self._keep_apart(tokens, most, flying, every - each)
            every = np.where(self.strategies.zero_bubble, apart, every)
        # Recomputation holds a whole layer. This counts the layer's input twice, in place of its output, which
        # torch holds although nothing reads it.
        inside = self._most(
            lambda own: (
                own.backward_bytes(tokens)
                + np.where(self.strategies.recompute, own.bytes(tokens, own.kept), 0)
            ),
            counts,
        )
        # The input of the final norm, its output at predicted tokens, and the gradient of this output.
        states = layer.bytes(tokens, layer.stream + 2 * layer.hidden)
        all_kept = sent + every
        logits: Parts = {"activations": all_kept + states, "logits": self.logits.backward(tokens)}
        first: Parts = {"activations": all_kept + inside}
        # The moment at which a later micro-batch is in the frozen layers, which keep no activations.
        later = sent + every - each + self._shared(tokens)
        without_backward = [
            kind.count(self.strategies.stages) - count
            for kind, count in zip(self.sizes.kinds, counts, strict=True)
        ]
        passed = self._most(lambda own: own.forward_bytes(tokens, layer.stream), without_backward)
        frozen: Parts = {"activations": later + passed}
        # The peak of stages without a backward pass.
        forward = self._forward(tokens, stage, chunks) + self._expected(tokens, stage, chunks - 1)
        without: Parts = {"activations": forward}
        moments: list[Parts] = []
        if self.strategies.zero > 1:
            gathered, last_stage = self.gathered, stage == last
            there = gathered.layer(last_stage=last_stage, layers=layers + frozen_layers)
            frozen, without = {**frozen, GATHERED: there}, {**without, GATHERED: there}
            logits = {**logits, GATHERED: gathered.head_backward()}
            first = {
                **first,
                GATHERED: gathered.first_layer_backward(last_stage=last_stage, layers=layers),
            }
            ends = [kind.end_stages(self.strategies.stages) for kind in self.sizes.kinds]
            fewer = [count - end for count, end in zip(counts, ends, strict=True)]
            # No such pipeline is interleaved, so a pass has all layers of the stage.
            one_less = each - self.kept(tokens, fewer)
            second = {
                "activations": all_kept - one_less,
                GATHERED: gathered.later_layer_backward(last_stage=last_stage, layers=layers),
            }
            moments += [
                {"activations": np.zeros_like(all_kept), GATHERED: gathered.update()},
                _only(layers > 0, second),
            ]
        moments += [_only(stage == last, logits), _only(layers > 0, first), _only(frozen_layers > 0, frozen)]
        if trains_embedding:
            others = sent + every - each
            embedded = layer.bytes(tokens, layer.stream) + 4 * truncate(tokens * layer.hidden)
            moments.append(_only(stage == 0, {"activations": others + embedded}))
            if self.strategies.zero > 1:
                reduced = {"activations": others, GATHERED: self.gathered.embedding_backward()}
                moments.append(_only(stage == 0, reduced))
        alone = (frozen_layers > 0) & (layers == 0) & (stage < last)
        return choose(alone, without, _peak(*moments))

    def kept(self, tokens: Real, layers: Sequence[Ints], passes: Real = 1) -> Ints:
        """Compute the bytes that some passes of micro-batches keep for their backward passes. With recomputation,
        they keep only each layer's input. `layers`: the number of layers of each kind, in all of the passes
        together."""
        numbers = sum(
            count * np.where(self.strategies.recompute, own.stream, own.kept)
            for count, own in zip(layers, self.by_kind, strict=True)
        )
        there = np.asarray(sum(layers)) > 0
        return self.layer.bytes(tokens, numbers) + np.where(there, passes * self._shared(tokens), 0)

    def _keep_apart(self, tokens: Real, layers: Sequence[Ints], flying: Ints, others: Ints) -> Ints:
        """Compute the bytes that all passes keep if gradients of weights are computed apart.

        `layers`: the largest number of layers of each kind of a pass. `others`: bytes of the passes that a stage
        keeps before their backward passes, without the current one, which are `flying` passes with it. The current
        backward pass turns the activations of its pass into what the gradients of weights need. The stage keeps
        this for as many further passes as the first stage keeps more before their backward passes
        (`engine.pass_schedule`). With recomputation, this counts about one layer twice.
        """
        numbers = sum(count * own.left_out for count, own in zip(layers, self.by_kind, strict=True))
        left_out = self.layer.bytes(tokens, numbers)
        current = np.maximum(self.kept(tokens, layers), left_out)
        return others + current + (flying[0] - flying) * left_out

    def cache(self, tokens: Real, layers: Ints) -> Ints:
        return kv_cache_bytes(self.sizes, tokens=tokens, layers=layers, element_bytes=self.element_bytes)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @cached_property
    def by_kind(self) -> list[LayerMemory]:
        """Memory of a layer of each kind."""
        return [
            LayerMemory(
                expert_spread=self.expert_spread,
                phase=self.phase,
                sizes=kind.sizes,
                strategies=self.strategies,
                element_bytes=self.element_bytes,
                cpu=self.cpu,
                lengths=self.lengths,
            )
            for kind in self.sizes.kinds
        ]

    @property
    def layer(self) -> LayerMemory:
        """Memory of a layer, for sizes that all kinds of layers have in common."""
        return self.by_kind[0]

    def _most(self, size: Callable[[LayerMemory], Ints], counts: Sequence[Ints]) -> Ints:
        """Compute the largest size of a layer, among the kinds of which a stage has layers. `counts`: the number of
        layers of each kind. If there is a single kind, the size is the same for all stages."""
        found = [size(own) for own in self.by_kind]
        if len(found) == 1:
            return found[0]
        there = zip(counts, found, strict=True)
        return reduce(np.maximum, [np.where(count > 0, each, 0) for count, each in there])

    @cached_property
    def gathered(self) -> GatheredMemory:
        """Memory of sections that are gathered while they are computed, under ZeRO-2 and ZeRO-3."""
        return GatheredMemory(self.sizes, self.strategies, self.element_bytes)

    @cached_property
    def logits(self) -> Logits:
        return Logits(self.sizes, self.element_bytes, self.cpu, self.candidates)

    def _forward(self, tokens: Real, stage: Ints, chunks: Ints) -> Ints:
        """Peak bytes of a stage in its last chunk without gradients, while the messages of all other chunks may
        still be in flight.

        The widened copy of a quantised matrix is added to the peak of activations. The sum is an upper bound,
        because the two peaks may be at different moments.
        """
        vpp = self.strategies.vpp
        sent = self._sent(tokens, np.where(stage == self._last, chunks * (vpp - 1), chunks * vpp - 1))
        received = np.where((stage > 0) | (vpp > 1), self.layer.stream, 0)
        widened = widened_matrix_bytes(self.sizes, self.dtype)
        counts = [kind.count(self.strategies.stages) for kind in self.sizes.kinds]
        layer = self._most(lambda own: own.forward_bytes(tokens, received), counts)
        return sent + layer + self._shared(tokens) + widened

    def _expected(self, tokens: Real, stage: Ints, later: Ints) -> Ints:
        """Bytes of the buffer in which a stage receives its next micro-batch, if `later` passes remain."""
        return np.where(
            ((stage > 0) | (self.strategies.vpp > 1)) & (later > 0),
            self.layer.bytes(tokens, self.layer.stream),
            0,
        )

    def _shared(self, tokens: Real) -> Ints:
        """Bytes shared by all layers: rotary tables, and indices of padded heads."""
        return self.layer.rotation_bytes(tokens) + self.layer.index_bytes(tokens)

    def _sent(self, tokens: Real, sends: Ints) -> Ints:
        """Bytes of hidden states and gradients that are still being sent."""
        pp = self.strategies.pp
        sends = np.where(pp > 1, np.minimum(sends, SENDS_PER_STAGE * pp), 0)
        return self.layer.bytes(tokens, sends * self.layer.stream)

    @property
    def _last(self) -> Ints:
        return self.strategies.pp - 1


def _peak(*moments: Parts) -> Parts:
    """Return the parts at the moment with the largest total, for each stage and strategy."""
    peak, *others = moments
    for moment in others:
        peak = choose(total(moment) > total(peak), moment, peak)
    return peak


def total(parts: Parts) -> Ints:
    return np.asarray(sum(parts.values()))


def choose(where: Bools, parts: Parts, others: Parts) -> Parts:
    """Choose `parts` if `where` is true, and `others` if not, for each stage and strategy."""
    names = {**others, **parts}
    return {name: np.where(where, parts.get(name, 0), others.get(name, 0)) for name in names}


def _only(where: Bools, parts: Parts) -> Parts:
    """Keep parts for the stages and strategies where `where` is true, and set them to 0 for all others."""
    return {name: np.where(where, size, 0) for name, size in parts.items()}
