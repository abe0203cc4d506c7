"""Models of random weights, small enough that a step takes milliseconds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from realrl.checkpoint import huggingface
from realrl.checkpoint.initial_weights import initialise
from realrl.engine.buffers import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.testing.shape import SHAPE


def save_model(
    directory: Path, head: Head, tokenizer: Any, sizes: Mapping[str, Any] = SHAPE, *, seed: int = 3
) -> None:
    """Save a model of random weights with its tokenizer, as a Hugging Face directory.

    Weights are larger than those that training starts from, so that what is predicted depends on every layer.
    """
    shape = ModelShape.model_validate({**sizes, "init_std": 0.2})
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, torch.device("cpu"))
    initialise(buffer, tensors, shape, seed=seed)
    for tensor in tensors:
        if tensor.parameter == "scalar_head":  # which starts with zeros
            buffer[tensor.name].normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    huggingface.save(directory, shape, head, buffer, tokenizer, torch.float32)
