"""Ministral: Mistral with a sliding window in some of its layers, as its configuration class names them."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import decoder_tensors
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

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
"""Values of MinistralConfig for settings that a file may leave out, where they are not the usual ones."""


def _read(config: ConfigReader) -> dict[str, Any]:
    options = LayerOptions(activation=config.choice("hidden_act", ACTIVATIONS, "silu"))
    sizes = read_sizes(config, DEFAULTS)
    return {**sizes, **read_windows(config, sizes["layers"], lambda _: True, 4096), "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), **write_windows(shape), "hidden_act": write_activation(options)}


FAMILY = Family(
    model_type="ministral",
    architectures={"lm": "MinistralForCausalLM", "scalar": "MinistralForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    tensors=decoder_tensors,
)
