"""Load and save models in Hugging Face directories, which transformers and inference servers can also open."""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realrl.config.errors import UserError
from realrl.config.files import partial_path
from realrl.config.json_file import read_json
from realrl.engine.finite import all_finite
from realrl.families.adapter_config import ADAPTER_CONFIG, ADAPTER_FILE, adapter_tensors, write_adapter_config
from realrl.families.adapters import ADAPTERS
from realrl.families.config_json import shape_to_hf
from realrl.families.quantisation import is_scale
from realrl.families.registry import find_family, model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import TensorSpec
from realrl.huggingface.adapters import PREFIX, AdapterFile
from realrl.huggingface.directory import (
    CONFIG,
    GENERATION_CONFIG,
    Origin,
    config_file,
    find_saved_adapters,
    local_directory,
    read_shape,
)
from realrl.huggingface.headers import (
    INDEX,
    SINGLE,
    Contents,
    StoredTensor,
    TensorFiles,
    find_tensors,
    stored_rows,
)
from realrl.huggingface.shards import (
    FileTensor,
    Portion,
    describe_file,
    join_portions,
    list_portions,
    list_shards,
    write_file,
)
from realrl.huggingface.tensor_conversion import (
    Weights,
    join_tensors,
    read_grown,
    read_parts,
    take_stored,
    write_quantised,
)
from realrl.huggingface.tokenizers import (
    Tokenizer,
    find_classifier_padding,
    find_saved_ids,
    list_stop_token_ids,
    set_padding,
    write_tokenizer,
)
from realrl.layout.region import Region

__all__ = [
    "ModelFiles",
    "Tokenizer",
    "check",
    "load",
    "read_dtype",
    "read_shape",
    "save",
    "save_adapters",
]

SHARD_BYTES = 5e9
"""Maximum bytes in one file of tensors. A file with a single tensor may be larger."""


def read_dtype(path: str | Path) -> torch.dtype:
    """Choose the dtype for a model: bfloat16 if its `config.json` names bfloat16 or float16, or if its files are
    packed; otherwise float32."""
    config = read_json(config_file(path))
    if config.get("quantization_config") is not None:
        return torch.bfloat16
    name = config.get("dtype", config.get("torch_dtype"))
    return torch.bfloat16 if name in ("bfloat16", "float16") else torch.float32


def check(path: str | Path, shape: ModelShape, tensors: Sequence[TensorSpec]) -> list[str]:
    """Check the headers of a model's files. Returns the names of missing tensors, without those of adapters."""
    return ModelFiles(path, shape, tensors).absent


def load(
    path: str | Path,
    shape: ModelShape,
    tensors: Sequence[TensorSpec],
    into: Weights,
    regions: Mapping[str, Region] | None = None,
) -> list[str]:
    """Copy the tensors of a model into a buffer and convert their dtype. Returns the names of missing tensors.

    `tensors` describe whole tensors. With `regions`, the buffer holds only these regions of the tensors, and
    nothing else is read. The values of a region begin in the first row of its tensor in `into`. Quantised matrices
    are read and quantised part by part. A part consists of whole rows, because each row has a scale.

    If `path` has adapters in PEFT's format and `tensors` has none, the adapters are merged into their base model.
    If `tensors` has adapters too, they are loaded as adapters.

    Only a scalar head and adapters may be missing. Raises UserError, which names the file and the tensor, if
    anything else does not fit or a weight is not finite.
    """
    source = ModelFiles(path, shape, tensors)
    specs = {spec.name: spec for spec in tensors}
    with TensorFiles() as files:
        for name, stored in sorted(source.found.items(), key=lambda item: _place(item[1])):
            if regions is None or name in regions:
                region = None if regions is None else regions[name]
                if specs[name].quantised is not None:
                    _read_quantised(source, files, specs[name], region, into)
                    continue
                for index, values in source.read_parts(files, specs[name], region):
                    own = into[name][index]
                    own.copy_(values)
                    if not all_finite(own):
                        raise _not_finite(stored, values, own.dtype)
        _check_repeated_head(source.contents, shape, files, source.directory, regions)
    return [name for name in specs if name not in source.found]


def _read_quantised(
    source: "ModelFiles", files: TensorFiles, spec: TensorSpec, region: Region | None, into: Weights
) -> None:
    """Read a matrix or a region of it, quantise it, and write it with the scales of its rows."""
    height, width = spec.shape if region is None else region.size
    first, column = (0, 0) if region is None else region.offset
    rows = Region(spec.name, (first, 0), (height, spec.shape[1]))
    for (part,), values in source.read_parts(files, spec, rows):
        if not all_finite(values):
            raise _not_finite(source.found[spec.name], values, values.dtype)
        write_quantised(into, spec, part, values, slice(column, column + width))


