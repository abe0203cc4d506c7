"""GPT-NeoX and Pythia: LayerNorm, biases, blocks side by side, and a quarter of each head rotated."""

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

NAMES = Names(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    qkv="attention.query_key_value",
    qkv_by_heads=True,
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
)
USUAL = LayerOptions(
    norm="layer",
    parallel_blocks=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    activation="gelu",
    gated=False,
)


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", True)
    changes = {
        "qkv_bias": bias,
        "out_bias": bias,
        "parallel_blocks": config.flag("use_parallel_residual", True),
        "activation": config.choice("hidden_act", ACTIVATIONS, "gelu"),
    }
    older = {
        "rope_theta": config.number("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
    }
    sizes = read_sizes(config, older) | {"norm_eps": config.number("layer_norm_eps", 1e-5)}
    return {**sizes, "layer": USUAL.model_copy(update=changes)}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    sizes = write_sizes(shape)
    for key in ("rms_norm_eps", "num_key_value_heads", "head_dim"):
        del sizes[key]
    rotated = shape.rotary_dim or shape.head_dim
    return {
        **sizes,
        **write_partial_rotary(shape),
        "layer_norm_eps": shape.norm_eps,
        "rotary_pct": rotated / shape.head_dim,
        "rotary_emb_base": shape.rope_theta,
        "attention_bias": options.qkv_bias,
        "use_parallel_residual": options.parallel_blocks,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="gpt_neox",
    architectures={"lm": "GPTNeoXForCausalLM", "scalar": "GPTNeoXForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=named_decoder(NAMES),
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
