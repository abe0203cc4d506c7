"""Gemma, Gemma 2, and the text models of Gemma 3."""

from typing import Any

from realrl.families.built_in.parts import (
    ATTENTION_BIAS,
    Part,
    Settings,
    activation,
    describe,
    rope_by_layer_type,
    sizes,
    windows,
)
from realrl.families.decoder_tensors import Names, named_decoder
from realrl.families.settings import (
    ConfigReader,
    read_activation,
    read_windows,
    write_activation,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

_DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_LAYER = LayerOptions(norm_offset=True, activation="gelu_tanh", embedding_scale="root")


def _read_activation(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    config.skip("hidden_activation")
    found = read_activation(config, usual.activation)
    # Early files say "gelu" and mean the approximation by a tanh. transformers reads them in the same way.
    return {"layer": {"activation": "gelu_tanh" if found == "gelu" else found}}


GEMMA = describe(
    "gemma",
    "Gemma",
    sizes(_DEFAULTS),
    ATTENTION_BIAS,
    Part(_read_activation, lambda shape, options: {"hidden_act": write_activation(options)}),
    layer=_LAYER,
)


def _read_options(config: ConfigReader, fields: Settings, usual: LayerOptions) -> dict[str, Any]:
    config.skip("hidden_act")  # `hidden_activation` is the setting that counts
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    options = {
        "attention_scale": None if scale == fields["head_dim"] ** -0.5 else scale,
        "attention_cap": _read_cap(config, "attn_logit_softcapping", usual.attention_cap),
        "logit_cap": _read_cap(config, "final_logit_softcapping", usual.logit_cap),
    }
    return {"layer": options}


def _read_cap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """Read the bound of a soft cap. null turns the cap off."""
    return config.positive(key, default or 1.0) if config.has(key, default) else None


def _write_options(shape: ModelShape, options: LayerOptions) -> Settings:
    scale = options.attention_scale or shape.head_dim**-0.5
    return {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": options.attention_cap,
        "final_logit_softcapping": options.logit_cap,
    }


_OPTIONS = (Part(_read_options, _write_options), ATTENTION_BIAS, activation("hidden_activation"))
_TENSORS = named_decoder(
    Names(
        mlp_norm="pre_feedforward_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
)
_GEMMA2_DEFAULTS = {**_DEFAULTS, "num_key_value_heads": 4}

GEMMA2 = describe(
    "gemma2",
    "Gemma2",
    sizes(_GEMMA2_DEFAULTS),
    *_OPTIONS,
    windows(lambda layer: layer % 2 == 0, 4096),
    layer=_LAYER.model_copy(update={"norm_place": "around", "attention_cap": 50.0, "logit_cap": 30.0}),
    tensors=_TENSORS,
)


_GEMMA3_DEFAULTS = {
    **_GEMMA2_DEFAULTS,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "windowed_rope_theta": 10000.0,
}


def _read_gemma3_windows(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    if config.has("attn_logit_softcapping"):
        # transformers accepts this setting for Gemma 3, but its computation ignores it.
        raise config.fail("attn_logit_softcapping is not supported; it must be null")
    pattern = config.size("sliding_window_pattern", 6)
    return read_windows(config, fields["layers"], lambda layer: (layer + 1) % pattern != 0, 4096)


GEMMA3 = describe(
    "gemma3_text",
    "Gemma3",
    sizes(_GEMMA3_DEFAULTS, rotary=False),
    *_OPTIONS,
    # Older files have the rotary base of layers with a window in a setting of their own.
    rope_by_layer_type(_GEMMA3_DEFAULTS, "rope_local_base_freq"),
    Part(_read_gemma3_windows, lambda shape, options: write_windows(shape)),
    layer=_LAYER.model_copy(update={"norm_place": "around", "qk_norm": "heads"}),
    architectures={"lm": "Gemma3ForCausalLM", "scalar": "Gemma3TextForSequenceClassification"},
    tensors=_TENSORS,
    untouched=("sliding_window_pattern", "_sliding_window_pattern"),
)