def _place(stored: StoredTensor) -> tuple[Path, str]:
    """Return the sort key that orders tensors by file, and within a file by name, as on the disk."""
    return stored.file, stored.name


class ModelFiles:
    """The files from which a model is read, including the file of its adapters if it has any."""

    def __init__(self, path: str | Path, shape: ModelShape, tensors: Sequence[TensorSpec]) -> None:
        """Find and check the model's tensors in its files. Raises UserError if the files do not fit the model."""
        saved = find_saved_adapters(path)
        self._adapters = None if saved is None else AdapterFile(saved)
        tensors = [spec for spec in tensors if not is_scale(spec)]
        own = [spec for spec in tensors if spec.parameter not in ADAPTERS]
        self.directory = local_directory(path if saved is None else saved.base)
        self.contents = find_tensors(self.directory, shape, own)
        self._shape = shape
        self._continued = len(own) < len(tensors)
        self.found: dict[str, StoredTensor] = {**self.contents.tensors}
        """Where each tensor of the model is stored, by name."""
        if self._adapters is not None:
            self._adapters.check(own)
            if shape.lora is not None:
                self._adapters.check_continued(shape.lora, tensors)
            self.found |= {
                spec.name: self._adapters.tensors[spec.file_name]
                for spec in tensors
                if spec.file_name in self._adapters.tensors
            }
        self.absent = [spec.name for spec in own if spec.name not in self.found]

    def read_parts(
        self, files: TensorFiles, spec: TensorSpec, region: Region | None
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Read a region of a tensor, or all of it.

        Yields the index of each part within the region, and its values.
        """
        opened, adapters = files.find(self.found[spec.name]), self._adapters
        if adapters is not None and spec.parameter in ADAPTERS and spec.expert is not None:
            # Files mix the numbers of all experts, and their slices cannot skip columns.
            opened = adapters.read(spec.file_name)
        rows_there = stored_rows(spec, self._shape)
        if rows_there is not None:
            yield from read_grown(opened, spec, region, rows_there)
            return
        merged = adapters is not None and not self._continued and adapters.adapts(spec)
        for index, values in read_parts(opened, spec, region):
            if adapters is None or not merged:
                yield index, values
                continue
            (rows,) = index
            first = 0 if region is None else region.offset[0]
            part = range(first + rows.start, first + rows.stop)
            columns = slice(0, spec.shape[1]) if region is None else region.slices[1]
            whole = partial(_read_rows, opened, spec, part)
            yield index, adapters.merge(values, spec, part, columns, whole)

    def read(self, spec: TensorSpec, region: Region | None) -> Tensor:
        """Read a region of a tensor, or all of it."""
        with TensorFiles() as files:
            parts = [values for _, values in self.read_parts(files, spec, region)]
            return torch.cat(parts)


def _read_rows(opened: Any, spec: TensorSpec, rows: range) -> Tensor:
    """Read whole rows of a matrix."""
    region = Region(spec.name, (rows.start, 0), (len(rows), spec.shape[1]))
    return torch.cat([values for _, values in read_parts(opened, spec, region)])


def _not_finite(stored: StoredTensor, values: Tensor, dtype: torch.dtype) -> UserError:
    if all_finite(values):
        name = str(dtype).removeprefix("torch.")
        return UserError(f"{stored.file}: tensor {stored.name} has values that {name} cannot hold")
    return UserError(f"{stored.file}: tensor {stored.name} has values that are not finite (NaN or infinity)")


def _check_repeated_head(
    contents: Contents,
    shape: ModelShape,
    files: TensorFiles,
    directory: Path,
    regions: Mapping[str, Region] | None,
) -> None:
    """If a head is stored although it is tied, check that it equals the embeddings. Raises UserError if not."""
    spec = contents.embedding
    if contents.repeated_head is None or (regions is not None and spec.name not in regions):
        return
    repeated, embedding = contents.repeated_head
    region = None if regions is None else regions[spec.name]
    rows = stored_rows(spec, shape)
    if rows is not None:
        region = take_stored(spec, region, rows)
    with TensorFiles() as others:
        pairs = zip(
            read_parts(files.find(embedding), spec, region),
            read_parts(others.find(repeated), spec, region),
            strict=True,
        )
        equal = all(torch.equal(values, again) for (_, values), (_, again) in pairs)
    if not equal:
        raise UserError(
            f"{repeated.file}: {repeated.name} differs from the embeddings to which config.json ties it;"
            f" set tie_word_embeddings to false in {directory / CONFIG}"
        )


def save(
    directory: str | Path,
    shape: ModelShape,
    head: Head,
    weights: Weights | Callable[[int], Weights],
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    max_shard_bytes: float = SHARD_BYTES,
    *,
    origin: Origin | None = None,
    stop_token_ids: Collection[int] = (),
) -> None:
    """Write a model directory. It replaces an older directory only when it is complete.

    `weights` holds all tensors, or is a function that returns the portion of `list_portions` with a given number.
    Each portion is written before the next one is requested. Raises NotFiniteError if a value is not finite.
    `origin` has the settings of the model that was loaded; settings that training does not change are copied from
    it.

    A model with a scalar head is saved as a sequence classifier with one label. If sequences can end with the
    tokenizer's padding token, the classifier and its tokenizer get another padding token. `stop_token_ids` are
    tokens that can end a sequence, in addition to the tokens that `tokenizer` and `origin` name.
    """
    with _whole_directory(Path(directory)) as unfinished:
        tensors = model_tensors(shape, head)
        fetch = weights if callable(weights) else partial(_take, weights, list_portions(tensors, dtype))
        _save_tensors(unfinished, tensors, fetch, dtype, max_shard_bytes)
        _save_settings(unfinished, shape, head, tokenizer, dtype, origin, stop_token_ids)


def save_adapters(
    directory: str | Path,
    shape: ModelShape,
    head: Head,
    weights: Weights,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    base: str,
) -> None:
    """Write adapters, and the scalar head if there is one, in PEFT's format. Works like `save` in all other ways.

    `weights` holds the `adapter_tensors`. `base` is the directory or hub name of their base model.
    """
    assert shape.lora is not None, "a model without adapters is saved whole"
    tensors = model_tensors(shape, head)
    own = adapter_tensors(tensors)
    with _whole_directory(Path(directory)) as unfinished:
        joined = join_tensors(own, {spec.name: weights[spec.name] for spec in own})
        named = {f"{PREFIX}{name}": values for name, values in joined.items()}
        described = {name: FileTensor(tuple(values.shape), dtype) for name, values in named.items()}
        write_file(unfinished / ADAPTER_FILE, described, iter(named.items()))
        _write_json(unfinished / ADAPTER_CONFIG, write_adapter_config(tensors, shape.lora, head, base))
        if tokenizer is not None:
            write_tokenizer(tokenizer, unfinished, find_family(shape.family).model_type)


@contextmanager
def _whole_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory to write into. It replaces `final` when the block ends without an error."""
    unfinished = partial_path(final)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _save_settings(
    directory: Path,
    shape: ModelShape,
    head: Head,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    origin: Origin | None,
    stop_token_ids: Collection[int],
) -> None:
    """Write all files except the tensors."""
    special = find_saved_ids(tokenizer, origin)
    if tokenizer is not None:
        write_tokenizer(tokenizer, directory, find_family(shape.family).model_type)
        stop_token_ids = dict.fromkeys(
            [*list_stop_token_ids(tokenizer, origin, shape.vocab_size), *stop_token_ids]
        )
        if head == "scalar":
            pad = special["pad_token_id"] = find_classifier_padding(
                tokenizer, stop_token_ids, shape.vocab_size
            )
            if pad != tokenizer.pad_token_id:
                set_padding(directory, None if pad is None else tokenizer.convert_ids_to_tokens(pad))
    kept = {} if origin is None else origin.config
    name = str(dtype).removeprefix("torch.")
    _write_json(directory / CONFIG, shape_to_hf(shape, head, name, {**kept, **special}))
    if head == "lm":
        if origin is not None and origin.generation is not None:
            (directory / GENERATION_CONFIG).write_bytes(origin.generation_file)
        else:
            ended = {
                "eos_token_id": [*stop_token_ids]
                if len(stop_token_ids) > 1
                else next(iter(stop_token_ids), None)
            }
            written = {key: value for key, value in (special | ended).items() if value is not None}
            _write_json(directory / GENERATION_CONFIG, written)


def _take(weights: Weights, portions: Sequence[Portion], number: int) -> Mapping[str, Tensor]:
    """Select the weights of the portion with this number."""
    return {part.spec.name: weights[part.spec.name][part.region.slices] for part in portions[number]}


def _save_tensors(
    directory: Path,
    tensors: Sequence[TensorSpec],
    fetch: Callable[[int], Weights],
    dtype: torch.dtype,
    limit: float,
) -> None:
    """Write the safetensors files and their index. `fetch` returns the portion with a given number."""
    files = list_shards(tensors, dtype, limit)
    weight_map: dict[str, str] = {}
    joined = join_portions(
        (portion, fetch(number)) for number, portion in enumerate(list_portions(tensors, dtype))
    )
    for i, shard in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        described = describe_file(shard, dtype)
        write_file(directory / file, described, joined)
        weight_map |= dict.fromkeys(described, file)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in describe_file(tensors, dtype).values())
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
