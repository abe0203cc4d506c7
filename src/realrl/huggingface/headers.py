"""Read and check the headers of a model's safetensors files, before any weights are read."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError, safe_open

from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.families.config_json import read_config
from realrl.families.registry import find_family, model_tensors, ties_embeddings
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Parameter, TensorSpec, Units
from realrl.huggingface.mxfp4 import BLOCK, BLOCKS, SCALES, PackedStack

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    scales: "StoredTensor | None" = None
    """Scales of packed matrices; None if the tensor is not packed. If it is, `name` is the name of the blocks, and
    `shape` is the shape of the unpacked tensor."""


@dataclass(frozen=True)
class Contents:
    """Where the files of a directory store the tensors of a model."""

    tensors: Mapping[str, StoredTensor]
    """The stored tensors, by their names in the model."""
    absent: list[str]
    """Tensors of the model that are in no file."""
    embedding: TensorSpec
    """The embedding table."""
    repeated_head: tuple[StoredTensor, StoredTensor] | None
    """A stored language-model head that is tied to the embeddings, and the stored embeddings; None without such a
    head. Both tensors must be equal."""


def open_file(file: Path) -> Any:
    """Open a safetensors file to read. Raises UserError if it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from error


class TensorFiles:
    """Maps safetensors files into memory, and keeps one file open at a time.

    Request tensors file by file, so that each file is opened only once.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._file: Path | None = None
        self._reader: Any = None
        self._of_scales: TensorFiles | None = None

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if self._of_scales is not None:
            self._of_scales._close()

    def find(self, tensor: StoredTensor) -> Any:
        """Open a tensor as a slice, which reads only the parts that are indexed, and unpacks them.

        Raises UserError for a damaged file.
        """
        if tensor.scales is not None:
            # Scales may be in another file than their blocks. Each of the two files stays open.
            self._of_scales = self._of_scales or TensorFiles()
            return PackedStack(self.find(replace(tensor, scales=None)), self._of_scales.find(tensor.scales))
        if tensor.file != self._file:
            self._close()
            self._reader = self._opened.enter_context(open_file(tensor.file))
            self._file = tensor.file
        return self._reader.get_slice(tensor.name)

    def _close(self) -> None:
        self._opened.close()
        self._file = self._reader = None


def find_tensors(directory: Path, shape: ModelShape, wanted: Iterable[TensorSpec]) -> Contents:
    """Find the stored tensor for each of the `wanted` tensors of a model.

    Only a scalar head may be missing, because a language model does not have one. If `config.json` ties the
    language-model head to the embeddings and the head is missing, the embedding table takes its place. If anything
    else does not fit, UserError names the file and the tensor. Additional tensors in the files are also an error.
    """
    specs = {spec.name: spec for spec in wanted}
    outside = _specs_outside_layers(shape)
    names = {parameter: spec.name for parameter, spec in outside.items()}
    embedding, lm_head, scalar_head = names["embedding"], names["lm_head"], names["scalar_head"]
    stored = _named_as_in_family(_join_packed(_read_headers(directory)), [*specs.values(), *outside.values()])
    if scalar_head in stored and scalar_head not in specs:
        raise UserError(f"{directory} is a sequence classifier, not a language model: it has a {scalar_head}")
    found = {}
    absent = []
    for name, spec in specs.items():
        source = spec.file_name
        if name == lm_head and name not in stored:
            config = read_config(directory / "config.json", shape.family)
            source = embedding if ties_embeddings(config, "lm") else name
        if source in stored:
            _check(stored[source], spec, shape)
            found[name] = stored[source]
        elif name == scalar_head:
            absent.append(name)
        else:
            raise UserError(f"{directory}: tensor {source} is missing from the safetensors files")
    known = {spec.file_name for spec in (*specs.values(), *outside.values())}
    family = find_family(shape.family)
    others = {name for name in stored if family.further_layers and _find_layer(name) >= shape.layers}
    _check_known(stored, known | others, family.buffers)
    repeated = stored.get(lm_head) if lm_head not in specs and scalar_head not in specs else None
    if repeated is not None:
        _check(repeated, specs[embedding], shape)
    pair = None if repeated is None else (repeated, found[embedding])
    return Contents(found, absent, outside["embedding"], pair)


def _join_packed(stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Replace each pair of blocks and scales by the stack that they hold."""
    found = dict(stored)
    for name, blocks in stored.items():
        stack = name.removesuffix(BLOCKS)
        scales = stored.get(f"{stack}{SCALES}")
        if stack == name or scales is None or stack in stored:
            continue
        if blocks.dtype != "U8" or scales.dtype != "U8" or blocks.shape != (*scales.shape, BLOCK // 2):
            raise UserError(
                f"{blocks.file}: tensors {name} and {scales.name} do not hold matrices in the format MXFP4"
            )
        del found[name], found[scales.name]
        *experts, rows, groups = scales.shape
        shape = (*experts, groups * BLOCK, rows)
        found[stack] = replace(blocks, dtype="MXFP4", shape=shape, scales=scales)
    return found


def _named_as_in_family(
    stored: Mapping[str, StoredTensor], specs: Iterable[TensorSpec]
) -> Mapping[str, StoredTensor]:
    """Rename stored tensors to the names that the family uses.

    Files that were saved from a base model without a head omit everything before the first dot of a name.
    """
    names = {spec.file_name for spec in specs}
    if names & stored.keys():
        return stored
    return {next((n for n in names if n.partition(".")[2] == name), name): of for name, of in stored.items()}


def _specs_outside_layers(shape: ModelShape) -> dict[Parameter, TensorSpec]:
    """List the tensors outside the layers, for a model with both kinds of head and untied embeddings."""
    # Adapters are in layers, and their targets need not be in the first one.
    untied = shape.model_copy(update={"tied_embeddings": False, "layers": 1, "lora": None})
    heads: tuple[Head, ...] = get_args(Head)
    specs = [spec for head in heads for spec in model_tensors(untied, head)]
    return {spec.parameter: spec for spec in specs if spec.layer is None}


def _check(tensor: StoredTensor, spec: TensorSpec, shape: ModelShape) -> None:
    check_type(tensor)
    rows = stored_rows(spec, shape)
    wanted = spec.file_shape if rows is None else (rows, *spec.shape[1:])
    if tensor.shape != wanted:
        found = list(tensor.shape)
        needed = list(wanted)
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has shape {found}, but the model needs {needed}"
        )


