"""Gemma 3, text models: norms of heads, and a sliding window with a base of its own in five of six layers."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import named_decoder
from realrl.families.family import Family
from realrl.families.further.gemma2 import NAMES, read_cap, read_scale, write_scores
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

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "windowed_rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
"""Values of Gemma3TextConfig for settings that a file may leave out, where they are not the usual ones."""
LOCAL = "rope_local_base_freq"
"""Older files' base of the frequencies of layers with a window."""
USUAL = LayerOptions(
    norm_offset=True,
    norm_place="around",
    activation="gelu_tanh",
    embedding_scale="root",
    qk_norm="heads",
)


def _read(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config, DEFAULTS, rotary=False)
    bias = config.flag("attention_bias", False)
    config.skip("hidden_act")
    changes = {
        "qkv_bias": bias,
        "out_bias": bias,
        "activation": config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        "attention_scale": read_scale(config, sizes["head_dim"]),
        "logit_cap": read_cap(config, "final_logit_softcapping", None),
    }
    if config.has("attn_logit_softcapping"):
        # transformers reads it, and computes without it.
        raise config.fail("attn_logit_softcapping is not supported; it must be null")
    rope = read_rope_by_layer_type(config, sizes["head_dim"], DEFAULTS, LOCAL)
    pattern = config.size("sliding_window_pattern", 6)
    windows = read_windows(config, sizes["layers"], lambda layer: (layer + 1) % pattern != 0, 4096)
    return {**sizes, **rope, **windows, "layer": USUAL.model_copy(update=changes)}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_rope_by_layer_type(shape, LOCAL),
        **write_windows(shape),
        **write_scores(shape, options),
        "attention_bias": options.qkv_bias,
        "hidden_activation": write_activation(options),
    }


FAMILY = Family(
    model_type="gemma3_text",
    architectures={"lm": "Gemma3ForCausalLM", "scalar": "Gemma3TextForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=named_decoder(NAMES),
    untouched=("sliding_window_pattern", "_sliding_window_pattern"),
)
