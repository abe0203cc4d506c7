"""Qwen3, dense models: Llama with norms of each head of queries and keys."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import LayerOptions
from realrl.families.family import Family
from realrl.families.settings import check_fixed, check_full_attention, read_sizes, write_sizes
from realrl.families.shape import ModelShape

FIXED = {"hidden_act": "silu", "attention_bias": False}
DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}
"""Values of Qwen3Config for settings that a file may leave out, where they are not the usual ones."""


def _read(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_fixed(config, FIXED, where)
    check_full_attention(config, where)
    return read_sizes({**DEFAULTS, **config}, where)


def _write(shape: ModelShape) -> dict[str, Any]:
    return {**write_sizes(shape), **FIXED, "use_sliding_window": False}


FAMILY = Family(
    model_type="qwen3",
    architectures={"lm": "Qwen3ForCausalLM", "scalar": "Qwen3ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=LayerOptions(qk_norm=True),
    untouched=("sliding_window", "max_window_layers", "layer_types"),
)
