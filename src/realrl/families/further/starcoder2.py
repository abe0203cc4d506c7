"""StarCoder2: LayerNorm, biases, and a feed-forward block without a gate."""

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
)
from realrl.families.shape import ModelShape

DEFAULTS = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True}
"""Values of Starcoder2Config for settings that a file may leave out, where they are not the usual ones."""
NAMES = Names(up="mlp.c_fc", down="mlp.c_proj")
USUAL = LayerOptions(
    norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, activation="gelu_tanh", gated=False
)


FIXED = {"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}
"""Settings of published files that models here have no other value for."""


def _read(config: ConfigReader) -> dict[str, Any]:
    config.fixed(FIXED)
    bias = config.flag("use_bias", True)
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    changes = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "activation": activation}
    sizes = read_sizes(config, DEFAULTS) | {"norm_eps": config.number("norm_epsilon", 1e-5)}
    windows = read_windows(config, sizes["layers"], lambda _: True, None)
    return {**sizes, **windows, "layer": USUAL.model_copy(update=changes)}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    sizes = write_sizes(shape)
    del sizes["rms_norm_eps"]
    return {
        **sizes,
        "norm_epsilon": shape.norm_eps,
        "sliding_window": shape.window,
        "use_bias": options.mlp_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="starcoder2",
    architectures={"lm": "Starcoder2ForCausalLM", "scalar": "Starcoder2ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=named_decoder(NAMES),
    untouched=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon"),
        "scale_attention_softmax_in_fp32",
    ),
)
