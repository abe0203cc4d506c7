"""Gemma: scaled embeddings, norms that multiply by 1 + weight, and a gate with GELU."""

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

DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Values of GemmaConfig for settings that a file may leave out, where they are not the usual ones."""
USUAL = LayerOptions(norm_offset=True, activation="gelu_tanh", embedding_scale="root")


def _read(config: ConfigReader) -> dict[str, Any]:
    # Early files say "gelu", and mean the approximation, as transformers knows.
    meanings = {**ACTIVATIONS, "gelu": "gelu_tanh"}
    config.skip("hidden_activation")
    activation = config.choice("hidden_act", meanings, "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    options = USUAL.model_copy(update={"qkv_bias": bias, "out_bias": bias, "activation": activation})
    return {**read_sizes(config, DEFAULTS), "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        "attention_bias": options.qkv_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="gemma",
    architectures={"lm": "GemmaForCausalLM", "scalar": "GemmaForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=USUAL,
    tensors=decoder_tensors,
)
