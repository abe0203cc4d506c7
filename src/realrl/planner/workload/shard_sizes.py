"""Shard sizes of a model on one TP rank."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np

from realrl.families.adapters import LORA_A, is_adapted, list_modules
from realrl.families.quantisation import SCALES
from realrl.families.registry import find_layer_options, model_tensors, ties_embeddings
from realrl.families.shape import Head, LayerOptions, ModelShape
from realrl.families.tensors import Parameter, Partial, Place, TensorSpec
from realrl.layout.limits import count_kept_logit_rows, count_logit_rows
from realrl.layout.local_tensors import count_shard_rows, local_tensor
from realrl.layout.ranges import check_experts, feed_forward, padded_vocabulary, stage_layers
from realrl.layout.sets import WHOLE, ParameterSet, TrainablePart, build_parameter_sets
from realrl.layout.shard import Shard
from realrl.plan.placement import Dtype
from realrl.planner.cluster.devices import DeviceKind
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
        return max(len(feed_forward(self.shape, self.tp, t)) for t in range(self.tp))

    @property
    def expert_dim(self) -> int:
        """Feed-forward dimension of an expert on one rank. With expert parallelism, the rank holds it whole."""
        return self.ffn_dim if self.ep == 1 else self.shape.intermediate_size

    @property
    def expert_gate_up_dim(self) -> int:
        """Dimension of an expert before the activation: gate and up together."""
        return self.expert_dim * self.gate_up_dim // self.ffn_dim

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
        aligned = not any(side % _ALIGNED for matrix in self.expert_shapes for side in matrix)
        return device.groups_products and dtype == "bfloat16" and not exact and aligned

    def runs_ahead(self, dtype: Dtype, *, exact: bool, device: DeviceKind) -> bool:
        """Check whether the host can launch decode steps without reading results, so that CUDA graphs are possible.

        Without a grouped kernel, the host multiplies expert by expert and must read how many rows each expert has.
        """
        grouped = not self.experts or self.groups_products(dtype, exact=exact, device=device)
        return not device.cpu and grouped

    @property
    def shared_blocks(self) -> int:
        """Number of feed-forward blocks per layer that all tokens pass through. It is 0 for experts without a
        shared block, and 1 for all other layers."""
        return int(self.shape.mixture is None or self.shape.mixture.shared)

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
        """Tensors of a layer. `check_family` accepts no family whose layers differ."""
        specs = model_tensors(self.shape.model_copy(update={"layers": 1}), self.head)
        return [spec for spec in specs if spec.layer == 0]

    @cached_property
    def sets(self) -> Mapping[str, "SetSizes"]:
        found = build_parameter_sets(self.shape, self.head, self.part, trained=True)
        return {name: self._set_sizes(of) for name, of in found.items()}

    @cached_property
    def parameter_counts(self) -> Mapping[str, int]:
        """Number of named parameters in a layer ("layer"), before the layers ("embedding"), and after them
        ("end")."""
        found = {"layer": set[str](), "embedding": set[str](), "end": set[str]()}
        for spec in model_tensors(self.shape, self.head):
            outside = "end" if spec.place is Place.LAST else "embedding"
            found["layer" if spec.layer is not None else outside].add(spec.parameter)
        return {name: len(parameters) for name, parameters in found.items()}

    @lru_cache(maxsize=256)  # noqa: B019 -- instances are few and small
    def cut_sets(self, copies: int, expert_copies: int) -> "Mapping[str, SetSizes]":
        """Compute the sizes of parameter sets if each of the ranks with the same parameters stores its own rows
        (ZeRO-3). `expert_copies` ranks have the same experts, and `copies` ranks have the same other parameters."""
        return {
            name: self._set_sizes(of, copies, expert_copies)
            for name, of in build_parameter_sets(self.shape, self.head, self.part, trained=True).items()
        }

    def _set_sizes(self, of: ParameterSet, copies: int = 1, expert_copies: int = 1) -> "SetSizes":
        layer = [0] * self.tp
        experts = 0
        embedding = [0] * self.tp
        end = [0] * self.tp
        for (place, _), specs in groupby(of.tensors, key=lambda spec: (spec.place, spec.parameter)):
            in_layer = not isinstance(place, Place)
            if in_layer and place != of.layers[0]:
                continue  # `check_family` makes sure that all layers are alike.
            sums, stack = layer if in_layer else end if place is Place.LAST else embedding, list(specs)
            if self.ep > 1 and stack[0].expert is not None:
                whole = [local_tensor(self.shape, spec, 1, 0) for spec in stack[: len(stack) // self.ep]]
                experts += count_shard_rows(whole, expert_copies) * math.prod(whole[0].shape[1:])
                continue
            for t in range(self.tp):
                local = [local_tensor(self.shape, spec, self.tp, t) for spec in stack]
                sums[t] += count_shard_rows(local, copies) * math.prod(local[0].shape[1:])
        return SetSizes(
            layers_of_model=self.shape.layers,
            layers=of.layers,
            layer=tuple(layer),
            experts=experts,
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
        return sum(max(sizes.layer) + sizes.experts for sizes in self.sets.values() if 0 in sizes.layers)


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


@dataclass(frozen=True, kw_only=True)
class SetSizes:
    """Number of elements of a parameter set. Tuples of elements have an entry for each tensor-parallel rank."""

    layers_of_model: int
    layers: tuple[int, ...]
    """Layers of the model that have parameters in the set, ascending."""
    layer: tuple[int, ...]
    """Elements of one of these layers, without those in `experts`. All layers have equal sizes."""
    experts: int
    """Elements of whole experts in each of these layers on one rank of expert parallelism, otherwise 0."""
    embedding: tuple[int, ...]
    """Elements of the embedding. They are on the first pipeline stage, and also on the last stage if the head is
    tied to the embedding."""
    end: tuple[int, ...]
    """Elements after the layers, on the last stage."""
    tied: bool
    """Whether the head is tied to the embedding."""

    @lru_cache(maxsize=4096)  # noqa: B019 -- instances are few and small
    def stage_layers(self, pp: int) -> tuple[int, ...]:
        """Count the layers of the set on each stage of a pipeline."""
        stages = stage_layers(self.layers_of_model, pp)
        return tuple(
            bisect_left(self.layers, stage.stop) - bisect_left(self.layers, stage.start) for stage in stages
        )

    def stage_elements(self, pp: int) -> tuple[int, ...]:
        """Compute the elements that each pipeline stage stores on its TP rank with the most elements, without those
        of `stage_experts`."""
        result = []
        for stage, layers in enumerate(self.stage_layers(pp)):
            own = [layers * elements for elements in self.layer]
            if stage == 0 or (stage == pp - 1 and self.tied):
                own = [a + b for a, b in zip(own, self.embedding, strict=True)]
            if stage == pp - 1:
                own = [a + b for a, b in zip(own, self.end, strict=True)]
            result.append(max(own))
        return tuple(result)

    def stage_experts(self, pp: int) -> tuple[int, ...]:
        """Compute the elements of whole experts that a rank of each pipeline stage stores under expert
        parallelism."""
        return tuple(layers * self.experts for layers in self.stage_layers(pp))
