"""GPT-2, GPT-NeoX (Pythia) and StarCoder2: LayerNorm, biases, and a feed-forward block without a gate."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_activation,
    read_layer,
    read_sizes,
    read_windows,
    write_activation,
    write_layer,
    write_partial_rotary,
    write_sizes,
)
from realrl.families.shape import LayerOptions, ModelShape

_LAYER = LayerOptions(
    norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, activation="gelu_tanh", gated=False
)

_GPT2_LAYER = _LAYER.model_copy(update={"learned_positions": True})
_GPT2_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def _read_gpt2(config: ConfigReader) -> dict[str, Any]:
    config.fixed(_GPT2_FIXED)
    hidden, heads = config.size("n_embd", 768), config.size("n_head", 12)
    if hidden % heads:
        raise config.fail(f"n_embd={hidden} is not a multiple of n_head={heads}")
    activation = read_activation(config, _GPT2_LAYER.activation, "activation_function")
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
        "layer": _GPT2_LAYER.model_copy(update={"activation": activation}),
    }


def _write_gpt2(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **_GPT2_FIXED,
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


GPT2 = Family(
    model_type="gpt2",
    architectures={"lm": "GPT2LMHeadModel", "scalar": "GPT2ForSequenceClassification"},
    read_config=_read_gpt2,
    write_config=_write_gpt2,
    layer=_GPT2_LAYER,
    tensors=named_decoder(
        Names(
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
    ),
    untouched=(
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("summary_first_dropout", "n_ctx", "reorder_and_upcast_attn"),
    ),
    buffers=("attn.bias", "attn.masked_bias"),
)


_NEOX_LAYER = _LAYER.model_copy(update={"activation": "gelu", "parallel_blocks": True})


def _read_neox(config: ConfigReader) -> dict[str, Any]:
    options = read_layer(config, _NEOX_LAYER, parallel_blocks=config.flag("use_parallel_residual", True))
    # Older files have the rotary settings under these names.
    older = {
        "rope_theta": config.number("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
    }
    sizes = read_sizes(config, older) | {"norm_eps": config.number("layer_norm_eps", 1e-5)}
    return {**sizes, "layer": options}


def _write_neox(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
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
        **write_layer(options),
        "use_parallel_residual": options.parallel_blocks,
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures={"lm": "GPTNeoXForCausalLM", "scalar": "GPTNeoXForSequenceClassification"},
    read_config=_read_neox,
    write_config=_write_neox,
    layer=_NEOX_LAYER,
    tensors=named_decoder(
        Names(
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
    ),
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)


_STARCODER_DEFAULTS = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_STARCODER_FIXED = {"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}


def _read_starcoder(config: ConfigReader) -> dict[str, Any]:
    config.fixed(_STARCODER_FIXED)
    bias = config.flag("use_bias", True)
    activation = read_activation(config, _LAYER.activation)
    changes = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "activation": activation}
    sizes = read_sizes(config, _STARCODER_DEFAULTS) | {"norm_eps": config.number("norm_epsilon", 1e-5)}
    windows = read_windows(config, sizes["layers"], lambda _: True, None)
    return {**sizes, **windows, "layer": _LAYER.model_copy(update=changes)}


def _write_starcoder(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    sizes = write_sizes(shape)
    del sizes["rms_norm_eps"]
    return {
        **sizes,
        "norm_epsilon": shape.norm_eps,
        "sliding_window": shape.window,
        "use_bias": options.mlp_bias,
        "hidden_act": write_activation(options),
    }


STARCODER2 = Family(
    model_type="starcoder2",
    architectures={"lm": "Starcoder2ForCausalLM", "scalar": "Starcoder2ForSequenceClassification"},
    read_config=_read_starcoder,
    write_config=_write_starcoder,
    layer=_LAYER,
    tensors=named_decoder(Names(up="mlp.c_fc", down="mlp.c_proj")),
    untouched=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon"),
        "scale_attention_softmax_in_fp32",
    ),
)
