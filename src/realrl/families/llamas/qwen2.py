"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import decoder_tensors
from realrl.families.family import Family
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    read_sizes,
    read_windows,
    write_activation,
    write_sizes,
    write_windows,
)
from realrl.families.shape import ModelShape

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
"""Values of Qwen2Config for settings that a file may leave out, where they are not the usual ones."""


def read_optional_windows(config: ConfigReader, layers: int) -> dict[str, Any]:
    """Read windows that a switch turns on, from a number of layers on where `layer_types` does not name them."""
    on = config.flag("use_sliding_window", False)
    first = config.size("max_window_layers", 28, least=0)
    if on:
        return read_windows(config, layers, lambda layer: layer >= first, 4096)
    config.skip("sliding_window")
    return read_windows(config, layers, lambda _: False, None)


def _read(config: ConfigReader) -> dict[str, Any]:
    options = LayerOptions(qkv_bias=True, activation=config.choice("hidden_act", ACTIVATIONS, "silu"))
    sizes = read_sizes(config, DEFAULTS)
    return {**sizes, **read_optional_windows(config, sizes["layers"]), "layer": options}


def write_optional_windows(shape: ModelShape) -> dict[str, Any]:
    """Write the settings that `read_optional_windows` reads."""
    return {**write_windows(shape), "use_sliding_window": bool(shape.windowed_layers)}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_optional_windows(shape),
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="qwen2",
    architectures={"lm": "Qwen2ForCausalLM", "scalar": "Qwen2ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=LayerOptions(qkv_bias=True),
    tensors=decoder_tensors,
    untouched=("sliding_window", "max_window_layers", "layer_types"),
)
