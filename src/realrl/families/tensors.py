"""The global tensors of a model, before any rank holds a part of them. This module does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
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
    "router_bias",
    "router_correction",
    "experts_gate_up",
    "experts_gate_up_bias",
    "experts_down",
    "experts_down_bias",
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
    "experts_gate_up_lora_a",
    "experts_gate_up_lora_b",
    "experts_down_lora_a",
    "experts_down_lora_b",
    "qkv_scale",
    "out_scale",
    "gate_up_scale",
    "down_scale",
    "experts_gate_up_scale",
    "experts_down_scale",
]
"""Parameters of the transformer (`model/transformer.py`). Several tensors, stacked by rows, may form one
parameter.

`qkv` holds queries, keys and values. `gate_up` holds gate and up, or only up if the block has no gate. In a
mixture, `router` has one row per expert, and so has `router_correction`, which is added to scores to choose experts
and is not trained; `experts_gate_up` holds gate and up of the first expert, then of the second, and so on.
`experts_down` and the biases of experts have the same order. `positions` are learned position vectors. `sinks` are
extra attention scores, one per query head. Norms apply to the input of a block, post norms to its output.
`scalar_head` computes the output of a reward model or critic. The last entries are adapters of matrices
(`families/adapters.py`) and scales of quantised matrices (`families/quantisation.py`).
"""

Quantisation = Literal["int8", "fp8"]
"""One-byte number format of a frozen matrix; each row of the matrix has its own scale."""


EXACT_PARTS = 3
"""Number of bfloat16 numbers whose sum can be any float32 number of usual size. Each has 8 of its 24 bits."""


class Units(StrEnum):
    """Units that ranks divide among themselves when they cut a dim of a tensor."""

    VOCABULARY = "vocabulary"
    """Token ids. Each rank allocates the same number of rows, so the last ranks may have padding."""
    QUERY_HEADS = "query heads"
    """`head_dim` elements per query head."""
    HEADS = "heads"
    """One element per query head."""
    KV_HEADS = "key/value heads"
    """`head_dim` elements per key/value head. Neighbouring ranks may hold the same heads."""
    FEED_FORWARD = "feed-forward units"


@dataclass(frozen=True)
class Partition:
    """How the ranks along one mesh axis divide a tensor."""

    units: Units
    dim: int = 0
    """Index of the dim that is cut."""
    axis: str = "tp"
    """Name of the mesh axis, see `plan.axes`."""


class Init(StrEnum):
    NORMAL = "normal"
    """normal(0, init_std)."""
    RESIDUAL = "residual"
    """normal(0, init_std / sqrt(2 * layers)), for matrices that write to the residual stream."""
    ONES = "ones"
    ZEROS = "zeros"
    ADAPTER = "adapter"
    """uniform(-1 / sqrt(columns), 1 / sqrt(columns)), as PEFT initialises A."""
    MAGNITUDE = "magnitude"
    """Row norms of the adapted matrix."""
    SCALE = "scale"
    """Row scales of the quantised matrix."""


class Partial(StrEnum):
    """When a TP rank computes only a part of the gradient of a tensor that all TP ranks hold. The parts must then
    be summed."""

    NEVER = "never"
    SEQUENCE_PARALLEL = "sequence parallel"
    """Only with sequence parallelism, because each rank then applies the tensor to its own tokens alone."""
    TENSOR_PARALLEL = "tensor parallel"
    """Always, because the tensor's results only go into the rank's own part of a matrix, of the heads or of the
    experts."""


class Place(StrEnum):
    """Pipeline stage of a tensor outside the decoder layers."""

    FIRST = "first"
    LAST = "last"
    BOTH_ENDS = "both ends"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where the rows of a model tensor are in a file tensor, if the two differ. Row `r` of the model tensor is row
    `start + r // block * period + order[r % block]` of the file tensor."""

    name: str
    """Name of the file tensor."""
    shape: tuple[int, ...]
    start: int = 0
    block: int
    """Number of consecutive rows that stay together, such as the rows of a head."""
    period: int
    """Distance between the starts of two blocks, in rows of the file tensor."""
    order: tuple[int, ...] | range | None = None
    """File position of each row within its block; None if the order is the same."""
    transposed: bool = False
    """Whether the rows of the model tensor are columns of the file tensor."""
    number: int | None = None
    """Index of the matrix, if the file tensor is a stack of matrices."""
    column: int = 0
    """Column of the file tensor (row, if transposed) that holds the first column of the model tensor."""
    step: int = 1
    """Distance between neighbouring columns of the model tensor in the file tensor."""
    exact: bool = False
    """Whether the file tensor has one float32 number per row of the model tensor, which the row represents as the
    sum of `EXACT_PARTS` bfloat16 numbers. So the number stays the same in a model of any type."""

    def rows(self, first: int, last: int) -> list[int]:
        """List the file rows (columns, if transposed) of the model rows from `first` up to, not including,
        `last`."""
        order = range(self.block) if self.order is None else self.order
        return [
            self.start + r // self.block * self.period + order[r % self.block] for r in range(first, last)
        ]

    def columns(self, first: int, last: int) -> slice:
        """Find the file columns (rows, if transposed) of the model columns from `first` up to, not including,
        `last`."""
        # Slices of files support no other step.
        step = None if self.step == 1 else self.step
        return slice(self.column + first * self.step, self.column + last * self.step, step)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Everything that storage, training and planning need to know about one global tensor."""

    name: str
    shape: tuple[int, ...]
    parameter: Parameter
    """The transformer parameter that this tensor forms, alone or with others."""
    place: int | Place
    """Index of the decoder layer; a `Place` outside the layers."""
    expert: int | None = None
    """Index of the expert; None for tensors that all tokens of a layer pass through."""
    partition: Partition | None = None
    """How tensor-parallel ranks divide the tensor; None if each of them holds all of it."""
    init: Init = Init.NORMAL
    decay: bool = True
    """Whether weight decay applies."""
    partial_gradient: Partial = Partial.NEVER
    stored: Stored | None = None
    """Where files hold the tensor; None if a file tensor has the same name and shape."""
    stacked: Stored | None = None
    """Where models of transformers hold an expert's matrix: in a parameter that stacks the matrices of all experts.
    PEFT names and arranges adapters by this parameter. `transposed` says whether PEFT takes the outputs of its
    matrices for inputs. All experts have the same entry, without a `number`. None for all other tensors."""
    quantised: Quantisation | None = None
    """Byte format of a quantised matrix. The tensor of its scales has the same value. None for numbers of the
    model's dtype."""

    @property
    def file_name(self) -> str:
        """Name of the file tensor that holds this tensor."""
        return self.name if self.stored is None else self.stored.name

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the file tensor that holds this tensor."""
        return self.shape if self.stored is None else self.stored.shape

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer; None outside the layers."""
        return None if isinstance(self.place, Place) else self.place

    @property
    def numel(self) -> int:
        return prod(self.shape)


def group_specs(specs: Iterable[TensorSpec]) -> tuple[tuple[TensorSpec, ...], ...]:
    """Group tensors in storage order by parameter of the transformer."""
    by_parameter = groupby(specs, key=lambda spec: (spec.place, spec.parameter))
    return tuple(tuple(stack) for _, stack in by_parameter)


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Rows of a file tensor, or of each matrix in a stack; see `Stored` for the fields."""

    name: str
    rows: int
    """Number of rows of the whole file tensor, or of each matrix in the stack."""
    start: int = 0
    block: int
    period: int
    order: tuple[int, ...] | range | None = None

    def describe(
        self, spec: TensorSpec, ending: str = "", *, transposed: bool = False, stack: int | None = None
    ) -> TensorSpec:
        """Record in `spec` that these file rows hold it, unless a file tensor with its name and shape does.
        `stack`: number of experts if the file tensor stacks one matrix per expert; None if it is a single
        matrix."""
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
