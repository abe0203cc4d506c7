"""Read low-rank adapters in PEFT's format, and merge them into the weights of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from realrl.config.errors import UserError, join
from realrl.families.adapter_config import ADAPTER_CONFIG, ADAPTER_FILE, SavedAdapters
from realrl.families.adapters import (
    ADAPTERS,
    LORA_A,
    STACKS_A,
    STACKS_B,
    AdaptedStack,
    LowRank,
    describe_a,
    describe_b,
    list_modules,
    name_wrapper,
)
from realrl.families.tensors import TensorSpec
from realrl.huggingface.headers import StoredTensor, check_type, open_file, read_header
from realrl.huggingface.tensor_conversion import read_parts

PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's adapter files."""
_RECENT = 4
"""Number of tensors of a file that stay in memory."""
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


class AdapterFile:
    """Tensors of saved adapters. They are named as in a model with adapters, without PEFT's prefix."""

    def __init__(self, saved: SavedAdapters) -> None:
        """Read the file's header. Raises UserError if the file is missing or damaged."""
        self.saved = saved
        self._recent: dict[str, Tensor] = {}
        stored = {tensor.name: tensor for tensor in read_header(saved.directory / ADAPTER_FILE, None)}
        strange = [name for name in stored if not name.startswith(PREFIX)]
        if strange:
            raise UserError(
                f"{saved.directory / ADAPTER_FILE}: tensor {strange[0]} does not begin with {PREFIX}, as PEFT's do"
            )
        self.tensors: Mapping[str, StoredTensor] = {
            name.removeprefix(PREFIX): tensor for name, tensor in stored.items()
        }

    @property
    def file(self) -> str:
        """Path of the file, for error messages."""
        return str(self.saved.directory / ADAPTER_FILE)

    def adapts(self, spec: TensorSpec) -> bool:
        """Return whether a tensor of a model is, or belongs to, a matrix that has an adapter."""
        return self._find_wrapper(spec) is not None or self._has_own(spec)

    def _has_own(self, spec: TensorSpec) -> bool:
        """Return whether a matrix has an adapter of its own, named like the matrix."""
        return f"{spec.file_name.removesuffix('.weight')}{_A}" in self.tensors

    def _find_wrapper(self, spec: TensorSpec) -> str | None:
        """Find the module in which the file keeps the adapter of an expert's matrix together with those of all
        other experts. None if there is none."""
        if spec.stacked is None or spec.stacked.name.rpartition(".")[2] not in self.saved.parameters:
            return None
        module = spec.stacked.name.rpartition(".")[0]
        wrapper = name_wrapper(spec.stacked.name, {f"{module}.{name}" for name in self.saved.parameters})
        return wrapper if f"{wrapper}{_A}" in self.tensors else None

    def _describe_expert(self, spec: TensorSpec, wrapper: str) -> tuple[TensorSpec, TensorSpec]:
        """Describe A and the rows of B for an expert's matrix."""
        stack, rank = cast(AdaptedStack, spec.parameter), self.saved.lora.rank
        return (
            describe_a(spec, rank, wrapper, STACKS_A[stack]),
            describe_b(spec, rank, wrapper, STACKS_B[stack]),
        )

    def check(self, tensors: Sequence[TensorSpec]) -> None:
        """Check that every stored tensor fits a model with these tensors. Raises UserError if not."""
        known: dict[str, tuple[int, ...]] = {}
        rank, dora = self.saved.lora.rank, self.saved.lora.dora
        for spec in tensors:
            wrapper = self._find_wrapper(spec)
            if wrapper is not None:
                if f"{wrapper}{_B}" not in self.tensors:
                    raise UserError(f"{self.file}: tensor {PREFIX}{wrapper}{_B} is missing")
                known |= {s.file_name: s.file_shape for s in self._describe_expert(spec, wrapper)}
        # In older models of transformers, and in files, each expert has matrices of its own.
        apart = (replace(s, stacked=None) for s in tensors if s.parameter in STACKS_A and s.stored is None)
        dense = (spec for spec in tensors if spec.parameter in LORA_A)
        for module in list_modules([*dense, *apart]):
            stored = module.parts[0].stored
            shape = module.parts[0].file_shape
            rows, columns = reversed(shape) if stored is not None and stored.transposed else shape
            wanted = {_A: (rank, columns), _B: (rows, rank)} | ({_MAGNITUDE: (rows,)} if dora else {})
            found = {ending for ending in (_A, _B, _MAGNITUDE) if f"{module.name}{ending}" in self.tensors}
            if found and found != wanted.keys():
                missing = sorted(wanted.keys() ^ found)[0]
                raise UserError(
                    f"{self.file}: {module.name} has {join(sorted(found))}; {missing} does not match"
                )
            known |= {f"{module.name}{ending}": shape for ending, shape in wanted.items()}
        known |= {s.name: s.shape for s in tensors if s.parameter == "scalar_head"}
        for name, tensor in self.tensors.items():
            if name not in known:
                raise UserError(
                    f"{self.file}: tensor {PREFIX}{name} belongs to no matrix of {self.saved.base}"
                )
            check_type(tensor)
            if tensor.shape != known[name]:
                raise UserError(
                    f"{self.file}: tensor {PREFIX}{name} has shape {list(tensor.shape)}, but the model needs"
                    f" {list(known[name])}"
                )

    def check_continued(self, lora: LowRank, tensors: Sequence[TensorSpec]) -> None:
        """Check that training with the settings `lora` can continue from these adapters. Raises UserError if not.

        `tensors` are the model's tensors, including adapters.
        """
        saved = self.saved.lora
        for name in ("rank", "alpha", "rslora", "dora"):
            if getattr(saved, name) != getattr(lora, name):
                raise UserError(
                    f"{self.saved.directory / ADAPTER_CONFIG} has adapters with {name}={getattr(saved, name)}, but"
                    f" the recipe has lora.{name}={getattr(lora, name)}; to train other adapters, merge these into"
                    " their model first"
                )
        wanted = {spec.file_name for spec in tensors if spec.parameter in ADAPTERS}
        stored = {name for name in self.tensors if ".lora_" in name}
        if wanted != stored:
            name = min(wanted ^ stored)
            raise UserError(
                f"{self.file}: lora.targets do not agree with the adapters there:"
                f" {name} is {'missing' if name in wanted else 'not among them'}"
            )

    def merge(
        self, values: Tensor, spec: TensorSpec, rows: range, columns: slice, read_rows: Callable[[], Tensor]
    ) -> Tensor:
        """Merge the adapter of a matrix into a part of the matrix.

        `values` is the part with these rows and columns. `read_rows` reads all columns of these rows, which DoRA
        needs for its norms.
        """
        module, lora = spec.file_name.removesuffix(".weight"), self.saved.lora
        wrapper = self._find_wrapper(spec)
        if wrapper is not None:
            of_a, of_b = self._describe_expert(spec, wrapper)
            a, b = (_read_whole(self.read(of.file_name), of).float() for of in (of_a, of_b))
            return values.float() + lora.scale * (b[rows.start : rows.stop] @ a[:, columns])
        numbers = list(rows) if spec.stored is None else spec.stored.rows(rows.start, rows.stop)
        a = self.read(f"{module}{_A}").float()
        b = self.read(f"{module}{_B}")[numbers].float()
        merged = values.float() + lora.scale * (b @ a[:, columns])
        if lora.dora:
            magnitudes = self.read(f"{module}{_MAGNITUDE}")[numbers].float()
            norms = (read_rows().float() + lora.scale * (b @ a)).norm(dim=1)
            merged *= (magnitudes / norms)[:, None]
        return merged

    def read(self, name: str) -> Tensor:
        """Read a tensor. The last few stay in memory, because a tensor may have the adapters of many experts."""
        if name not in self._recent:
            while len(self._recent) >= _RECENT:
                self._recent.pop(next(iter(self._recent)))
            with open_file(self.saved.directory / ADAPTER_FILE) as reader:
                self._recent[name] = reader.get_tensor(f"{PREFIX}{name}")
        return self._recent[name]


def _read_whole(stored: Tensor, spec: TensorSpec) -> Tensor:
    return torch.cat([values for _, values in read_parts(stored, spec)])
