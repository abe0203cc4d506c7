"""GPT-2, GPT-NeoX (Pythia) and StarCoder2: LayerNorm, biases, and a feed-forward block without a gate. And gpt-oss,
a mixture of experts."""

from realrl.families.built_in.parts import (
    ATTENTION_BIAS,
    Part,
    Settings,
    activation,
    describe,
    fixed,
    flag,
    mixture,
    one_window,
    sizes,
    windows,
)
from realrl.families.decoder_tensors import Names, named_decoder
from realrl.families.settings import (
    ROUTER_LOSS,
    ConfigReader,
    read_sizes,
    write_partial_rotary,
    write_sizes,
)
from realrl.families.shape import LayerOptions, ModelShape

_LAYER = LayerOptions(
    norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, activation="gelu_tanh", gated=False
)

_GPT2_SIZES = {
    "vocab_size": ("vocab_size", 50257),
    "hidden_size": ("n_embd", 768),
    "layers": ("n_layer", 12),
    "heads": ("n_head", 12),
    "max_positions": ("n_positions", 1024),
}
"""Field of `ModelShape` -> the setting that holds it, and its default."""


def _read_gpt2(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    found = {field: config.size(setting, default) for field, (setting, default) in _GPT2_SIZES.items()}
    hidden, heads = found["hidden_size"], found["heads"]
    if hidden % heads:
        raise config.fail(f"n_embd={hidden} is not a multiple of n_head={heads}")
    return {
        **found,
        "intermediate_size": config.size("n_inner", 4 * hidden),
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "init_std": config.number("initializer_range", 0.02),
    }


def _write_gpt2(shape: ModelShape, options: LayerOptions) -> Settings:
    return {
        **{setting: getattr(shape, field) for field, (setting, _) in _GPT2_SIZES.items()},
        "n_inner": shape.intermediate_size,
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": shape.init_std,
    }


GPT2 = describe(
    "gpt2",
    "GPT2",
    fixed({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}),
    Part(_read_gpt2, _write_gpt2),
    activation("activation_function"),
    layer=_LAYER.model_copy(update={"learned_positions": True}),
    architectures={"lm": "GPT2LMHeadModel", "scalar": "GPT2ForSequenceClassification"},
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


def _read_neox(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    # Older files have the rotary settings under these names.
    older = {
        "rope_theta": config.number("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
    }
    return read_sizes(config, older) | {"norm_eps": config.number("layer_norm_eps", 1e-5)}


def _write_neox(shape: ModelShape, options: LayerOptions) -> Settings:
    sizes = write_sizes(shape)
    for key in ("rms_norm_eps", "num_key_value_heads", "head_dim"):
        del sizes[key]
    return {
        **sizes,
        **write_partial_rotary(shape),
        "layer_norm_eps": shape.norm_eps,
        "rotary_pct": (shape.rotary_dim or shape.head_dim) / shape.head_dim,
        "rotary_emb_base": shape.rope_theta,
    }


GPT_NEOX = describe(
    "gpt_neox",
    "GPTNeoX",
    Part(_read_neox, _write_neox),
    ATTENTION_BIAS,
    activation(),
    flag("use_parallel_residual", "parallel_blocks"),
    layer=_LAYER.model_copy(update={"activation": "gelu", "parallel_blocks": True}),
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


_STARCODER_DEFAULTS = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True}


def _read_starcoder(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    return read_sizes(config, _STARCODER_DEFAULTS) | {"norm_eps": config.number("norm_epsilon", 1e-5)}


def _write_starcoder(shape: ModelShape, options: LayerOptions) -> Settings:
    sizes = write_sizes(shape)
    sizes["norm_epsilon"] = sizes.pop("rms_norm_eps")
    return sizes


STARCODER2 = describe(
    "starcoder2",
    "Starcoder2",
    fixed({"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}),
    Part(_read_starcoder, _write_starcoder),
    one_window(None),
    flag("use_bias", "qkv_bias", "out_bias", "mlp_bias"),
    activation(),
    layer=_LAYER,
    tensors=named_decoder(Names(up="mlp.c_fc", down="mlp.c_proj")),
    untouched=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon"),
        "scale_attention_softmax_in_fp32",
    ),
)


# gpt-oss: attention sinks, windows in every second layer, and experts with biases.


def _check_gpt_oss(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    """Check that files name their rotary settings, and how they pack the matrices of experts. Saved models are not
    packed."""
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        # transformers then scales frequencies, by its own default.
        raise config.fail("rope_parameters is missing")
    packed = config.section("quantization_config")
    packed.fixed({"quant_method": "mxfp4"})
    packed.skip("modules_to_not_convert", "dequantize")
    packed.check_all_read()
    return {}


GPT_OSS = describe(
    "gpt_oss",
    "GptOss",
    # The activation has its own numbers, although files say "silu" (`SWIGLU`).
    fixed({"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}),
    sizes(
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
        }
    ),
    windows(lambda layer: layer % 2 == 0, 128),
    mixture(experts=128, per_token=4, normalised=True),
    ATTENTION_BIAS,
    Part(_check_gpt_oss, lambda shape, options: {}),
    layer=LayerOptions(qkv_bias=True, out_bias=True, mlp_bias=True, sinks=True, activation="clamped_silu"),
    tensors=named_decoder(
        Names(
            router="mlp.router",
            experts_gate_up="mlp.experts.gate_up_proj",
            experts_alternate=True,
            experts_down="mlp.experts.down_proj",
        )
    ),
    mixture=True,
    # The published files repeat some settings under the names of OpenAI's own code.
    untouched=("initial_context_length", "experts_per_token", *ROUTER_LOSS),
)
