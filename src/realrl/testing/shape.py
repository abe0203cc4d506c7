"""Sizes of tiny models."""

from collections.abc import Mapping
from typing import Any

SHAPE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "tied_embeddings": True,
}
"""Sizes that can be cut in two, by tensor and by pipeline parallelism."""
