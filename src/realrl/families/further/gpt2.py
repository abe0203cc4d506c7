"""GPT-2: learned positions, LayerNorm, biases, and matrices that are stored transposed."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    write_activation,
)
from realrl.families.shape import ModelShape

NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    attention_norm="ln_1",
    qkv="attn.c_attn",
    out="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    norm="transformer.ln_f",
    transposed=True,
)
USUAL = LayerOptions(
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    activation="gelu_tanh",
    gated=False,
    learned_positions=True,
)
FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
"""Settings of GPT2Config that models here have no other value for."""


def _read(config: ConfigReader) -> dict[str, Any]:
    config.fixed(FIXED)
    hidden, heads = config.size("n_embd", 768), config.size("n_head", 12)
    if hidden % heads:
        raise config.fail(f"n_embd={hidden} is not a multiple of n_head={heads}")
    activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
    return {
        "vocab_size": config.size("vocab_size", 50257),
        "hidden_size": hidden,
        "intermediate_size": config.size("n_inner", 4 * hidden),
        "layers": config.size("n_layer", 12),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": config.size("n_positions", 1024),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "init_std": config.number("initializer_range", 0.02),
        "layer": USUAL.model_copy(update={"activation": activation}),
    }


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **FIXED,
        "vocab_size": shape.vocab_size,
        "n_embd": shape.hidden_size,
        "n_inner": shape.intermediate_size,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": shape.max_positions,
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": shape.init_std,
        "activation_function": write_activation(options),
    }


FAMILY = Family(
    model_type="gpt2",
    architectures={"lm": "GPT2LMHeadModel", "scalar": "GPT2ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=named_decoder(NAMES),
    untouched=(
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("summary_first_dropout", "n_ctx", "reorder_and_upcast_attn"),
    ),
    buffers=("attn.bias", "attn.masked_bias"),
)
