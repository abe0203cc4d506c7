"""Weights in Hugging Face directories, for transformers and inference servers to open."""

import json
import shutil
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from realrl.checkpoint.directory import CONFIG, GENERATION_CONFIG, config_file, local_directory, read_shape
from realrl.checkpoint.headers import INDEX, SINGLE, Contents, StoredTensor, find_tensors, open_file
from realrl.checkpoint.initial_weights import Weights
from realrl.checkpoint.origin import Origin
from realrl.checkpoint.special_tokens import find_classifier_padding, find_saved_ids, list_stop_token_ids
from realrl.checkpoint.stored import group_by_file_tensor, join_tensors, read_region
from realrl.checkpoint.tokenizer_files import Tokenizer, set_padding, write_tokenizer
from realrl.config.errors import UserError
from realrl.config.files import partial_path
from realrl.config.json_file import read_json
from realrl.engine.finite import NotFiniteError, all_finite
from realrl.families.config_json import shape_to_hf
from realrl.families.registry import find_family, model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import TensorSpec
from realrl.layout.region import Region

__all__ = ["Tokenizer", "check", "load", "read_dtype", "read_shape", "save", "shards"]

SHARD_BYTES = 5e9
"""Maximum bytes in one file of tensors."""


def read_dtype(path: str | Path) -> torch.dtype:
    """Read the data type that a model directory is meant for, as far as supported: bfloat16 or float32."""
    config = read_json(config_file(path))
    name = config.get("dtype", config.get("torch_dtype"))
    return torch.bfloat16 if name in ("bfloat16", "float16") else torch.float32


def check(path: str | Path, shape: ModelShape, tensors: Sequence[TensorSpec]) -> list[str]:
    """Check the headers of a model's files; return the names of tensors that are absent."""
    return find_tensors(local_directory(path), shape, tensors).absent


def load(
    path: str | Path,
    shape: ModelShape,
    tensors: Sequence[TensorSpec],
    into: Weights,
    regions: Mapping[str, Region] | None = None,
) -> list[str]:
    """Copy tensors of a model of this shape into a buffer, converting the type; returns names of missing ones.

    `tensors` are global. The buffer holds all of them whole or, with `regions`, only these regions of them,
    from the first row on; nothing else is read.

    Only a scalar head may be missing: a language model has none when one is put on it. Everything else that does
    not fit is a UserError naming file and tensor, and so are weights that are not finite.
    """
    directory = local_directory(path)
    contents = find_tensors(directory, shape, tensors)
    specs = {spec.name: spec for spec in tensors}
    for name, stored in contents.tensors.items():
        if regions is None or name in regions:
            values = _read(stored, specs[name], regions[name] if regions is not None else None)
            own = into[name][: len(values)]
            own.copy_(values)
            if not all_finite(own):
                raise _not_finite(stored, values, own.dtype)
    _check_repeated_head(contents, directory)
    return contents.absent


def _read(stored: StoredTensor, spec: TensorSpec, region: Region | None = None) -> Tensor:
    with open_file(stored.file) as reader:
        return read_region(reader.get_slice(stored.name), spec, region)


def _not_finite(stored: StoredTensor, values: Tensor, dtype: torch.dtype) -> UserError:
    if all_finite(values):
        name = str(dtype).removeprefix("torch.")
        return UserError(f"{stored.file}: tensor {stored.name} has values that {name} cannot hold")
    return UserError(f"{stored.file}: tensor {stored.name} has values that are not finite (NaN or infinity)")


def _check_repeated_head(contents: Contents, directory: Path) -> None:
    """Check that a stored head which is not used equals the embeddings; else UserError."""
    if contents.repeated_head is None:
        return
    repeated, embedding = contents.repeated_head
    if not torch.equal(*(_read(stored, contents.embedding) for stored in (repeated, embedding))):
        raise UserError(
            f"{repeated.file}: {repeated.name} differs from the embeddings it is said to be tied to;"
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
    """Write a model directory, replacing one that is there. The directory appears whole or not at all.

    `weights` holds all tensors, or is called for those of one file at a time (see `shards`), in order.
    NotFiniteError if a value of them is not finite. `origin` is what the model was opened from: all of its
    settings that training does not touch stay as they were.

    A scalar head becomes a sequence classifier with one label. It and its tokenizer get another padding token
    where sequences can end with the tokenizer's own; `stop_token_ids` are tokens that they can end with
    besides those that tokenizer and origin name.
    """
    final = Path(directory)
    partial = partial_path(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fetch = weights if callable(weights) else lambda _: weights
        _save_tensors(partial, shards(model_tensors(shape, head), dtype, max_shard_bytes), fetch, dtype)
        _save_settings(partial, shape, head, tokenizer, dtype, origin, stop_token_ids)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
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
    """Write all files but the tensors."""
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
            _write_json(directory / GENERATION_CONFIG, origin.generation)
        else:
            ended = {
                "eos_token_id": [*stop_token_ids]
                if len(stop_token_ids) > 1
                else next(iter(stop_token_ids), None)
            }
            written = {key: value for key, value in (special | ended).items() if value is not None}
            _write_json(directory / GENERATION_CONFIG, written)


def shards(
    tensors: Sequence[TensorSpec], dtype: torch.dtype, limit: float = SHARD_BYTES
) -> list[list[TensorSpec]]:
    """Group tensors by the file that they are saved in; a file has at most `limit` bytes, or one tensor."""
    files: list[list[TensorSpec]] = [[]]
    used = 0
    for parts in group_by_file_tensor(tensors):
        size = sum(tensor.numel for tensor in parts) * dtype.itemsize
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1] += parts
        used += size
    return files


def _save_tensors(
    directory: Path,
    shards: Sequence[Sequence[TensorSpec]],
    fetch: Callable[[int], Weights],
    dtype: torch.dtype,
) -> None:
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        buffer = fetch(i - 1)
        joined = join_tensors(shard, {t.name: buffer[t.name].detach().to("cpu", dtype) for t in shard})
        content = {name: values.contiguous() for name, values in joined.items()}
        for name, values in content.items():
            if not all_finite(values):
                raise NotFiniteError(f"not saved: {name} has values that are not finite (NaN or infinity)")
        # safetensors replaces the file by one that its owner alone can read, whatever the umask says.
        (directory / file).touch()
        mode = (directory / file).stat().st_mode
        save_file(content, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(stat.S_IMODE(mode))
        weight_map |= dict.fromkeys(content, file)
    if len(shards) > 1:
        total = sum(tensor.numel for shard in shards for tensor in shard) * dtype.itemsize
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
