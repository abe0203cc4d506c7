"""SmolLM3: a Llama without rotary embeddings in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import decoder_tensors
from realrl.families.family import Family
from realrl.families.llamas.unrotated_settings import read_unrotated, write_unrotated
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

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}
"""Values of SmolLM3Config for settings that a file may leave out, where they are not the usual ones."""


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    options = LayerOptions(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    sizes = read_sizes(config, DEFAULTS)
    layers = sizes["layers"]
    unrotated = read_unrotated(config, layers)
    on = config.flag("use_sliding_window", False)
    windows = read_windows(config, layers, lambda layer: on and layer in unrotated, None)
    return {**sizes, **windows, "unrotated_layers": unrotated, "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_windows(shape),
        "use_sliding_window": bool(shape.windowed_layers),
        **write_unrotated(shape),
        "attention_bias": options.qkv_bias,
        "mlp_bias": options.mlp_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="smollm3",
    architectures={"lm": "SmolLM3ForCausalLM", "scalar": "SmolLM3ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    tensors=decoder_tensors,
    untouched=("no_rope_layer_interval", "sliding_window", "layer_types", "max_window_layers"),
)
