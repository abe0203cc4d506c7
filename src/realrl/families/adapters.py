"""Low-rank adapters (LoRA): settings, and the tensors that they add to a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import sqrt
from typing import Annotated, Literal, cast, get_args

from pydantic import Field, PositiveFloat

from realrl.config.base import Settings
from realrl.config.errors import UserError, join
from realrl.families.tensors import Init, Parameter, Partial, TensorSpec

AdaptedMatrix = Literal["qkv", "out", "gate_up", "down"]
"""Matrices of a layer that can have an adapter."""


class LowRank(Settings):
    """Low-rank adapters (LoRA, arXiv 2106.09685). A frozen matrix W becomes W + scale * B A, and only A and B are
    trained."""

    rank: Annotated[int, Field(gt=0, le=10**5)] = 16
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale: `alpha / rank`."""
    targets: tuple[str, ...] | None = Field(default=None, strict=False, min_length=1)
    """Matrices that have adapters, given by the last part of their names in files, such as `q_proj`. null adapts
    all matrices of attention and of dense feed-forward blocks."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (rank-stabilised LoRA, arXiv 2312.03732), for high ranks."""
    dora: bool = False
    """Train the norm of each row of a matrix separately from the row's direction (DoRA, arXiv 2402.09353)."""

    @property
    def scale(self) -> float:
        """Factor that multiplies B A."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def _parameters(ending: str) -> dict[AdaptedMatrix, Parameter]:
    return {matrix: cast(Parameter, f"{matrix}_{ending}") for matrix in get_args(AdaptedMatrix)}


LORA_A, LORA_B, MAGNITUDES = _parameters("lora_a"), _parameters("lora_b"), _parameters("magnitude")
ADAPTERS: frozenset[Parameter] = frozenset({*LORA_A.values(), *LORA_B.values(), *MAGNITUDES.values()})
"""All parameters that adapters add."""


@dataclass(frozen=True)
class AdaptedModule:
    """A matrix as the files of a family hold it: a whole parameter of the transformer, or a part such as
    `q_proj`."""

    name: str
    """Name of the file tensor, without `.weight`."""
    parts: tuple[TensorSpec, ...]
    """Model tensors that make up its rows, in order."""

    @property
    def highest_rank(self) -> int:
        """Number of rows or of columns, whichever is smaller. A higher rank would add nothing."""
        return min(sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def target(self) -> str:
        """Last part of the name, which `LowRank.targets` uses."""
        return self.name.rpartition(".")[2]


def list_modules(tensors: Iterable[TensorSpec]) -> tuple[AdaptedModule, ...]:
    """Group the tensors of one parameter of a layer into the matrices that files hold."""
    return tuple(
        AdaptedModule(name.removesuffix(".weight"), tuple(parts))
        for name, parts in groupby(tensors, key=lambda spec: spec.file_name)
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
    unknown = [target for target in lora.targets or () if target not in known]
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
    return lora.targets is None or module.target in lora.targets


def _adapt(matrix: AdaptedMatrix, modules: Sequence[AdaptedModule], lora: LowRank) -> list[TensorSpec]:
    """Make the adapter tensors of one parameter: first every A, then every B, then every magnitude."""
    found: list[TensorSpec] = []
    for module in modules:
        weight = module.parts[0]
        rows = weight.partition is None or weight.partition.dim == 0
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
