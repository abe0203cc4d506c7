"""Low-rank adapters (LoRA): settings, and the tensors that they add to a model."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import sqrt
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import Field, PositiveFloat, field_validator

from realrl.config.base import Settings
from realrl.config.errors import UserError, join
from realrl.families.tensors import Init, Parameter, Partial, Stored, TensorSpec

AdaptedMatrix = Literal["qkv", "out", "gate_up", "down"]
"""Matrices of a layer that can have an adapter. Each expert of `AdaptedStack` can also have one."""
AdaptedStack = Literal["experts_gate_up", "experts_down"]
"""Matrices of experts. In models of transformers, gate and up of an expert are one matrix, so they have one
adapter."""
ALL = "all-linear"
"""Target that stands for all matrices, also of experts."""


class LowRank(Settings):
    """Low-rank adapters (LoRA, arXiv 2106.09685). A frozen matrix W becomes W + scale * B A, and only A and B are
    trained."""

    rank: Annotated[int, Field(gt=0, le=10**5)] = 16
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale: `alpha / rank`."""
    targets: tuple[str, ...] | None = Field(default=None, strict=False, min_length=1)
    """Matrices that have adapters, given by the last part of their names in files, such as `q_proj`. Those of a
    mixture's experts are `experts.gate_up_proj` and `experts.down_proj`, and each expert has its own A and B.
    `all-linear` adapts all matrices. null adapts all matrices of attention and of dense feed-forward blocks."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (rank-stabilised LoRA, arXiv 2312.03732), for high ranks."""
    dora: bool = False
    """Train the norm of each row of a matrix separately from the row's direction (DoRA, arXiv 2402.09353)."""

    @field_validator("targets", mode="before")
    @classmethod
    def _every(cls, value: Any) -> Any:
        return [value] if value == ALL else value

    @property
    def scale(self) -> float:
        """Factor that multiplies B A."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


_M = TypeVar("_M", bound=str)


def _parameters(matrices: Sequence[_M], ending: str) -> dict[_M, Parameter]:
    return {matrix: cast(Parameter, f"{matrix}_{ending}") for matrix in matrices}


_MATRICES: tuple[AdaptedMatrix, ...] = get_args(AdaptedMatrix)
_STACKS: tuple[AdaptedStack, ...] = get_args(AdaptedStack)
LORA_A, LORA_B = _parameters(_MATRICES, "lora_a"), _parameters(_MATRICES, "lora_b")
MAGNITUDES = _parameters(_MATRICES, "magnitude")
STACKS_A, STACKS_B = _parameters(_STACKS, "lora_a"), _parameters(_STACKS, "lora_b")
ADAPTERS: frozenset[Parameter] = frozenset(
    {*LORA_A.values(), *LORA_B.values(), *MAGNITUDES.values(), *STACKS_A.values(), *STACKS_B.values()}
)
"""All parameters that adapters add."""


@dataclass(frozen=True)
class AdaptedModule:
    """A matrix as the files of a family hold it: a whole parameter of the transformer, or a part such as
    `q_proj`. The matrices of all experts are one module, as in models of transformers."""

    name: str
    """Name of the file tensor, without `.weight`; for experts, of the parameter in transformers."""
    parts: tuple[TensorSpec, ...]
    """Model tensors that make up its rows, in order."""

    @property
    def of_experts(self) -> bool:
        return self.parts[0].stacked is not None

    @property
    def rows(self) -> int:
        """Number of rows of the matrix, or of one expert's matrix."""
        return sum(part.shape[0] for part in self.parts if part.expert == self.parts[0].expert)

    @property
    def highest_rank(self) -> int:
        """Number of rows or of columns, whichever is smaller. A higher rank would add nothing."""
        return min(self.rows, self.parts[0].shape[1])

    @property
    def target(self) -> str:
        """Last part of the name, which `LowRank.targets` uses. The last two parts for experts."""
        return ".".join(self.name.split(".")[-2 if self.of_experts else -1 :])


def list_modules(tensors: Iterable[TensorSpec]) -> tuple[AdaptedModule, ...]:
    """Group the tensors of one parameter of a layer into the matrices that files hold."""

    def name(spec: TensorSpec) -> str:
        return spec.file_name if spec.stacked is None else spec.stacked.name

    return tuple(
        AdaptedModule(file_name.removesuffix(".weight"), tuple(parts))
        for file_name, parts in groupby(tensors, key=name)
    )