def stored_rows(spec: TensorSpec, shape: ModelShape) -> int | None:
    """Return how many rows of a tensor the files have if the vocabulary grows; None if they have all rows."""
    per_token = spec.partition is not None and spec.partition.units is Units.VOCABULARY
    return shape.grown_from if per_token else None


def check_type(tensor: StoredTensor) -> None:
    """Check that a stored tensor has a supported type. Raises UserError if not."""
    if tensor.dtype not in FLOATS and tensor.scales is None:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has type {tensor.dtype}; accepted are {', '.join(FLOATS)}"
        )


def _find_layer(name: str) -> int:
    """Find the number of the layer in the name of a tensor; -1 outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _check_known(
    stored: Mapping[str, StoredTensor], known: Collection[str], buffers: tuple[str, ...]
) -> None:
    for name, tensor in stored.items():
        if name not in known and not name.endswith(buffers):
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
            for tensor in read_header(directory / file, expected)
        }
    single = directory / SINGLE
    if not single.is_file():
        raise UserError(f"{directory}: there is neither {SINGLE} nor {INDEX}; only safetensors are read")
    return {tensor.name: tensor for tensor in read_header(single, None)}


def read_header(file: Path, expected: list[str] | None) -> list[StoredTensor]:
    """List the tensors of a file.

    `expected` are the names that the index lists for the file; None stands for all tensors in the file. Raises
    UserError for a bad file.
    """
    if not file.is_file():
        raise UserError(f"{file} is missing" + ("" if expected is None else f", though {INDEX} names it"))
    with open_file(file) as reader:
        present = set(reader.keys())
        tensors = []
        for name in sorted(present) if expected is None else expected:
            if name not in present:
                raise UserError(f"{file}: tensor {name} is missing")
            piece = reader.get_slice(name)
            tensors.append(StoredTensor(file, name, piece.get_dtype(), tuple(piece.get_shape())))
        return tensors
