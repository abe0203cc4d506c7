"""Weights in Hugging Face directories, for transformers and inference servers to open."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from realrl.checkpoint.directory import local_directory, read_shape
from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.config.llama import shape_to_hf
from realrl.config.shape import Head, ModelShape
from realrl.engine.flat import FlatBuffer
from realrl.layout.region import Region
from realrl.layout.tensors import TensorSpec, model_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, LM_HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
SHARD_BYTES = 5e9
"""Most bytes in one file of tensors."""
FLOATS = ("F64", "F32", "F16", "BF16")


class Tokenizer(Protocol):
    """What is saved beside the weights; a transformers tokenizer is one."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files into a directory."""


def read_dtype(path: str | Path) -> torch.dtype:
    """The type in which a model directory is meant to be used, as far as we compute in it: bfloat16 or float32."""
    config = read_json(local_directory(path) / "config.json")
    name = config.get("dtype", config.get("torch_dtype"))
    return torch.bfloat16 if name in ("bfloat16", "float16") else torch.float32


def load(
    path: str | Path,
    tensors: Sequence[TensorSpec],
    into: FlatBuffer,
    regions: Mapping[str, Region] | None = None,
) -> list[str]:
    """Copy a model's tensors into a buffer, converting the type; returns the names that were missing.

    `tensors` are global. The buffer holds all of them whole or, with `regions`, only these regions of them,
    from the first row on; nothing else is read.

    Only `score.weight` may be missing: a language model has none when a scalar head is put on it. Everything
    else that does not fit is a UserError naming file and tensor.
    """
    directory = local_directory(path)
    wanted = {tensor.name: tensor for tensor in tensors}
    files = _tensor_files(directory)
    if SCORE in files and SCORE not in wanted:
        raise UserError(f"{directory} is a sequence classifier, not a language model: it has a {SCORE}")
    untied = LM_HEAD in wanted and LM_HEAD not in files and read_shape(directory).tied_embeddings
    for name, spec in wanted.items():
        if (regions is not None and name not in regions) or (name == SCORE and name not in files):
            continue
        source = EMBEDDING if untied and name == LM_HEAD else name
        part = regions[name] if regions is not None else None
        values = _read(files.get(source), spec, source, directory, part)
        into[name][: len(values)].copy_(values)
    _check_rest(files, wanted, directory)
    return [name for name in wanted if name not in files and not (untied and name == LM_HEAD)]


def _check_rest(files: dict[str, Path], wanted: dict[str, TensorSpec], directory: Path) -> None:
    """UserError if the files hold tensors that would be lost without notice."""
    known = {EMBEDDING, LM_HEAD, SCORE}
    for name, file in files.items():
        if name not in wanted and name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"{file}: tensor {name} does not belong to the model that config.json describes")
    if LM_HEAD in files and LM_HEAD not in wanted and SCORE not in wanted:
        spec = wanted[EMBEDDING]
        head, table = (_read(files[n], spec, n, directory) for n in (LM_HEAD, EMBEDDING))
        if not torch.equal(head, table):
            raise UserError(
                f"{files[LM_HEAD]}: lm_head.weight differs from the embeddings it is said to be tied to;"
                f" set tie_word_embeddings to false in {directory / 'config.json'}"
            )


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = directory / INDEX
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise UserError(f"{index}: weight_map is missing")
        return {name: directory / file for name, file in names.items()}
    single = directory / SINGLE
    if not single.is_file():
        raise UserError(f"{directory}: there is neither {SINGLE} nor {INDEX}; only safetensors are read")
    with _open(single) as reader:
        return dict.fromkeys(reader.keys(), single)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from error


def _read(
    file: Path | None, spec: TensorSpec, name: str, directory: Path, region: Region | None = None
) -> Tensor:
    if file is None:
        raise UserError(f"{directory}: tensor {name} is missing from the safetensors files")
    with _open(file) as reader:
        try:
            piece = reader.get_slice(name)
        except SafetensorError as error:
            raise UserError(f"{file}: tensor {name} is missing") from error
        if piece.get_dtype() not in FLOATS:
            raise UserError(
                f"{file}: tensor {name} has type {piece.get_dtype()}; accepted are {', '.join(FLOATS)}"
            )
        if tuple(piece.get_shape()) != spec.shape:
            found, needed = list(piece.get_shape()), list(spec.shape)
            raise UserError(f"{file}: tensor {name} has shape {found}, but the model needs {needed}")
        if region is None:
            return reader.get_tensor(name)
        return piece[region.slices] if region.numel else torch.empty(region.size)


def save(
    directory: str | Path,
    shape: ModelShape,
    head: Head,
    weights: FlatBuffer | Callable[[int], FlatBuffer],
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    max_shard_bytes: float = SHARD_BYTES,
) -> None:
    """Write a model directory, replacing one that is there. The directory appears whole or not at all.

    `weights` holds all tensors, or is called for those of one file at a time (see `shards`), in order. A scalar
    head becomes a sequence classifier with one label, scored at the last token that is not padding,
    so a tokenizer whose padding token is its end of sequence would make transformers score one token early.
    """
    final = Path(directory)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fetch = (lambda _: weights) if isinstance(weights, FlatBuffer) else weights
    _save_tensors(partial, shards(model_tensors(shape, head), dtype, max_shard_bytes), fetch, dtype)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = {name: getattr(tokenizer, name, None) for name in names}
    _write_json(partial / "config.json", shape_to_hf(shape, head, str(dtype).removeprefix("torch."), special))
    if head == "lm":
        _write_json(partial / "generation_config.json", {k: v for k, v in special.items() if v is not None})
    if tokenizer is not None:
        tokenizer.save_pretrained(str(partial))
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def shards(
    tensors: Sequence[TensorSpec], dtype: torch.dtype, limit: float = SHARD_BYTES
) -> list[list[TensorSpec]]:
    """Tensors by the file that they are saved in; a file has at most `limit` bytes, or one tensor."""
    files: list[list[TensorSpec]] = [[]]
    used = 0
    for tensor in tensors:
        size = tensor.numel * dtype.itemsize
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += size
    return files


def _save_tensors(
    directory: Path,
    shards: Sequence[Sequence[TensorSpec]],
    fetch: Callable[[int], FlatBuffer],
    dtype: torch.dtype,
) -> None:
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        buffer = fetch(i - 1)
        content = {t.name: buffer[t.name].detach().to("cpu", dtype).contiguous() for t in shard}
        save_file(content, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
    if len(shards) > 1:
        total = sum(tensor.numel for shard in shards for tensor in shard) * dtype.itemsize
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
