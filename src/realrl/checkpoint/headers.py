"""Headers of a model's safetensors files, checked before weights are read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.families.llama import read_config
from realrl.families.tensors import EMBEDDING, LM_HEAD, SCALAR_HEAD, TensorSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """Contents of a directory's files, tensor by tensor."""

    tensors: Mapping[str, StoredTensor]
    """Source of each tensor of the model."""
    absent: list[str]
    """Tensors of the model that no file has."""
    repeated_head: StoredTensor | None
    """Place of an `lm_head.weight` in a model with tied embeddings; the two must be equal."""


def open_file(file: Path) -> Any:
    """Open a safetensors file to read; UserError if it is not whole."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from error


def find_tensors(directory: Path, wanted: Iterable[TensorSpec]) -> Contents:
    """Find the file of each tensor of a model.

    Only `score.weight` may be absent: a language model has none when a scalar head is put on it. An
    `lm_head.weight` that is not there is the embedding table if the model's `config.json` ties them. UserError,
    with file and tensor, for everything else that does not fit, and for tensors that would be lost without notice.
    """
    specs = {spec.name: spec for spec in wanted}
    stored = _read_headers(directory)
    if SCALAR_HEAD in stored and SCALAR_HEAD not in specs:
        raise UserError(f"{directory} is a sequence classifier, not a language model: it has a {SCALAR_HEAD}")
    found = {}
    absent = []
    for name, spec in specs.items():
        source = name
        if name == LM_HEAD and name not in stored and read_config(directory / "config.json").tied_embeddings:
            source = EMBEDDING
        if source in stored:
            _check(stored[source], spec)
            found[name] = stored[source]
        elif name == SCALAR_HEAD:
            absent.append(name)
        else:
            raise UserError(f"{directory}: tensor {source} is missing from the safetensors files")
    _check_known(stored, specs)
    repeated = stored.get(LM_HEAD) if LM_HEAD not in specs and SCALAR_HEAD not in specs else None
    if repeated is not None:
        _check(repeated, specs[EMBEDDING])
    return Contents(found, absent, repeated)


def _check(tensor: StoredTensor, spec: TensorSpec) -> None:
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has type {tensor.dtype}; accepted are {', '.join(FLOATS)}"
        )
    if tensor.shape != spec.shape:
        found = list(tensor.shape)
        needed = list(spec.shape)
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has shape {found}, but the model needs {needed}"
        )


def _check_known(stored: Mapping[str, StoredTensor], specs: Mapping[str, TensorSpec]) -> None:
    known = {EMBEDDING, LM_HEAD, SCALAR_HEAD}
    for name, tensor in stored.items():
        if name not in specs and name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(
                f"{tensor.file}: tensor {name} does not belong to the model that config.json describes"
            )


def _read_headers(directory: Path) -> dict[str, StoredTensor]:
    """List all tensors in a directory's files, by name."""
    index = directory / INDEX
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise UserError(f"{index}: weight_map is missing, or does not name a file for each tensor")
        files: dict[str, list[str]] = {}
        for name, file in names.items():
            files.setdefault(file, []).append(name)
        return {
            tensor.name: tensor
            for file, expected in files.items()
            for tensor in _read_header(directory / file, expected)
        }
    single = directory / SINGLE
    if not single.is_file():
        raise UserError(f"{directory}: there is neither {SINGLE} nor {INDEX}; only safetensors are read")
    return {tensor.name: tensor for tensor in _read_header(single, None)}


def _read_header(file: Path, expected: list[str] | None) -> list[StoredTensor]:
    """List these tensors of a file, which the index names, or all."""
    if not file.is_file():
        raise UserError(f"{file} is missing, though {INDEX} names it")
    with open_file(file) as reader:
        present = set(reader.keys())
        tensors = []
        for name in sorted(present) if expected is None else expected:
            if name not in present:
                raise UserError(f"{file}: tensor {name} is missing")
            piece = reader.get_slice(name)
            tensors.append(StoredTensor(file, name, piece.get_dtype(), tuple(piece.get_shape())))
        return tensors