def add_adapters(tensors: Sequence[TensorSpec], lora: LowRank) -> tuple[TensorSpec, ...]:
    """Add adapters to a tensor table, after the other tensors of each layer. Raises UserError for a target that
    the model does not have, or a rank that no adapted matrix can have."""
    found: list[TensorSpec] = []
    known: dict[str, None] = {}
    highest = 0
    for layer, group in groupby(tensors, key=lambda spec: spec.layer):
        of_layer = list(group)
        found += of_layer
        if layer is None:
            continue
        for matrix in LORA_A:
            modules = list_modules(spec for spec in of_layer if spec.parameter == matrix)
            known |= dict.fromkeys(module.target for module in modules)
            adapted = [module for module in modules if is_adapted(module, lora)]
            found += _adapt(matrix, adapted, lora)
            highest = max([highest, *(module.highest_rank for module in adapted)])
        stacks = {
            stack: module
            for stack in STACKS_A
            for module in list_modules(s for s in of_layer if s.parameter == stack and s.stacked is not None)
        }
        known |= dict.fromkeys(module.target for module in stacks.values())
        stacks = {stack: module for stack, module in stacks.items() if is_adapted(module, lora)}
        found += _adapt_stacks(stacks, lora)
        highest = max([highest, *(module.highest_rank for module in stacks.values())])
    unknown = [target for target in lora.targets or () if target not in known and target != ALL]
    if unknown and unknown[0] in ("embed_tokens", "lm_head"):
        raise UserError(
            f"lora.targets: {unknown[0]} cannot have adapters; train the whole model (lora=null), or choose from"
            f" {join([*known])}"
        )
    if unknown:
        raise UserError(f"lora.targets: the model has no matrix {unknown[0]}; it has {join([*known])}")
    if lora.rank > highest:
        raise UserError(
            f"lora.rank={lora.rank} is above {highest}, the highest rank that any adapted matrix can have"
        )
    return tuple(found)


def is_adapted(module: AdaptedModule, lora: LowRank) -> bool:
    if lora.targets is None:
        return not module.of_experts
    return ALL in lora.targets or module.target in lora.targets


def _adapt(matrix: AdaptedMatrix, modules: Sequence[AdaptedModule], lora: LowRank) -> list[TensorSpec]:
    """Make the adapter tensors of one parameter: first every A, then every B, then every magnitude."""
    found: list[TensorSpec] = []
    for module in modules:
        weight = module.parts[0]
        rows = _cuts_rows(weight)
        # If the rows of the matrix are divided among ranks, each rank has a part of B, and so computes a part of
        # A's gradient. If the columns are divided, A is cut like the matrix, and each rank computes a part of B's
        # gradient.
        a = TensorSpec(
            name=f"{module.name}.lora_A.weight",
            shape=(lora.rank, weight.shape[1]),
            parameter=LORA_A[matrix],
            place=weight.place,
            partition=None if rows else weight.partition,
            init=Init.ADAPTER,
            partial_gradient=Partial.TENSOR_PARALLEL if rows else Partial.NEVER,
        )
        found.append(a)
    parts = [(module, part) for module in modules for part in module.parts]
    found += [_describe_rows(module, part, lora.rank, LORA_B[matrix]) for module, part in parts]
    if lora.dora:
        found += [_describe_rows(module, part, None, MAGNITUDES[matrix]) for module, part in parts]
    return found


def _describe_rows(
    module: AdaptedModule, part: TensorSpec, columns: int | None, parameter: Parameter
) -> TensorSpec:
    """Make a tensor with one row per row of a matrix part: B, or a magnitude if `columns` is None."""
    ending = ".lora_B.weight" if columns else ".lora_magnitude_vector"
    further = () if columns is None else (columns,)
    rows = part.partition is not None and part.partition.dim == 0
    stored = None
    if part.stored is not None:
        whole = part.stored.shape[::-1] if part.stored.transposed else part.stored.shape
        stored = replace(
            part.stored, name=f"{module.name}{ending}", shape=(whole[0], *further), transposed=False
        )
    return TensorSpec(
        name=f"{part.name.removesuffix('.weight')}{ending}",
        shape=(part.shape[0], *further),
        parameter=parameter,
        place=part.place,
        partition=part.partition if rows else None,
        init=Init.ZEROS if columns else Init.MAGNITUDE,
        decay=columns is not None,
        partial_gradient=Partial.NEVER if rows else Partial.TENSOR_PARALLEL,
        stored=stored,
    )


