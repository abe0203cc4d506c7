"""Gemma 2: norms around blocks, bounded scores and logits, and a sliding window in every other layer."""

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
    write_windows,
)
from realrl.families.shape import ModelShape

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Values of Gemma2Config for settings that a file may leave out, where they are not the usual ones."""
NAMES = Names(
    mlp_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
USUAL = LayerOptions(
    norm_offset=True,
    norm_place="around",
    activation="gelu_tanh",
    embedding_scale="root",
    attention_cap=50.0,
    logit_cap=30.0,
)


def read_scale(config: ConfigReader, head_dim: int) -> float | None:
    """Read the factor of scores; None for the usual one."""
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    return None if scale == head_dim**-0.5 else scale


def read_cap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """Read a bound, which null turns off."""
    return config.positive(key, default or 1.0) if config.has(key, default) else None


def _read(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config, DEFAULTS)
    bias = config.flag("attention_bias", False)
    config.skip("hidden_act")
    changes = {
        "qkv_bias": bias,
        "out_bias": bias,
        "activation": config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        "attention_scale": read_scale(config, sizes["head_dim"]),
        "attention_cap": read_cap(config, "attn_logit_softcapping", 50.0),
        "logit_cap": read_cap(config, "final_logit_softcapping", 30.0),
    }
    windows = read_windows(config, sizes["layers"], lambda layer: layer % 2 == 0, 4096)
    return {**sizes, **windows, "layer": USUAL.model_copy(update=changes)}


def write_scores(shape: ModelShape, options: LayerOptions) -> dict[str, Any]:
    """Write the factor of scores, and the bounds of scores and logits."""
    scale = options.attention_scale or shape.head_dim**-0.5
    return {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": options.attention_cap,
        "final_logit_softcapping": options.logit_cap,
    }


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_windows(shape),
        **write_scores(shape, options),
        "attention_bias": options.qkv_bias,
        "hidden_activation": write_activation(options),
    }


FAMILY = Family(
    model_type="gemma2",
    architectures={"lm": "Gemma2ForCausalLM", "scalar": "Gemma2ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=named_decoder(NAMES),
)
