"""Read low-rank adapters in PEFT's format, and merge them into the weights of a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from realrl.config.errors import UserError, join
from realrl.families.adapter_config import ADAPTER_CONFIG, SavedAdapters
from realrl.families.adapters import ADAPTERS, LORA_A, LowRank, list_modules
from realrl.families.tensors import TensorSpec
from realrl.huggingface.headers import StoredTensor, check_type, open_file, read_header

ADAPTER_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's adapter files."""
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


class AdapterFile:
    """Tensors of saved adapters. They are named as in a model with adapters, without PEFT's prefix."""

    def __init__(self, saved: SavedAdapters) -> None:
        """Read the file's header. Raises UserError if the file is missing or damaged."""
        self.saved = saved
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
        return f"{spec.file_name.removesuffix('.weight')}{_A}" in self.tensors

    def check(self, tensors: Sequence[TensorSpec]) -> None:
        """Check that every stored tensor fits a model with these tensors. Raises UserError if not."""
        known: dict[str, tuple[int, ...]] = {}
        rank, dora = self.saved.lora.rank, self.saved.lora.dora
        for module in list_modules(spec for spec in tensors if spec.parameter in LORA_A):
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
        numbers = list(rows) if spec.stored is None else spec.stored.rows(rows.start, rows.stop)
        with self._open() as reader:
            a = reader.get_tensor(f"{PREFIX}{module}{_A}").float()
            b = reader.get_tensor(f"{PREFIX}{module}{_B}")[numbers].float()
            merged = values.float() + lora.scale * (b @ a[:, columns])
            if lora.dora:
                magnitudes = reader.get_tensor(f"{PREFIX}{module}{_MAGNITUDE}")[numbers].float()
                norms = (read_rows().float() + lora.scale * (b @ a)).norm(dim=1)
                merged *= (magnitudes / norms)[:, None]
        return merged

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with open_file(self.saved.directory / ADAPTER_FILE) as reader:
            yield reader
