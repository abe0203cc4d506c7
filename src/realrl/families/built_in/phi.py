"""Phi-3, Phi-3.5 and Phi-4, dense text models: a Llama whose files hold fused matrices."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_activation,
    read_sizes,
    read_windows,
    write_activation,
    write_sizes,
)
from realrl.families.shape import LayerOptions, ModelShape

_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}
_NAMES = Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def _read(config: ConfigReader) -> dict[str, Any]:
    options = LayerOptions(activation=read_activation(config))
    config.fixed(_FIXED)
    config.skip("original_max_position_embeddings")  # the scaling of frequencies reads it
    sizes = read_sizes(config, _DEFAULTS)
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


PHI3 = Family(
    model_type="phi3",
    architectures={"lm": "Phi3ForCausalLM", "scalar": "Phi3ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    tensors=named_decoder(_NAMES),
)
