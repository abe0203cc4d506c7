"""GLM-4 of 2025: norms around blocks, and half of each head rotated, neighbouring dims together."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    read_sizes,
    write_activation,
    write_partial_rotary,
    write_sizes,
)
from realrl.families.shape import ModelShape

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
"""Values of Glm4Config for settings that a file may leave out, where they are not the usual ones."""
NAMES = Names(
    interleaved=True,
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate_up="mlp.gate_up_proj",
)
USUAL = LayerOptions(norm_place="around", qkv_bias=True)


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", True)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    options = USUAL.model_copy(update={"qkv_bias": bias, "activation": activation})
    return {**read_sizes(config, DEFAULTS), "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_partial_rotary(shape),
        "attention_bias": options.qkv_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="glm4",
    architectures={"lm": "Glm4ForCausalLM", "scalar": "Glm4ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=named_decoder(NAMES),
)
