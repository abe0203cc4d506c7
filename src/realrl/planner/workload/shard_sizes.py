"""Shard sizes of a model on one TP rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from realrl.families.adapters import LORA_A, STACKS_A, AdaptedStack, is_adapted, list_modules
from realrl.families.quantisation import SCALES
from realrl.families.registry import find_layer_options, model_tensors, ties_embeddings
from realrl.families.shape import Head, LayerOptions, ModelShape, split_kinds
from realrl.families.tensors import Parameter, Partial, Place, TensorSpec
from realrl.layout.limits import count_kept_logit_rows, count_logit_rows
from realrl.layout.local_tensors import count_shard_rows, local_tensor
from realrl.layout.ranges import check_experts, feed_forward, padded_vocabulary, virtual_stage_layers
from realrl.layout.sets import WHOLE, ParameterSet, TrainablePart, build_parameter_sets
from realrl.layout.shard import Shard
from realrl.plan.placement import Dtype
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.workload.stages import Stages, count_within
from realrl.program.arrays import Bools, Ints, Real, truncate
from realrl.program.memory import StoredModel

_ALIGNED = 8
"""The grouped kernel needs expert matrices in bfloat16 whose two sides are multiples of this number."""


@dataclass(frozen=True)
class LocalSizes:
    """Shard sizes under TP degree `tp` and EP degree `ep`, in elements. Each size is that of the rank with the
    largest shard."""

    shape: ModelShape
    head: Head
    tp: int
    part: TrainablePart = WHOLE
    ep: int = 1
    model: ModelShape | None = None
    """The whole model, if `shape` describes one of its kinds of layers. Only the sizes of layers are then known."""

    @cached_property
    def kinds(self) -> tuple["KindSizes", ...]:
        """Sizes of each kind of layer. If there are several, each of them answers for its own layers."""
        found = split_kinds(self.shape)
        if len(found) == 1:
            return (KindSizes(self, found[0].layers),)
        return tuple(
            KindSizes(replace(self, shape=kind.shape, model=self.shape), kind.layers) for kind in found
        )

    @property
    def model_sizes(self) -> "LocalSizes":
        """Sizes of the whole model, if these are the sizes of one of its kinds of layers."""
        return self if self.model is None else replace(self, shape=self.model, model=None)

    def without_adapters(self) -> "LocalSizes":
        """Sizes of the same model, or of the same kind of layers, without adapters."""
        bare = {"lora": None}
        model = None if self.model is None else self.model.model_copy(update=bare)
        return replace(self, shape=self.shape.model_copy(update=bare), model=model)

    @cached_property
    def _shards(self) -> list[Shard]:
        return [Shard(self.shape, self.head, self.tp, t) for t in range(self.tp)]

    @cached_property
    def q_dim(self) -> int:
        """Query dimension: heads times head size."""
        return self.shape.head_dim * max(len(shard.queries) for shard in self._shards)

    @cached_property
    def kv_dim(self) -> int:
        """Key dimension, which equals the value dimension."""
        return self.shape.head_dim * max(len(shard.keys) for shard in self._shards)

    @cached_property
    def cache_dim(self) -> int:
        """Key dimension as stored in the KV cache.

        If query heads do not divide evenly among key heads, the cache stores keys for every query head.
        """
        uneven = any(shard.uneven_groups is not None for shard in self._shards)
        return self.q_dim if uneven else self.kv_dim

    @cached_property
    def ffn_dim(self) -> int:
        """Feed-forward dimension of the block that all tokens pass through, or of an expert if there is none."""
        assert not self.shape.dense_layers, "each kind of layer has sizes of its own"
        mixture = self.shape.mixture
        return self._divide_units(self.shape.intermediate_size * (mixture.shared or 1 if mixture else 1))

    def _divide_units(self, units: int) -> int:
        return max(len(feed_forward(units, self.tp, t)) for t in range(self.tp))

    @cached_property
    def expert_dim(self) -> int:
        """Feed-forward dimension of an expert on one rank. With expert parallelism, the rank holds it whole."""
        units = self.shape.intermediate_size
        return self._divide_units(units) if self.ep == 1 else units

    @property
    def expert_gate_up_dim(self) -> int:
        """Dimension of an expert before the activation: gate and up together."""
        return (1 + self.options.gated) * self.expert_dim

    @cached_property
    def options(self) -> LayerOptions:
        return find_layer_options(self.shape)

    @cached_property
    def gate_up_dim(self) -> int:
        """Feed-forward dimension before the activation: gate and up together, or only up."""
        return (1 + self.options.gated) * self.ffn_dim

    @cached_property
    def padded_vocab(self) -> int:
        """Vocabulary rows of the embedding table, padding included."""
        return padded_vocabulary(self.shape, self.tp)

    @cached_property
    def matrices(self) -> Mapping[Parameter, tuple[int, int]]:
        """Sizes of a layer's matrices that multiply all tokens, as (outputs, inputs)."""
        hidden, mixture = self.shape.hidden_size, self.shape.mixture
        attention: dict[Parameter, tuple[int, int]] = {
            "qkv": (self.q_dim + 2 * self.kv_dim, hidden),
            "out": (hidden, self.q_dim),
        }
        router: dict[Parameter, tuple[int, int]] = {}
        if mixture is not None:
            router = {"router": (mixture.experts, hidden)}
        if not self.shared_blocks:
            return attention | router
        return attention | router | {"gate_up": (self.gate_up_dim, hidden), "down": (hidden, self.ffn_dim)}

    @property
    def matmul_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.matrices.values())

    @cached_property
    def expert_shapes(self) -> tuple[tuple[int, int], ...]:
        """Sizes of an expert's matrices as (outputs, inputs): gate and up, then down. Empty if there are no
        experts."""
        hidden = self.shape.hidden_size
        if self.shape.mixture is None:
            return ()
        return (self.expert_gate_up_dim, hidden), (hidden, self.expert_dim)

    @cached_property
    def widened_shapes(self) -> tuple[tuple[int, int], ...]:
        """Sizes of a layer's quantised matrices, which are widened for their products. Empty without quantisation.

        The matrices of all experts are widened at once.
        """
        if self.shape.quantised is None:
            return ()
        own = tuple(size for matrix, size in self.matrices.items() if matrix in SCALES)
        return own + tuple((self.experts * rows, columns) for rows, columns in self.expert_shapes)

    @property
    def experts(self) -> int:
        """Number of experts of a layer. 0 if the model is not a mixture of experts."""
        return 0 if self.shape.mixture is None else self.shape.mixture.experts

    @property
    def copies(self) -> float:
        """Number of rows that the experts of a rank compute in a layer, per token of the rank, on average. 0 if the
        model is not a mixture of experts.

        With expert parallelism, TP ranks divide the tokens among themselves before they send them to experts.
        """
        if self.shape.mixture is None:
            return 0
        return self.shape.mixture.per_token / (1 if self.ep == 1 else self.tp)

    def groups_products(self, dtype: Dtype, *, exact: bool, device: DeviceKind) -> bool:
        """Check whether one grouped kernel multiplies the rows of all experts, as `has_grouped_kernel` of the
        engine does."""
        sides = [side for matrix in self.expert_shapes for side in matrix]
        sides += [adapter.rank for adapter in self.expert_adapters.values()]
        aligned = not any(side % _ALIGNED for side in sides)
        return device.groups_products and dtype == "bfloat16" and not exact and aligned

    def runs_ahead(self, dtype: Dtype, *, exact: bool, device: DeviceKind) -> bool:
        """Check whether the host can launch decode steps without reading results, so that CUDA graphs are possible.

        Without a grouped kernel, the host multiplies expert by expert and must read how many rows each expert has.
        If a model has several kinds of layers, the answer is the same for all of them.
        """
        model = self.model_sizes
        grouped = not model.experts or model.groups_products(dtype, exact=exact, device=device)
        return not device.cpu and grouped

    @property
    def shared_blocks(self) -> int:
        """Number of feed-forward blocks per layer that all tokens pass through. It is 0 for experts without a
        shared block, and 1 for all other layers."""
        return int(self.shape.mixture is None or self.shape.mixture.shared > 0)

    @property
    def expert_biases(self) -> bool:
        """Whether the experts have biases."""
        return self.shape.mixture is not None and self.options.mlp_bias

    @property
    def weighs_inputs(self) -> bool:
        """Whether the router's weights multiply the inputs of experts instead of their outputs."""
        return self.shape.mixture is not None and self.shape.mixture.weighed == "inputs"

    @cached_property
    def adapters(self) -> tuple["AdapterSizes", ...]:
        """Adapters of a layer's matrices. Matrices without adapters have no entry."""
        lora = self.shape.lora
        if lora is None:
            return ()
        specs: dict[Parameter, list[TensorSpec]] = {}
        for spec in self._layer_specs:
            specs.setdefault(spec.parameter, []).append(spec)

        def rows(spec: TensorSpec) -> int:
            return max(local_tensor(self.shape, spec, self.tp, t).shape[0] for t in range(self.tp))

        found = []
        for matrix in LORA_A:
            modules = [m for m in list_modules(specs.get(matrix, ())) if is_adapted(m, lora)]
            if modules:
                blocks = tuple(sum(map(rows, module.parts)) for module in modules)
                _, inputs = self.matrices[matrix]
                found.append(AdapterSizes(inputs, lora.rank, blocks, lora.dora))
        return tuple(found)

    @cached_property
    def expert_adapters(self) -> "Mapping[AdaptedStack, AdapterSizes]":
        """Adapters of one expert's matrices."""
        lora = self.shape.lora
        if lora is None:
            return {}
        held = {spec.parameter for spec in model_tensors(self.model or self.shape, self.head)}
        # The order of matrices is the same: gate and up, then down.
        stacks = zip(STACKS_A, self.expert_shapes, strict=False)
        return {
            stack: AdapterSizes(inputs, lora.rank, (outputs,), dora=False)
            for stack, (outputs, inputs) in stacks
            if STACKS_A[stack] in held
        }

    @property
    def frozen_matrices(self) -> bool:
        """Whether training updates only adapters, so that layers with a backward pass have frozen matrices."""
        return self.part.adapters

    @cached_property
    def shares_kv_heads(self) -> bool:
        """Whether some key/value head is replicated on several TP ranks."""
        return self._shards[0].shares_keys

    @cached_property
    def qk_norm(self) -> bool:
        """Whether the heads of queries and keys are normalised."""
        without_weights = self.options.qk_norm == "rotated"
        return without_weights or any(spec.parameter == "q_norm" for spec in self._layer_specs)

    def partial_elements(self, *, sequence_parallel: bool) -> int:
        """Count a layer's elements with partial gradients, which TP ranks all-reduce. Shared key/value heads do not
        count."""
        partial = {Partial.TENSOR_PARALLEL} | ({Partial.SEQUENCE_PARALLEL} if sequence_parallel else set())
        # With expert parallelism, one TP rank computes all of an expert.
        specs = (spec for spec in self._layer_specs if spec.expert is None or self.ep == 1)
        return sum(
            math.prod(local_tensor(self.shape, spec, self.tp, 0).shape)
            for spec in specs
            if spec.partial_gradient in partial and self.part.updates(spec, 1)
        )

    @cached_property
    def _layer_specs(self) -> list[TensorSpec]:
        """Tensors of a layer. `check_family` accepts no family whose layers of one kind differ."""
        assert not self.shape.dense_layers, "each kind of layer has tensors of its own"
        model = self.model or self.shape
        first = next(kind.layers[0] for kind in split_kinds(model) if kind.shape == self.shape)
        return [spec for spec in model_tensors(model, self.head) if spec.layer == first]

    @property
    def layer_parameters(self) -> int:
        """Number of named parameters in a layer."""
        return len({spec.parameter for spec in self._layer_specs})

    @cached_property
    def sets(self) -> Mapping[str, "SetSizes"]:
        found = build_parameter_sets(self.shape, self.head, self.part, trained=True)
        return {name: self._set_sizes(of) for name, of in found.items()}

    @cached_property
    def parameter_counts(self) -> Mapping[str, int]:
        """Number of named parameters before the layers ("embedding"), and after them ("end")."""
        found = {"embedding": set[str](), "end": set[str]()}
        for spec in model_tensors(self.shape, self.head):
            if spec.layer is None:
                found["end" if spec.place is Place.LAST else "embedding"].add(spec.parameter)
        return {name: len(parameters) for name, parameters in found.items()}

    @lru_cache(maxsize=4096)  # noqa: B019 -- instances are few and small
    def cut_sets(self, copies: int, expert_copies: int) -> "Mapping[str, SetSizes]":
        """Compute the sizes of parameter sets if each of the ranks with the same parameters stores its own rows
        (ZeRO-3). `expert_copies` ranks have the same experts, and `copies` ranks have the same other parameters."""
        return {
            name: self._set_sizes(of, copies, expert_copies)
            for name, of in build_parameter_sets(self.shape, self.head, self.part, trained=True).items()
        }

    def _set_sizes(self, of: ParameterSet, copies: int = 1, expert_copies: int = 1) -> "SetSizes":
        assert self.model is None, "a kind of layer has no parameter sets"
        held = {*of.layers}
        numbers = [tuple(n for n in kind.layers if n in held) for kind in self.kinds]
        # `check_family` makes sure that all layers of a kind are alike, so the first one stands for all.
        layers = {of_kind[0]: _LayerSums([0] * self.tp) for of_kind in numbers if of_kind}
        embedding = [0] * self.tp
        end = [0] * self.tp
        for stack in of.stacks:
            place = stack[0].place
            if not isinstance(place, Place) and place not in layers:
                continue
            if isinstance(place, Place):
                sums = end if place is Place.LAST else embedding
            else:
                sums = layers[place].others
                if self.ep > 1 and stack[0].expert is not None:
                    whole = [local_tensor(self.shape, spec, 1, 0) for spec in stack[: len(stack) // self.ep]]
                    rows = count_shard_rows(whole, expert_copies)
                    layers[place].experts += rows * math.prod(whole[0].shape[1:])
                    continue
            for t in range(self.tp):
                local = [local_tensor(self.shape, spec, self.tp, t) for spec in stack]
                sums[t] += count_shard_rows(local, copies) * math.prod(local[0].shape[1:])
        found = [(of_kind, layers[of_kind[0]]) for of_kind in numbers if of_kind]
        return SetSizes(
            layers_of_model=self.shape.layers,
            kinds=tuple(LayerSizes(of_kind, tuple(sums.others), sums.experts) for of_kind, sums in found),
            embedding=tuple(embedding),
            end=tuple(end),
            tied=ties_embeddings(self.shape, self.head),
        )

    @cached_property
    def trained(self) -> "SetSizes":
        """Sizes of the parameter set that training updates, or would update."""
        return next(self.sets[name] for name, updated in self.part.sets.items() if updated)

    @cached_property
    def trains_head(self) -> bool:
        """Whether training updates the head, which may be frozen or tied to a frozen embedding table."""
        if not self.trained.tied:
            return any(self.trained.end)
        # Trained embeddings need not include the tied table, for example if only positions are trained.
        found = build_parameter_sets(self.shape, self.head, self.part, trained=True)
        updated = next(name for name, trains in self.part.sets.items() if trains)
        return any(spec.place is Place.BOTH_ENDS for spec in found[updated].tensors)

    def keeps_logits(self, tokens: Real, *, cpu: bool) -> Bools:
        """Check whether training keeps the logits of `tokens` tokens. A CPU does not keep capped logits."""
        capped = self.options.logit_cap is not None and cpu
        return np.asarray(tokens <= (0 if capped else count_kept_logit_rows(self.padded_vocab, cpu=cpu)))

    def count_logit_chunks(self, tokens: Real, *, cpu: bool) -> tuple[Real, Ints]:
        """Return the rows per chunk of logits, and the number of chunks, for `tokens` tokens."""
        rows = count_logit_rows(self.padded_vocab, cpu=cpu)
        return np.minimum(rows, tokens), truncate(np.ceil(tokens / rows))

    @cached_property
    def layer_elements(self) -> int:
        """Number of elements of the first layer on the rank with the most elements, adapters included."""
        layers = [sizes.find_layer(0) for sizes in self.sets.values()]
        return sum(max(layer.elements) + layer.experts for layer in layers)

    def count_differentiated(self, stages: Stages) -> Ints:
        """Count the layers of each pipeline stage that gradients flow through, [stages, strategies]."""
        counts = [kind.count(stages, within=self.differentiated_layers) for kind in self.kinds]
        return np.sum(counts, axis=0)

    @cached_property
    def differentiated_layers(self) -> range:
        """Layers that gradients flow through: those from the first layer with trained parameters on."""
        layers = self.trained.layers
        return range(layers[0] if layers else self.shape.layers, self.shape.layers)


@lru_cache(maxsize=4096)
def size_shards(model: StoredModel, tp: int, ep: int = 1) -> LocalSizes:
    """Size the shards of a model. Raises UserError if `ep` ranks cannot divide its experts."""
    check_experts(model.shape, ep)
    return LocalSizes(model.shape, model.head, tp, model.part, ep)


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes of the adapters of a matrix on one TP rank."""

    inputs: int
    rank: int
    blocks: tuple[int, ...]
    """Rows of each block of the matrix. Every block has its own A and B."""
    dora: bool

    @property
    def inner(self) -> int:
        """Elements per token between A and B."""
        return self.rank * len(self.blocks)

    @property
    def rows(self) -> int:
        """Number of rows of the matrix that have adapters."""
        return sum(self.blocks)

    @property
    def elements(self) -> int:
        """Number of parameters of A and B."""
        return self.inner * self.inputs + self.rank * self.rows


@dataclass
class _LayerSums:
    others: list[int]
    experts: int = 0


@dataclass(frozen=True)
class KindSizes:
    """Layers of one kind, see `split_kinds`."""

    sizes: LocalSizes
    """Sizes of a model that has only such layers."""
    layers: tuple[int, ...]
    """Numbers of these layers in the whole model, ascending."""

    def count(self, stages: Stages, *, within: range | None = None) -> Ints:
        """Count these layers on each pipeline stage, or those of them in a range, [stages, strategies]."""
        layers, of_model = self.list_within(within), self.sizes.shape.layers
        return stages.tabulate(lambda pp, vpp: _count_on_stages(layers, of_model, pp, vpp))

    def count_flying(self, stages: Stages, micro_batches: Ints, *, within: range) -> Ints:
        """Count these layers, as far as they are in a range, in all passes whose activations a pipeline stage
        keeps at a time (`Stages.count_flying_layers`)."""
        return stages.count_flying_layers(micro_batches, self.list_within(within), self.sizes.shape.layers)

    def count_in_turns(self, stages: Stages, *, within: range, most: bool) -> Ints:
        """Count these layers, as far as they are in a range, in the turn of each pipeline stage that has the most
        or the fewest of them, [stages, strategies]."""
        layers, of_model, choose = self.list_within(within), self.sizes.shape.layers, max if most else min

        def of(pp: int, vpp: int) -> list[int]:
            stages = virtual_stage_layers(of_model, pp, vpp)
            return [choose(count_within(layers, run) for run in runs) for runs in stages]

        return stages.tabulate(of)

    def list_within(self, within: range | None) -> tuple[int, ...]:
        """List the numbers of these layers, or of those in a range, ascending."""
        return self.layers if within is None else tuple(n for n in self.layers if n in within)

    def end_stages(self, stages: Stages) -> Ints:
        """Mark the pipeline stages whose last layer is one of these, with 1, [stages, strategies]."""
        layers, of_model = frozenset(self.layers), self.sizes.shape.layers
        return stages.tabulate(
            lambda pp, vpp: [
                int(runs[-1].stop - 1 in layers) for runs in virtual_stage_layers(of_model, pp, vpp)
            ]
        )


@lru_cache(maxsize=4096)
def _count_on_stages(layers: tuple[int, ...], of_model: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Count some of a model's layers, given in ascending order, on each stage of a pipeline."""
    return tuple(
        sum(count_within(layers, run) for run in runs) for runs in virtual_stage_layers(of_model, pp, vpp)
    )


@dataclass(frozen=True)
class LayerSizes:
    """Number of elements that a parameter set has in each of some layers, which are alike."""

    layers: tuple[int, ...]
    """Numbers of these layers, ascending."""
    elements: tuple[int, ...]
    """Elements of a layer without those in `experts`, for each tensor-parallel rank."""
    experts: int
    """Elements of whole experts in a layer on one rank of expert parallelism, otherwise 0."""


@dataclass(frozen=True, kw_only=True)
class SetSizes:
    """Number of elements of a parameter set. Tuples of elements have an entry for each tensor-parallel rank."""

    layers_of_model: int
    kinds: tuple[LayerSizes, ...]
    """The layers of the model that have parameters in the set, by kind."""
    embedding: tuple[int, ...]
    """Elements of the embedding. They are on the first pipeline stage, and also on the last stage if the head is
    tied to the embedding."""
    end: tuple[int, ...]
    """Elements after the layers, on the last stage."""
    tied: bool
    """Whether the head is tied to the embedding."""

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model that have parameters in the set, ascending."""
        return tuple(sorted(layer for kind in self.kinds for layer in kind.layers))

    def find_layer(self, layer: int) -> LayerSizes:
        """Find the sizes of a layer, which are 0 if it has no parameters in the set."""
        nothing = LayerSizes((layer,), (0,) * len(self.embedding), 0)
        return next((kind for kind in self.kinds if layer in kind.layers), nothing)

    @lru_cache(maxsize=4096)  # noqa: B019 -- instances are few and small
    def stage_layers(self, pp: int, vpp: int = 1) -> tuple[int, ...]:
        """Count the layers of the set on each stage of a pipeline."""
        return _count_on_stages(self.layers, self.layers_of_model, pp, vpp)

    def stage_elements(self, pp: int, vpp: int = 1) -> tuple[int, ...]:
        """Compute the elements that each pipeline stage stores on its TP rank with the most elements, without those
        of `stage_experts`."""
        stages = [[0] * len(self.embedding) for _ in range(pp)]
        for kind in self.kinds:
            for own, layers in zip(stages, self._count(kind, pp, vpp), strict=True):
                for t, elements in enumerate(kind.elements):
                    own[t] += layers * elements
        for stage, own in enumerate(stages):
            for t in range(len(own)):
                if stage == 0 or (stage == pp - 1 and self.tied):
                    own[t] += self.embedding[t]
                if stage == pp - 1:
                    own[t] += self.end[t]
        return tuple(map(max, stages))

    def stage_experts(self, pp: int, vpp: int = 1) -> tuple[int, ...]:
        """Compute the elements of whole experts that a rank of each pipeline stage stores under expert
        parallelism."""
        counts = [[layers * kind.experts for layers in self._count(kind, pp, vpp)] for kind in self.kinds]
        return tuple(map(sum, zip(*counts, strict=True))) if counts else (0,) * pp

    def _count(self, kind: LayerSizes, pp: int, vpp: int) -> tuple[int, ...]:
        return _count_on_stages(kind.layers, self.layers_of_model, pp, vpp)