def _adapt_stacks(stacks: Mapping[AdaptedStack, AdaptedModule], lora: LowRank) -> list[TensorSpec]:
    """Make the adapter tensors of a layer's experts: for each stack, first every A, then every B."""
    if stacks and lora.dora:
        raise UserError(
            "lora.dora: experts cannot have it; set dora=false, or name other matrices as lora.targets"
        )
    found: list[TensorSpec] = []
    for stack, module in stacks.items():
        wrapper = name_wrapper(module.name, {other.name for other in stacks.values()})
        by_expert = {part.expert: part for part in module.parts}
        found += [describe_a(part, lora.rank, wrapper, STACKS_A[stack]) for part in by_expert.values()]
        found += [describe_b(part, lora.rank, wrapper, STACKS_B[stack]) for part in module.parts]
    return found


def name_wrapper(parameter: str, adapted: Collection[str]) -> str:
    """Name the module in which PEFT keeps the adapters of a parameter that stacks the matrices of experts.

    PEFT wraps the module of the experts once for each adapted parameter: first for `gate_up_proj`, then for
    `down_proj`. `adapted` has the names of both, or of one.
    """
    experts, _, name = parameter.rpartition(".")
    inside = name == "gate_up_proj" and f"{experts}.down_proj" in adapted
    return f"{experts}.base_layer" if inside else experts


def describe_a(part: TensorSpec, rank: int, wrapper: str, parameter: Parameter) -> TensorSpec:
    """Describe the matrix A of an expert. `part` is its down matrix, or one of its gate and up, which share A.

    PEFT (`ParamWrapper`) has one A for all experts, [experts * rank, inputs], and one B, [outputs, rank * experts].
    Expert e has consecutive rows of A, and columns e, e + experts, ... of B. If PEFT takes outputs for inputs,
    B of the transposed matrix is A here.
    """
    where, expert, (_, inputs) = part.stacked, part.expert, part.shape
    assert where is not None and expert is not None, "only experts have stacks"
    experts = where.shape[0]
    if where.transposed:
        stored = Stored(
            name=f"{wrapper}.lora_B.weight",
            shape=(inputs, rank * experts),
            start=expert,
            block=1,
            period=experts,
            transposed=True,
        )
    else:
        stored = Stored(
            name=f"{wrapper}.lora_A.weight",
            shape=(experts * rank, inputs),
            start=expert * rank,
            block=rank,
            period=rank,
        )
    by_rows = _cuts_rows(part)
    experts_module, _, name = where.name.rpartition(".")
    return TensorSpec(
        name=f"{experts_module}.{expert}.{name}.lora_A.weight",
        shape=(rank, inputs),
        parameter=parameter,
        place=part.place,
        expert=expert,
        partition=None if by_rows else part.partition,
        init=Init.ADAPTER,
        partial_gradient=Partial.TENSOR_PARALLEL if by_rows else Partial.NEVER,
        stored=stored,
    )


def describe_b(part: TensorSpec, rank: int, wrapper: str, parameter: Parameter) -> TensorSpec:
    """Describe the rows of an expert's matrix B that belong to one of its matrices; see `describe_a`."""
    where, expert, rows = part.stacked, part.expert, part.shape[0]
    assert where is not None and expert is not None, "only experts have stacks"
    experts, outputs = where.shape[0], where.shape[2 if where.transposed else 1]
    if where.transposed:
        name, shape = f"{wrapper}.lora_A.weight", (experts * rank, outputs)
        column, step = expert * rank, 1
    else:
        name, shape = f"{wrapper}.lora_B.weight", (outputs, rank * experts)
        column, step = expert, experts
    by_rows = _cuts_rows(part)
    return TensorSpec(
        name=f"{part.name.removesuffix('.weight')}.lora_B.weight",
        shape=(rows, rank),
        parameter=parameter,
        place=part.place,
        expert=expert,
        partition=part.partition if by_rows else None,
        init=Init.ZEROS,
        partial_gradient=Partial.NEVER if by_rows else Partial.TENSOR_PARALLEL,
        stored=replace(where, name=name, shape=shape, number=None, column=column, step=step),
    )


def _cuts_rows(weight: TensorSpec) -> bool:
    """Return whether ranks divide the rows of a matrix, or none of it, rather than its columns."""
    return weight.partition is None or weight.partition.dim == 0
