"""The tensor table of all built-in families, made from a shape, layer options and names of tensors in files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from realrl.families.shape import Head, LayerOptions, Mixture, ModelShape
from realrl.families.tensors import (
    EXACT_PARTS,
    Init,
    Parameter,
    Partial,
    Partition,
    Place,
    Stored,
    StoredRows,
    TensorSpec,
    Units,
)

_NormName = Literal["attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "norm"]
_ExpertMatrix = Literal["experts_gate_up", "experts_down"]
_BIASES: dict[_NormName | _ExpertMatrix, Parameter] = {
    "attention_norm": "attention_norm_bias",
    "attention_post_norm": "attention_post_norm_bias",
    "mlp_norm": "mlp_norm_bias",
    "mlp_post_norm": "mlp_post_norm_bias",
    "norm": "norm_bias",
    "experts_gate_up": "experts_gate_up_bias",
    "experts_down": "experts_down_bias",
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of tensors in a family's files, without `.weight` and `.bias`, and how files arrange them. Names of a
    layer's tensors follow `layers` and the layer's number. The defaults are Llama's."""

    embedding: str = "model.embed_tokens"
    positions: str = "model.positions"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    """Tensor that holds queries, keys and values; None if they are in three tensors."""
    qkv_by_heads: bool = False
    """Whether `qkv` is ordered head by head, rather than all queries, then all keys, then all values."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    out: str = "self_attn.o_proj"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    """Tensor that holds gate and then up; None if they are in two tensors."""
    down: str = "mlp.down_proj"
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    """Whole name of the numbers that are added to scores to choose experts."""
    expert: str = "mlp.experts"
    """Name before an expert's number; the names of its matrices come after the number."""
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    experts_gate_up: str | None = None
    """Tensor that holds gate and then up of all experts, [experts, inputs, outputs]; None if each expert has its
    own tensors. A tensor with the ending `_bias` holds their biases."""
    experts_alternate: bool = False
    """Whether outputs of gate and of up alternate in `experts_gate_up`."""
    experts_down: str | None = None
    """Tensor that holds the last matrices of all experts, [experts, inputs, outputs]; None if each expert has its
    own tensor."""
    experts: str = "mlp.experts"
    """Module of transformers that stacks the matrices of all experts in `gate_up_proj` and `down_proj`."""
    experts_misread: bool = False
    """Whether PEFT takes the outputs of stacked matrices for inputs, because transformers stacks them transposed
    but its module does not say so (`is_transposed`)."""
    mlp_post_norm: str = "post_feedforward_layernorm"
    norm: str = "model.norm"
    head: str = "lm_head"
    scalar_head: str = "score"
    transposed: bool = False
    """Whether files store the matrices of layers as [inputs, outputs]."""
    interleaved: bool = False
    """Whether rotary embeddings pair neighbouring dims of a head, rather than dims of its two halves."""


LLAMA_NAMES = Names()


def decoder_tensors(
    shape: ModelShape, head: Head, options: LayerOptions, names: Names = LLAMA_NAMES
) -> tuple[TensorSpec, ...]:
    """Build the tensor table of a model, in storage order.

    Matrices are [output rows, input columns]. Tensors that form one parameter of the transformer are neighbours,
    so that stored back to back they are one matrix or one vector. A language-model head is listed unless it is
    tied to the embedding table. A scalar head is one row. Dims of rotated heads are in the order of the
    transformer, which pairs the first half of a head with the second.
    """
    return tuple(_Table(shape, head, options, names).tensors())


def named_decoder(names: Names) -> Callable[[ModelShape, Head, LayerOptions], Sequence[TensorSpec]]:
    """Make the tensor table function of a family whose files use these names."""
    return partial(decoder_tensors, names=names)


