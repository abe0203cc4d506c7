"""Llama, from the second generation on."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import decoder_tensors
from realrl.families.family import Family
from realrl.families.options import LayerOptions
from realrl.families.settings import ACTIVATIONS, ConfigReader, read_sizes, write_activation, write_sizes
from realrl.families.shape import ModelShape


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    options = LayerOptions(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    return {**read_sizes(config), "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        "attention_bias": options.qkv_bias,
        "mlp_bias": options.mlp_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="llama",
    architectures={"lm": "LlamaForCausalLM", "scalar": "LlamaForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    tensors=decoder_tensors,
    buffers=("rotary_emb.inv_freq",),
)
