"""Families near Llama with one or two members each: Granite 3, OLMo 2 and 3, Phi-3 and Phi-4, SmolLM3."""

from typing import Any

from realrl.families.built_in.parts import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Part,
    Settings,
    activation,
    describe,
    fixed,
    one_window,
    rope_by_layer_type,
    sizes,
    windows,
)
from realrl.families.decoder_tensors import Names, named_decoder
from realrl.families.settings import (
    ConfigReader,
    read_unrotated,
    read_windows,
    write_unrotated,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

# Granite 3: a Llama that multiplies embeddings, attention scores, block outputs and logits by constants.


def _read_factors(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    scale = config.positive("attention_multiplier", 1.0)
    options = {
        "embedding_scale": config.positive("embedding_multiplier", 1.0),
        "residual_scale": config.positive("residual_multiplier", 1.0),
        "attention_scale": None if scale == fields["head_dim"] ** -0.5 else scale,
        "logit_scale": 1 / config.positive("logits_scaling", 1.0),
    }
    return {"layer": options}


def _write_factors(shape: ModelShape, options: LayerOptions) -> Settings:
    return {
        "embedding_multiplier": options.embedding_scale,
        "residual_multiplier": options.residual_scale,
        "attention_multiplier": options.attention_scale or shape.head_dim**-0.5,
        "logits_scaling": 1 / options.logit_scale,
    }


GRANITE = describe(
    "granite", "Granite", sizes(), ATTENTION_BIAS, activation(), MLP_BIAS, Part(_read_factors, _write_factors)
)


# OLMo 2 and OLMo 3: norms at the outputs of blocks, and of all heads of queries and keys together.

_OLMO_LAYER = LayerOptions(norm_place="after", qk_norm="all")
_OLMO3_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}

OLMO2 = describe(
    "olmo2", "Olmo2", sizes({"rms_norm_eps": 1e-5}), ATTENTION_BIAS, activation(), layer=_OLMO_LAYER
)
OLMO3 = describe(
    "olmo3",
    "Olmo3",
    sizes(_OLMO3_DEFAULTS, rotary=False),
    # Layers with a window have the same rotary base as all other layers, but their frequencies are not scaled.
    rope_by_layer_type(_OLMO3_DEFAULTS, None),
    windows(lambda layer: (layer + 1) % 4 != 0, 4096),
    ATTENTION_BIAS,
    activation(),
    layer=_OLMO_LAYER,
)


# Phi-3, Phi-3.5 and Phi-4, dense text models: a Llama whose files hold fused matrices.


def _read_original(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    config.skip("original_max_position_embeddings")  # the scaling of frequencies reads it
    return {}


def _write_original(shape: ModelShape, options: LayerOptions) -> Settings:
    scaling = shape.rope_scaling
    original = scaling.original_max_position_embeddings if scaling else shape.max_positions
    return {"original_max_position_embeddings": original}


PHI3 = describe(
    "phi3",
    "Phi3",
    fixed(
        {
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        }
    ),
    sizes({"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}),
    one_window(None),
    Part(_read_original, _write_original),
    activation(),
    tensors=named_decoder(Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")),
)


# SmolLM3: a Llama without rotary embeddings in every fourth layer.


def _read_layer_types(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    layers = fields["layers"]
    unrotated = read_unrotated(config, layers)
    on = config.flag("use_sliding_window", False)
    found = read_windows(config, layers, lambda layer: on and layer in unrotated, None)
    return {**found, "unrotated_layers": unrotated}


def _write_layer_types(shape: ModelShape, options: LayerOptions) -> dict[str, Any]:
    on = {"use_sliding_window": bool(shape.windowed_layers)}
    return {**write_windows(shape), **on, **write_unrotated(shape)}


SMOLLM3 = describe(
    "smollm3",
    "SmolLM3",
    sizes(
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        }
    ),
    Part(_read_layer_types, _write_layer_types),
    ATTENTION_BIAS,
    activation(),
    MLP_BIAS,
    untouched=("no_rope_layer_interval", "sliding_window", "layer_types", "max_window_layers"),
)
