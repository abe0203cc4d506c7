"""Descriptions of a model's global tensors. No torch."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Literal

Parameter = Literal[
    "embedding",
    "positions",
    "attention_norm",
    "attention_norm_bias",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "sinks",
    "out",
    "out_bias",
    "attention_post_norm",
    "attention_post_norm_bias",
    "mlp_norm",
    "mlp_norm_bias",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
    "router",
    "experts_gate_up",
    "experts_down",
    "mlp_post_norm",
    "mlp_post_norm_bias",
    "norm",
    "norm_bias",
    "lm_head",
    "lm_head_bias",
    "scalar_head",
    "qkv_lora_a",
    "qkv_lora_b",
    "qkv_magnitude",
    "out_lora_a",
    "out_lora_b",
    "out_magnitude",
    "gate_up_lora_a",
    "gate_up_lora_b",
    "gate_up_magnitude",
    "down_lora_a",
    "down_lora_b",
    "down_magnitude",
    "qkv_scale",
    "out_scale",
    "gate_up_scale",
    "down_scale",
    "experts_gate_up_scale",
    "experts_down_scale",
]
"""Parameters of the transformer (`model/transformer.py`). One may consist of several tensors, stacked by rows:
`qkv` of queries, keys and values, `gate_up` of gate and up, or of up alone where a feed-forward block has no gate.
In a mixture, `router` has a row for each expert, `experts_gate_up` is gate and up of the first expert, then of the
next one, and `experts_down` likewise.
`positions` are learned vectors, `sinks` further scores of query heads. Norms are those of a block's input, and post
norms of its output. A scalar head gives a reward model or a critic its numbers. The last ones are adapters
of matrices (`families/adapters.py`), and scales of quantised ones (`families/quantisation.py`)."""

Quantisation = Literal["int8", "fp8"]
"""Numbers of one byte that a frozen matrix is stored as; each of its rows has a scale."""


class Units(StrEnum):
    """Units in which the ranks along an axis of a mesh divide a dim of a tensor."""

    VOCABULARY = "vocabulary"
    """Tokens, padded to equal numbers of rows."""
    QUERY_HEADS = "query heads"
    """The dims of query heads."""
    HEADS = "heads"
    """Query heads as such, of which there is one number each."""
    KV_HEADS = "key/value heads"
    """Neighbouring ranks may hold the same ones."""
    FEED_FORWARD = "feed-forward units"


@dataclass(frozen=True)
class Partition:
    """Cut of a tensor over the ranks along an axis of a mesh."""

    units: Units
    dim: int = 0
    """The dim of the tensor that is cut."""
    axis: str = "tp"
    """Name of the axis of the mesh, see `plan.axes`."""


class Init(StrEnum):
    """Initial values."""

    NORMAL = "normal"
    """normal(0, init_std)."""
    RESIDUAL = "residual"
    """normal(0, init_std / sqrt(2 * layers)), for matrices that write to the residual stream."""
    ONES = "ones"
    ZEROS = "zeros"
    ADAPTER = "adapter"
    """uniform(-1 / sqrt(columns), 1 / sqrt(columns)), as PEFT has it for A."""
    MAGNITUDE = "magnitude"
    """Norms of the rows of the matrix that is adapted."""
    SCALE = "scale"
    """Scales of the rows of the matrix that is quantised."""


class Partial(StrEnum):
    """Condition under which each TP rank computes only a part of the gradient of a tensor that all of them hold."""

    NEVER = "never"
    SEQUENCE_PARALLEL = "sequence parallel"
    """With sequence parallelism: each rank applies the tensor to its own tokens."""
    TENSOR_PARALLEL = "tensor parallel"
    """Always: each rank applies the tensor to its own heads."""


class Place(StrEnum):
    """Pipeline stages that hold a tensor outside the layers."""

    FIRST = "first"
    LAST = "last"
    BOTH_ENDS = "both ends"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Rows of a tensor of a file that are a tensor of a model, where these are not the same.

    Row `r` of the model's is row `start + r // block * period + order[r % block]` of the file's.
    """

    name: str
    """The file's tensor."""
    shape: tuple[int, ...]
    start: int = 0
    block: int
    """Rows that lie together, such as those of a head."""
    period: int
    """From one block to the next."""
    order: tuple[int, ...] | None = None
    """Where each row of a block is in it; None where they are in order."""
    transposed: bool = False
    """Whether these rows are the file's columns."""
    number: int | None = None
    """Where the file's tensor is a stack of matrices, the number of the one that these rows are in."""

    def rows(self, first: int, last: int) -> list[int]:
        """List the file's rows (columns, if transposed) of the model's from `first` until before `last`."""
        order = range(self.block) if self.order is None else self.order
        return [
            self.start + r // self.block * self.period + order[r % self.block] for r in range(first, last)
        ]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A named global tensor, with all that storage, training and planning need to know of it."""

    name: str
    shape: tuple[int, ...]
    parameter: Parameter
    """The parameter of the transformer that it is, or is a part of."""
    place: int | Place
    """The number of its decoder layer, or the pipeline stages that hold it."""
    expert: int | None = None
    """The number of the expert that it belongs to; None for what all tokens of a layer pass through."""
    partition: Partition | None = None
    """How it is cut over tensor-parallel ranks; None where each of them holds all of it."""
    init: Init = Init.NORMAL
    decay: bool = True
    """Whether weight decay applies."""
    partial_gradient: Partial = Partial.NEVER
    stored: Stored | None = None
    """Where it is in files; None where a tensor of its name and shape is it."""
    quantised: Quantisation | None = None
    """What it is stored as, or what the matrix is whose scales it has; None where its elements are numbers of the
    model's type."""

    @property
    def file_name(self) -> str:
        """Name of the tensor in files that it is, or is a part of."""
        return self.name if self.stored is None else self.stored.name

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of that tensor."""
        return self.shape if self.stored is None else self.stored.shape

    @property
    def layer(self) -> int | None:
        """Number of its decoder layer; None outside the layers."""
        return None if isinstance(self.place, Place) else self.place

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Rows of a tensor of a file, or of each matrix of a stack of them."""

    name: str
    rows: int
    """Of all of it."""
    start: int = 0
    block: int
    period: int
    order: tuple[int, ...] | None = None

    def describe(
        self, spec: TensorSpec, ending: str = "", *, transposed: bool = False, stack: int | None = None
    ) -> TensorSpec:
        """Say of a tensor that these rows are it, where that is not what its name and shape say.

        `stack`: number of experts whose matrices the file's tensor has one after the other, None where it has one.
        """
        name = f"{self.name}{ending}"
        if name == spec.name and self.order is None and not transposed:
            return spec
        matrix = (self.rows, *spec.shape[1:])
        stored = matrix[::-1] if transposed else matrix
        where = Stored(
            name=name,
            shape=stored if stack is None else (stack, *stored),
            start=self.start,
            block=self.block,
            period=self.period,
            order=self.order,
            transposed=transposed,
            number=None if stack is None else spec.expert,
        )
        return replace(spec, stored=where)
