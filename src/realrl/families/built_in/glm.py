"""GLM-4 of 2025: norms around blocks; rotary embeddings turn half of each head, in pairs of neighbouring dims."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_layer,
    read_sizes,
    write_layer,
    write_partial_rotary,
    write_sizes,
)
from realrl.families.shape import LayerOptions, ModelShape

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
_NAMES = Names(
    interleaved=True,
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate_up="mlp.gate_up_proj",
)
_LAYER = LayerOptions(norm_place="around", qkv_bias=True)


def _read(config: ConfigReader) -> dict[str, Any]:
    return {**read_sizes(config, _DEFAULTS), "layer": read_layer(config, _LAYER, out_bias=False)}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_partial_rotary(shape),
        **write_layer(options),
    }


GLM4 = Family(
    model_type="glm4",
    architectures={"lm": "Glm4ForCausalLM", "scalar": "Glm4ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=_LAYER,
    tensors=named_decoder(_NAMES),
)
