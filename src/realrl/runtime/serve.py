"""Open a model for the server."""

from typing import Any, Literal

import torch

from realrl.config.errors import UserError
from realrl.engine.dtypes import find_products, find_torch_dtype
from realrl.engine.model import make_unsharded_model
from realrl.families.shape import ModelShape
from realrl.huggingface import model_files
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.runtime.prepare.inputs import check_length, read_stop_token_ids
from realrl.runtime.processes.host_memory import steady_memory
from realrl.runtime.processes.process import open_device, use_cuda
from realrl.serving.local import LocalEngine

_SHARE_OF_GPU = 0.85
"""Part of a GPU's free memory that the KV cache takes by default. The activations of a prefill need the rest."""
_GIB = 1 << 30
_CPU_CACHE_BYTES = 2 * _GIB
"""Size of the KV cache in a CPU's memory by default."""


def open_engine(
    path: str,
    tokenizer: Any,
    *,
    name: str,
    family: str | None,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "float32", "bfloat16"],
    context_tokens: int | None,
    rows: int,
    cache_gib: float | None,
) -> LocalEngine:
    """Load a model, and start the engine.

    `path` is a Hugging Face directory or hub name, `tokenizer` its tokenizer, `name` the model's name in answers,
    `family` as for `huggingface.directory.read_shape`. `context_tokens` limits prompt and answer together; by
    default, it is the model's maximum, or less if the KV cache has no room for it. `rows` is the number of
    samples that are computed at the same time. `cache_gib` is the size of the cache in GiB; by default, it is 2 GiB
    on a CPU, and most of the free memory of a GPU. Raises UserError if the model or an option cannot be used.
    """
    steady_memory()
    place = open_device(0) if use_cuda(device) else torch.device("cpu")
    shape = model_files.read_shape(path, family)
    stop_token_ids = read_stop_token_ids(tokenizer, path, shape.vocab_size)
    context = _choose_context(shape, context_tokens)
    # On a CPU, bfloat16 is not faster, and float32 reproduces what training computed.
    if dtype == "auto":
        dtype = (
            "float32" if place.type == "cpu" or model_files.read_dtype(path) is torch.float32 else "bfloat16"
        )
    model = make_unsharded_model(
        shape, "lm", dtype=find_torch_dtype(dtype), device=place, products=find_products(dtype, place)
    )
    model_files.load(path, shape, model.layout.specs, model.parameters)
    heads, element = model.transformer.cache_kv_heads, model.dtype.itemsize
    token_bytes = 2 * shape.layers * heads * shape.head_dim * element
    size = int(cache_gib * _GIB) if cache_gib is not None else _choose_cache_bytes(place)
    needed = token_bytes * (context + BLOCK_TOKENS)
    if size < needed and context_tokens is None:
        context = size // token_bytes - BLOCK_TOKENS  # what the cache holds is a better default than an error
    if context < 2 or (size < needed and context_tokens is not None):
        raise UserError(
            f"a KV cache of {size / _GIB:.3g} GiB does not hold one request of {context} tokens, which needs"
            f" {needed / _GIB:.3g} GiB; give --cache-gib or a smaller --context"
        )
    return LocalEngine(
        model,
        name=name,
        stop_token_ids=stop_token_ids,
        context_tokens=context,
        rows=rows,
        kv_tokens=size // token_bytes,
    )


def _choose_context(shape: ModelShape, context: int | None) -> int:
    """Choose the maximum length of a prompt with its answer. Raises UserError if the model does not have as many
    positions.

    A model with LongRoPE uses other frequencies for long sequences. Requests of any length run together, so it gets
    at most its original length.
    """
    most = shape.max_positions
    scaling = shape.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        most = scaling.original_max_position_embeddings or most
        if context is not None and context > most:
            raise UserError(
                f"--context {context} is more than {most}, beyond which this model uses other frequencies for its"
                " positions (LongRoPE); requests of both kinds cannot run together"
            )
    if context is None:
        return most
    check_length(f"--context {context}", context, shape, "the model")
    return context


def _choose_cache_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(_SHARE_OF_GPU * free)
