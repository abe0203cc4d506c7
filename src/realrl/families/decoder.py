"""The tensor table of Llama-like decoders: layer options in, tensors under their Hugging Face names out."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from realrl.config.errors import DescriptionError
from realrl.config.words import join
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Axis, Init, Parameter, Partial, Partition, Place, TensorSpec

_NORMS = ("rms", "layer")


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options in which families of decoders differ."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with a bias."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    out_bias: bool = False
    """Whether attention's output projection has one."""
    mlp_bias: bool = False
    """Whether the three matrices of the feed-forward block have biases."""
    head_bias: bool = False
    """Whether the language-model head has a bias."""
    qk_norm: bool = False
    """Whether each head of queries and keys is normalised, by an RMSNorm over its dims."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "norm":
                if value not in _NORMS:
                    raise DescriptionError(f"LayerOptions: norm={value!r} is not {join(_NORMS, 'or')}")
            elif not isinstance(value, bool):
                raise DescriptionError(f"LayerOptions: {option.name}={value!r} is not True or False")


def decoder_tensors(shape: ModelShape, head: Head, options: LayerOptions) -> tuple[TensorSpec, ...]:
    """Build the tensor table of a model, in storage order.

    Matrices are [output rows, input columns]. Tensors that are one parameter of the transformer are neighbours, so
    that they are one matrix, or one vector, when stored back to back. A language-model head is listed only where
    it is not the embedding table; a scalar head is `score.weight` [1, hidden].
    """
    hidden, tied = shape.hidden_size, shape.tied_embeddings and head == "lm"
    rows = Partition(Axis.VOCABULARY)
    tensors = [
        TensorSpec(
            name="model.embed_tokens.weight",
            shape=(shape.vocab_size, hidden),
            parameter="embedding",
            place=Place.BOTH_ENDS if tied else Place.FIRST,
            partition=rows,
        )
    ]
    for layer in range(shape.layers):
        tensors += _layer_tensors(shape, options, layer)
    tensors += _norm("model.norm", "norm", shape, options, Place.LAST)
    if head == "scalar":
        score = TensorSpec(name="score.weight", shape=(1, hidden), parameter="scalar_head", place=Place.LAST)
        tensors.append(score)
    elif not tied:
        tensors.append(
            TensorSpec(
                name="lm_head.weight",
                shape=(shape.vocab_size, hidden),
                parameter="lm_head",
                place=Place.LAST,
                partition=rows,
            )
        )
    if options.head_bias and head == "lm":
        tensors.append(
            TensorSpec(
                name="lm_head.bias",
                shape=(shape.vocab_size,),
                parameter="lm_head_bias",
                place=Place.LAST,
                partition=rows,
                init=Init.ZEROS,
                decay=False,
            )
        )
    return tuple(tensors)


def _layer_tensors(shape: ModelShape, options: LayerOptions, layer: int) -> Iterator[TensorSpec]:
    hidden = shape.hidden_size
    ffn_dim = shape.intermediate_size
    q_dim = shape.heads * shape.head_dim
    kv_dim = shape.kv_heads * shape.head_dim
    root = f"model.layers.{layer}"
    attention = f"{root}.self_attn"
    qkv = {
        f"{attention}.q_proj": (q_dim, Axis.QUERY_HEADS),
        f"{attention}.k_proj": (kv_dim, Axis.KV_HEADS),
        f"{attention}.v_proj": (kv_dim, Axis.KV_HEADS),
    }
    gate_up = {f"{root}.mlp.{name}": (ffn_dim, Axis.FEED_FORWARD) for name in ("gate_proj", "up_proj")}
    yield from _norm(f"{root}.input_layernorm", "attention_norm", shape, options, layer)
    yield from _column_parallel(qkv, hidden, "qkv", layer)
    if options.qkv_bias:
        yield from _column_biases(qkv, "qkv_bias", layer)
    if options.qk_norm:
        yield _head_norm(f"{attention}.q_norm.weight", "q_norm", shape, layer)
        yield _head_norm(f"{attention}.k_norm.weight", "k_norm", shape, layer)
    yield _row_parallel(f"{attention}.o_proj", (hidden, q_dim), Axis.QUERY_HEADS, "out", layer)
    if options.out_bias:
        yield _residual_vector(f"{attention}.o_proj.bias", "out_bias", shape, Init.ZEROS, layer)
    yield from _norm(f"{root}.post_attention_layernorm", "mlp_norm", shape, options, layer)
    yield from _column_parallel(gate_up, hidden, "gate_up", layer)
    if options.mlp_bias:
        yield from _column_biases(gate_up, "gate_up_bias", layer)
    yield _row_parallel(f"{root}.mlp.down_proj", (hidden, ffn_dim), Axis.FEED_FORWARD, "down", layer)
    if options.mlp_bias:
        yield _residual_vector(f"{root}.mlp.down_proj.bias", "down_bias", shape, Init.ZEROS, layer)


def _norm(
    name: str,
    parameter: Literal["attention_norm", "mlp_norm", "norm"],
    shape: ModelShape,
    options: LayerOptions,
    place: int | Place,
) -> Iterator[TensorSpec]:
    yield _residual_vector(f"{name}.weight", parameter, shape, Init.ONES, place)
    if options.norm == "layer":
        biases: dict[str, Parameter] = {
            "attention_norm": "attention_norm_bias",
            "mlp_norm": "mlp_norm_bias",
            "norm": "norm_bias",
        }
        yield _residual_vector(f"{name}.bias", biases[parameter], shape, Init.ZEROS, place)


def _residual_vector(
    name: str, parameter: Parameter, shape: ModelShape, init: Init, place: int | Place
) -> TensorSpec:
    """Describe a vector that is applied to the residual stream, or added to it.

    Every tensor-parallel rank does so to all tokens or, with sequence parallelism, to its own.
    """
    return TensorSpec(
        name=name,
        shape=(shape.hidden_size,),
        parameter=parameter,
        place=place,
        init=init,
        decay=False,
        partial_gradient=Partial.SEQUENCE_PARALLEL,
    )


def _head_norm(name: str, parameter: Parameter, shape: ModelShape, layer: int) -> TensorSpec:
    return TensorSpec(
        name=name,
        shape=(shape.head_dim,),
        parameter=parameter,
        place=layer,
        init=Init.ONES,
        decay=False,
        partial_gradient=Partial.TENSOR_PARALLEL,
    )


def _column_parallel(
    matrices: dict[str, tuple[int, Axis]], columns: int, parameter: Parameter, layer: int
) -> Iterator[TensorSpec]:
    for name, (rows, axis) in matrices.items():
        yield TensorSpec(
            name=f"{name}.weight",
            shape=(rows, columns),
            parameter=parameter,
            place=layer,
            partition=Partition(axis),
        )


def _column_biases(
    matrices: dict[str, tuple[int, Axis]], parameter: Parameter, layer: int
) -> Iterator[TensorSpec]:
    """Describe biases cut like the rows of their matrices; each rank has the whole gradient of its part."""
    for name, (rows, axis) in matrices.items():
        yield TensorSpec(
            name=f"{name}.bias",
            shape=(rows,),
            parameter=parameter,
            place=layer,
            partition=Partition(axis),
            init=Init.ZEROS,
            decay=False,
        )


def _row_parallel(
    name: str, size: tuple[int, int], axis: Axis, parameter: Parameter, layer: int
) -> TensorSpec:
    return TensorSpec(
        name=f"{name}.weight",
        shape=size,
        parameter=parameter,
        place=layer,
        partition=Partition(axis, dim=1),
        init=Init.RESIDUAL,
    )
