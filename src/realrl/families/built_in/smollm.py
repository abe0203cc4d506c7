"""SmolLM3: a Llama without rotary embeddings in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_layer,
    read_sizes,
    read_unrotated,
    read_windows,
    write_layer,
    write_sizes,
    write_unrotated,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


def _read(config: ConfigReader) -> dict[str, Any]:
    options = read_layer(config, mlp_bias=config.flag("mlp_bias", False))
    sizes = read_sizes(config, _DEFAULTS)
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
        **write_layer(options),
        "mlp_bias": options.mlp_bias,
    }


SMOLLM3 = Family(
    model_type="smollm3",
    architectures={"lm": "SmolLM3ForCausalLM", "scalar": "SmolLM3ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    untouched=("no_rope_layer_interval", "sliding_window", "layer_types", "max_window_layers"),
)
