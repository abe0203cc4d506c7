"""Phi-3, Phi-3.5 and Phi-4, dense text models: a Llama with fused matrices, whose frequencies may be stretched."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    read_sizes,
    read_windows,
    write_activation,
    write_sizes,
)
from realrl.families.shape import ModelShape

DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
"""Values of Phi3Config for settings that a file may leave out, where they are not the usual ones."""
FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}
"""Settings of published files that models here have no other value for."""
NAMES = Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def _read(config: ConfigReader) -> dict[str, Any]:
    options = LayerOptions(activation=config.choice("hidden_act", ACTIVATIONS, "silu"))
    config.fixed(FIXED)
    config.skip("original_max_position_embeddings")  # which the scaling of frequencies reads
    sizes = read_sizes(config, DEFAULTS)
    return {**sizes, **read_windows(config, sizes["layers"], lambda _: True, None), "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    scaling = shape.rope_scaling
    original = scaling.original_max_position_embeddings if scaling else shape.max_positions
    return {
        **write_sizes(shape),
        "sliding_window": shape.window,
        "original_max_position_embeddings": original,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="phi3",
    architectures={"lm": "Phi3ForCausalLM", "scalar": "Phi3ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    tensors=named_decoder(NAMES),
)