@dataclass(frozen=True)
class _Table:
    shape: ModelShape
    head: Head
    options: LayerOptions
    names: Names

    def tensors(self) -> Iterator[TensorSpec]:
        shape, options, names = self.shape, self.options, self.names
        hidden, tied = shape.hidden_size, shape.tied_embeddings and self.head == "lm"
        rows = Partition(Units.VOCABULARY)
        yield TensorSpec(
            name=f"{names.embedding}.weight",
            shape=(shape.vocab_size, hidden),
            parameter="embedding",
            place=Place.BOTH_ENDS if tied else Place.FIRST,
            partition=rows,
        )
        if options.learned_positions:
            yield TensorSpec(
                name=f"{names.positions}.weight",
                shape=(shape.max_positions, hidden),
                parameter="positions",
                place=Place.FIRST,
                partial_gradient=Partial.SEQUENCE_PARALLEL,
            )
        for layer in range(shape.layers):
            yield from self._layer(layer)
        yield from self._norm(names.norm, "norm", Place.LAST)
        if self.head == "scalar":
            name = f"{names.scalar_head}.weight"
            yield TensorSpec(name=name, shape=(1, hidden), parameter="scalar_head", place=Place.LAST)
        elif not tied:
            yield TensorSpec(
                name=f"{names.head}.weight",
                shape=(shape.vocab_size, hidden),
                parameter="lm_head",
                place=Place.LAST,
                partition=rows,
            )
        if options.head_bias and self.head == "lm":
            yield TensorSpec(
                name=f"{names.head}.bias",
                shape=(shape.vocab_size,),
                parameter="lm_head_bias",
                place=Place.LAST,
                partition=rows,
                init=Init.ZEROS,
                decay=False,
            )

    def _layer(self, layer: int) -> Iterator[TensorSpec]:
        options, names = self.options, self.names
        root = f"{names.layers}.{layer}"
        before = options.norm_place != "after"
        after = options.norm_place != "before"
        if before:
            yield from self._norm(f"{root}.{names.attention_norm}", "attention_norm", layer)
        yield from self._qkv(root, layer)
        if options.sinks:
            yield TensorSpec(
                name=f"{root}.{names.sinks}",
                shape=(self.shape.heads,),
                parameter="sinks",
                place=layer,
                partition=Partition(Units.HEADS),
                decay=False,
            )
        queries = self.shape.heads * self.shape.head_dim
        yield from self._out(f"{root}.{names.out}", "out", queries, "out_bias", Units.QUERY_HEADS, layer)
        if after:
            yield from self._norm(f"{root}.{names.attention_post_norm}", "attention_post_norm", layer)
        if before:
            yield from self._norm(f"{root}.{names.mlp_norm}", "mlp_norm", layer)
        mixture = self.shape.mixture_of(layer)
        if mixture is None:
            width = self.shape.dense_size or self.shape.intermediate_size
            yield from self._block(root, layer, width, names.gate, names.up, names.down)
        else:
            yield from self._experts(root, layer, mixture)
            if mixture.shared:
                width = mixture.shared * self.shape.intermediate_size
                yield from self._block(
                    root, layer, width, names.shared_gate, names.shared_up, names.shared_down
                )
        if after:
            yield from self._norm(f"{root}.{names.mlp_post_norm}", "mlp_post_norm", layer)

    def _qkv(self, root: str, layer: int) -> Iterator[TensorSpec]:
        shape, options, names = self.shape, self.options, self.names
        dim, total = shape.head_dim, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        rotated = self._rotated_order()
        start = 0
        parts = []
        for number, (name, heads, units) in enumerate(
            (
                (names.q, shape.heads, Units.QUERY_HEADS),
                (names.k, shape.kv_heads, Units.KV_HEADS),
                (names.v, shape.kv_heads, Units.KV_HEADS),
            )
        ):
            stored = StoredRows(
                name=f"{root}.{names.qkv or name}",
                rows=total if names.qkv else heads * dim,
                start=(number * dim if names.qkv_by_heads else start) if names.qkv else 0,
                block=dim,
                period=3 * dim if names.qkv_by_heads else dim,
                order=None if number == 2 else rotated,
            )
            own = f"{root}.{names.qkv}.{'qkv'[number]}" if names.qkv else f"{root}.{name}"
            parts.append((own, heads * dim, units, stored))
            start += heads * dim
        yield from self._columns(parts, "qkv", layer)
        if options.qkv_bias:
            yield from self._columns(parts, "qkv_bias", layer, bias=True)
        if options.qk_norm in ("heads", "all"):
            q, k = f"{root}.{names.q_norm}.weight", f"{root}.{names.k_norm}.weight"
            yield self._qk_norm(q, "q_norm", shape.heads, Units.QUERY_HEADS, layer)
            yield self._qk_norm(k, "k_norm", shape.kv_heads, Units.KV_HEADS, layer)

    def _block(
        self, root: str, layer: int, ffn_dim: int, gate: str, up: str, down: str
    ) -> Iterator[TensorSpec]:
        """Describe a feed-forward block that all tokens pass through."""
        names = self.names
        own = [gate, up] if self.options.gated else [up]
        parts = []
        for number, name in enumerate(own):
            fused = names.gate_up if self.options.gated else None
            stored = StoredRows(
                name=f"{root}.{fused or name}",
                rows=len(own) * ffn_dim if fused else ffn_dim,
                start=number * ffn_dim if fused else 0,
                block=ffn_dim,
                period=ffn_dim,
            )
            part = f"{root}.{fused}.{('gate', 'up')[number]}" if fused else f"{root}.{name}"
            parts.append((part, ffn_dim, Units.FEED_FORWARD, stored))
        yield from self._columns(parts, "gate_up", layer)
        if self.options.mlp_bias:
            yield from self._columns(parts, "gate_up_bias", layer, bias=True)
        yield from self._out(f"{root}.{down}", "down", ffn_dim, "down_bias", Units.FEED_FORWARD, layer)

    def _experts(self, root: str, layer: int, mixture: Mixture) -> Iterator[TensorSpec]:
        """Describe a router and its experts.

        Tensor-parallel ranks hold a part of the units of each expert. Each rank applies the whole router to all
        tokens, but the router's output only weighs the rank's part of the experts. So each rank has only a part of
        the router's gradient.
        """
        names, experts = self.names, mixture.experts
        router = TensorSpec(
            name=f"{root}.{names.router}.weight",
            shape=(experts, self.shape.hidden_size),
            parameter="router",
            place=layer,
            partial_gradient=Partial.TENSOR_PARALLEL,
        )
        yield router
        if mixture.correction:
            yield TensorSpec(
                name=f"{root}.{names.correction}",
                shape=(experts, EXACT_PARTS),
                parameter="router_correction",
                place=layer,
                init=Init.ZEROS,
                decay=False,
                stored=Stored(
                    name=f"{root}.{names.correction}",
                    shape=(experts,),
                    block=experts,
                    period=experts,
                    exact=True,
                ),
            )
        biased = self.options.mlp_bias
        if biased:
            yield replace(
                router,
                name=f"{root}.{names.router}.bias",
                shape=(experts,),
                parameter="router_bias",
                init=Init.ZEROS,
                decay=False,
            )
        gate, up = (self._find_stacked(root, "gate_up_proj", number, parts=2) for number in (0, 1))
        columns = (names.expert_gate, gate), (names.expert_up, up)
        for bias in (False, True) if biased else (False,):
            for expert in range(experts):
                for number, (name, where) in enumerate(columns):
                    spec = self._expert(root, layer, expert, name, "experts_gate_up", where, bias=bias)
                    yield self._in_stack(spec, root, names.experts_gate_up, number, parts=2)
        where = self._find_stacked(root, "down_proj", 0, parts=1)
        for bias in (False, True) if biased else (False,):
            for expert in range(experts):
                spec = self._expert(root, layer, expert, names.expert_down, "experts_down", where, bias=bias)
                yield self._in_stack(spec, root, names.experts_down, 0, parts=1)

    def _expert(
        self,
        root: str,
        layer: int,
        expert: int,
        name: str,
        matrix: _ExpertMatrix,
        where: Stored,
        *,
        bias: bool,
    ) -> TensorSpec:
        """Describe a matrix of an expert, which transformers holds at `where`, or its bias.

        Tensor-parallel ranks sum their outputs, so only the first rank adds the biases of `experts_down`. The other
        ranks find a gradient of 0.
        """
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        last = matrix == "experts_down"
        rows, inputs = (hidden, inner) if last else (inner, hidden)
        return TensorSpec(
            name=f"{root}.{self.names.expert}.{expert}.{name}.{'bias' if bias else 'weight'}",
            shape=(rows,) if bias else (rows, inputs),
            parameter=_BIASES[matrix] if bias else matrix,
            place=layer,
            expert=expert,
            partition=None if bias and last else Partition(Units.FEED_FORWARD, dim=int(last)),
            init=Init.ZEROS if bias else Init.RESIDUAL if last else Init.NORMAL,
            decay=not bias,
            partial_gradient=Partial.TENSOR_PARALLEL if bias and last else Partial.NEVER,
            stacked=None if bias else where,
        )

    def _find_stacked(self, root: str, name: str, number: int, *, parts: int) -> Stored:
        """Find where transformers holds a matrix of each expert; see `TensorSpec.stacked` and `_in_stack`."""
        assert self.shape.mixture is not None, "only mixtures have experts"
        names, hidden, inner = self.names, self.shape.hidden_size, self.shape.intermediate_size
        each, inputs = (inner, hidden) if parts > 1 else (hidden, inner)
        rows = self._place_rows(f"{root}.{names.experts}.{name}", each, number, parts)
        matrix = (inputs, rows.rows) if names.experts_misread else (rows.rows, inputs)
        return Stored(
            name=rows.name,
            shape=(self.shape.mixture.experts, *matrix),
            start=rows.start,
            block=rows.block,
            period=rows.period,
            order=rows.order,
            transposed=names.experts_misread,
        )

    def _place_rows(self, name: str, each: int, number: int, parts: int) -> StoredRows:
        """Find the rows of part `number` in a matrix that consists of `parts` parts with `each` rows."""
        alternate = self.names.experts_alternate and parts > 1
        return StoredRows(
            name=name,
            rows=parts * each,
            start=0 if alternate else number * each,
            block=each,
            period=each,
            order=range(number, parts * each, parts) if alternate else None,
        )

    def _in_stack(
        self, spec: TensorSpec, root: str, stack: str | None, number: int, *, parts: int
    ) -> TensorSpec:
        """Describe where files hold an expert's matrix or bias `spec`, if they stack those of all experts in
        `stack`. Each stacked matrix consists of `parts` parts with the size of `spec`; `spec` is part `number`."""
        if stack is None or self.shape.mixture is None:
            return spec
        bias = len(spec.shape) == 1
        rows = self._place_rows(f"{root}.{stack}", spec.shape[0], number, parts)
        # Files stack the matrices transposed, so that `rows` are columns of each matrix in the stack.
        ending = "_bias" if bias else ""
        return rows.describe(spec, ending, transposed=not bias, stack=self.shape.mixture.experts)

    def _columns(
        self, parts: "Iterable[_Part]", parameter: Parameter, layer: int, *, bias: bool = False
    ) -> Iterator[TensorSpec]:
        """Describe column-parallel matrices, whose rows are divided among ranks, or their biases, divided alike."""
        ending = ".bias" if bias else ".weight"
        for name, rows, units, stored in parts:
            spec = TensorSpec(
                name=f"{name}{ending}",
                shape=(rows,) if bias else (rows, self.shape.hidden_size),
                parameter=parameter,
                place=layer,
                partition=Partition(units),
                init=Init.ZEROS if bias else Init.NORMAL,
                decay=not bias,
            )
            yield stored.describe(spec, ending, transposed=self.names.transposed and not bias)

    def _out(
        self,
        name: str,
        parameter: Literal["out", "down"],
        inputs: int,
        bias: Parameter,
        units: Units,
        layer: int,
    ) -> Iterator[TensorSpec]:
        """Describe a row-parallel matrix, which writes to the residual stream, and its bias if it has one."""
        hidden, options = self.shape.hidden_size, self.options
        spec = TensorSpec(
            name=f"{name}.weight",
            shape=(hidden, inputs),
            parameter=parameter,
            place=layer,
            partition=Partition(units, dim=1),
            init=Init.RESIDUAL,
        )
        whole = StoredRows(name=name, rows=hidden, start=0, block=hidden, period=hidden)
        yield whole.describe(spec, ".weight", transposed=self.names.transposed)
        if options.out_bias if parameter == "out" else options.mlp_bias:
            yield self._residual_vector(f"{name}.bias", bias, Init.ZEROS, layer)

    def _norm(self, name: str, parameter: _NormName, place: int | Place) -> Iterator[TensorSpec]:
        weight = Init.ZEROS if self.options.norm_offset else Init.ONES
        yield self._residual_vector(f"{name}.weight", parameter, weight, place)
        if self.options.norm == "layer":
            yield self._residual_vector(f"{name}.bias", _BIASES[parameter], Init.ZEROS, place)

    def _residual_vector(self, name: str, parameter: Parameter, init: Init, place: int | Place) -> TensorSpec:
        """Describe a vector that is applied or added to the residual stream. Every tensor-parallel rank does this
        to all tokens, or to its own tokens with sequence parallelism."""
        return TensorSpec(
            name=name,
            shape=(self.shape.hidden_size,),
            parameter=parameter,
            place=place,
            init=init,
            decay=False,
            partial_gradient=Partial.SEQUENCE_PARALLEL,
        )

    def _qk_norm(self, name: str, parameter: Parameter, heads: int, units: Units, layer: int) -> TensorSpec:
        dim, every = self.shape.head_dim, self.options.qk_norm == "all"
        rows = heads * dim if every else dim
        spec = TensorSpec(
            name=name,
            shape=(rows,),
            parameter=parameter,
            place=layer,
            partition=Partition(units) if every else None,
            init=Init.ZEROS if self.options.norm_offset else Init.ONES,
            decay=False,
            partial_gradient=Partial.NEVER if every else Partial.TENSOR_PARALLEL,
        )
        stored = StoredRows(name=name, rows=rows, start=0, block=dim, period=dim, order=self._rotated_order())
        return stored.describe(spec, "")

    def _rotated_order(self) -> tuple[int, ...] | None:
        """List the dims of a stored head in the order of the transformer; None if the two orders are the same.

        The transformer rotates dim i with dim i + head_dim / 2. Files put unrotated dims last in the head. The
        transformer puts half of the unrotated dims last in each half of the head.
        """
        dim, rotated = self.shape.head_dim, self.shape.rotary_dim or self.shape.head_dim
        if self.options.learned_positions or (rotated == dim and not self.names.interleaved):
            return None
        pairs = rotated // 2
        firsts = [2 * i if self.names.interleaved else i for i in range(pairs)]
        seconds = [i + 1 for i in firsts] if self.names.interleaved else [i + pairs for i in firsts]
        rest = range(rotated, dim)
        half = dim // 2 - pairs
        return (*firsts, *rest[:half], *seconds, *rest[half:])


_Part = tuple[str, int, Units, StoredRows]
"""Name of a model tensor, its number of rows, their units, and where files hold them."""
