"""Qwen3, dense models: Llama with norms of each head of queries and keys."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import decoder_tensors
from realrl.families.family import Family
from realrl.families.llamas.qwen2 import read_optional_windows, write_optional_windows
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    read_sizes,
    write_activation,
    write_sizes,
)
from realrl.families.shape import ModelShape

DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}
"""Values of Qwen3Config for settings that a file may leave out, where they are not the usual ones."""


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    options = LayerOptions(
        qk_norm="heads",
        qkv_bias=bias,
        out_bias=bias,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    sizes = read_sizes(config, DEFAULTS)
    return {**sizes, **read_optional_windows(config, sizes["layers"]), "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_optional_windows(shape),
        "attention_bias": options.qkv_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="qwen3",
    architectures={"lm": "Qwen3ForCausalLM", "scalar": "Qwen3ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=LayerOptions(qk_norm="heads"),
    tensors=decoder_tensors,
    untouched=("sliding_window", "max_window_layers", "layer_types"),
)
