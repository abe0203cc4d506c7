"""OLMo 2: norms at the outputs of blocks, and of all heads of queries and keys together."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import decoder_tensors
from realrl.families.family import Family
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    read_sizes,
    write_activation,
    write_sizes,
)
from realrl.families.shape import ModelShape

DEFAULTS = {"rms_norm_eps": 1e-5}
"""Values of Olmo2Config for settings that a file may leave out, where they are not the usual ones."""
USUAL = LayerOptions(norm_place="after", qk_norm="all")


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    options = USUAL.model_copy(update={"qkv_bias": bias, "out_bias": bias, "activation": activation})
    return {**read_sizes(config, DEFAULTS), "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        "attention_bias": options.qkv_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="olmo2",
    architectures={"lm": "Olmo2ForCausalLM", "scalar": "Olmo2ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=decoder_tensors,
)
