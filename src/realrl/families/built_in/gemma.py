"""Gemma, Gemma 2, and the text models of Gemma 3."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_activation,
    read_layer,
    read_rope_by_layer_type,
    read_sizes,
    read_windows,
    write_activation,
    write_layer,
    write_rope_by_layer_type,
    write_sizes,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

_GEMMA_DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA_LAYER = LayerOptions(norm_offset=True, activation="gelu_tanh", embedding_scale="root")


def _read_gemma(config: ConfigReader) -> dict[str, Any]:
    config.skip("hidden_activation")
    options = read_layer(config, _GEMMA_LAYER)
    if options.activation == "gelu":
        # Early files say "gelu" and mean the approximation; transformers does the same.
        options = options.model_copy(update={"activation": "gelu_tanh"})
    return {**read_sizes(config, _GEMMA_DEFAULTS), "layer": options}


def _write_gemma(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), **write_layer(options)}


GEMMA = Family(
    model_type="gemma",
    architectures={"lm": "GemmaForCausalLM", "scalar": "GemmaForSequenceClassification"},
    read_config=_read_gemma,
    write_config=_write_gemma,
    layer=_GEMMA_LAYER,
)


_GEMMA2_DEFAULTS = {**_GEMMA_DEFAULTS, "num_key_value_heads": 4}
_NAMES = Names(
    mlp_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_GEMMA2_LAYER = _GEMMA_LAYER.model_copy(
    update={"norm_place": "around", "attention_cap": 50.0, "logit_cap": 30.0}
)


def _read_options(config: ConfigReader, usual: LayerOptions, head_dim: int) -> LayerOptions:
    """Read the options of Gemma 2 and 3."""
    config.skip("hidden_act")  # `hidden_activation` is the setting that counts
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    return read_layer(
        config,
        usual,
        activation=read_activation(config, usual.activation, "hidden_activation"),
        attention_scale=None if scale == head_dim**-0.5 else scale,
        attention_cap=_read_cap(config, "attn_logit_softcapping", usual.attention_cap),
        logit_cap=_read_cap(config, "final_logit_softcapping", usual.logit_cap),
    )


def _read_cap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """Read a bound, which null turns off."""
    return config.positive(key, default or 1.0) if config.has(key, default) else None


def _write_options(shape: ModelShape, options: LayerOptions) -> dict[str, Any]:
    scale = options.attention_scale or shape.head_dim**-0.5
    return {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": options.attention_cap,
        "final_logit_softcapping": options.logit_cap,
        "attention_bias": options.qkv_bias,
        "hidden_activation": write_activation(options),
    }


def _read_gemma2(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config, _GEMMA2_DEFAULTS)
    options = _read_options(config, _GEMMA2_LAYER, sizes["head_dim"])
    windows = read_windows(config, sizes["layers"], lambda layer: layer % 2 == 0, 4096)
    return {**sizes, **windows, "layer": options}


def _write_gemma2(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), **write_windows(shape), **_write_options(shape, options)}


GEMMA2 = Family(
    model_type="gemma2",
    architectures={"lm": "Gemma2ForCausalLM", "scalar": "Gemma2ForSequenceClassification"},
    read_config=_read_gemma2,
    write_config=_write_gemma2,
    layer=_GEMMA2_LAYER,
    tensors=named_decoder(_NAMES),
)


_GEMMA3_DEFAULTS = {
    **_GEMMA2_DEFAULTS,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "windowed_rope_theta": 10000.0,
}
_LOCAL = "rope_local_base_freq"
"""In older files, the rotary base of layers with a window."""
_GEMMA3_LAYER = _GEMMA_LAYER.model_copy(update={"norm_place": "around", "qk_norm": "heads"})


def _read_gemma3(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config, _GEMMA3_DEFAULTS, rotary=False)
    options = _read_options(config, _GEMMA3_LAYER, sizes["head_dim"])
    if config.has("attn_logit_softcapping"):
        # transformers accepts this setting for Gemma 3, but its computation ignores it.
        raise config.fail("attn_logit_softcapping is not supported; it must be null")
    rope = read_rope_by_layer_type(config, sizes["head_dim"], _GEMMA3_DEFAULTS, _LOCAL)
    pattern = config.size("sliding_window_pattern", 6)
    windows = read_windows(config, sizes["layers"], lambda layer: (layer + 1) % pattern != 0, 4096)
    return {**sizes, **rope, **windows, "layer": options}


def _write_gemma3(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_rope_by_layer_type(shape, _LOCAL),
        **write_windows(shape),
        **_write_options(shape, options),
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    architectures={"lm": "Gemma3ForCausalLM", "scalar": "Gemma3TextForSequenceClassification"},
    read_config=_read_gemma3,
    write_config=_write_gemma3,
    layer=_GEMMA3_LAYER,
    tensors=named_decoder(_NAMES),
    untouched=("sliding_window_pattern", "_sliding_window_pattern"),
)
