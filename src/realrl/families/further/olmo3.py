"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose frequencies are not stretched."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import decoder_tensors
from realrl.families.family import Family
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    read_rope_by_layer_type,
    read_sizes,
    read_windows,
    write_activation,
    write_rope_by_layer_type,
    write_sizes,
    write_windows,
)
from realrl.families.shape import ModelShape

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}
"""Values of Olmo3Config for settings that a file may leave out, where they are not the usual ones."""
USUAL = LayerOptions(norm_place="after", qk_norm="all")


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    options = USUAL.model_copy(update={"qkv_bias": bias, "out_bias": bias, "activation": activation})
    sizes = read_sizes(config, DEFAULTS, rotary=False)
    rope = read_rope_by_layer_type(config, sizes["head_dim"], DEFAULTS, None)
    windows = read_windows(config, sizes["layers"], lambda layer: (layer + 1) % 4 != 0, 4096)
    return {**sizes, **rope, **windows, "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_rope_by_layer_type(shape, None),
        **write_windows(shape),
        "attention_bias": options.qkv_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="olmo3",
    architectures={"lm": "Olmo3ForCausalLM", "scalar": "Olmo3ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=decoder_tensors,
)
