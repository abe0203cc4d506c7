"""Granite 3: a Llama that multiplies embeddings, attention scores, block outputs and logits by constants."""

from collections.abc import Mapping
from typing import Any

from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_layer,
    read_sizes,
    write_layer,
    write_sizes,
)
from realrl.families.shape import LayerOptions, ModelShape


def _read(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config)
    scale = config.positive("attention_multiplier", 1.0)
    options = read_layer(
        config,
        mlp_bias=config.flag("mlp_bias", False),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        attention_scale=None if scale == sizes["head_dim"] ** -0.5 else scale,
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )
    return {**sizes, "layer": options}


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_layer(options),
        "mlp_bias": options.mlp_bias,
        "embedding_multiplier": options.embedding_scale,
        "residual_multiplier": options.residual_scale,
        "attention_multiplier": options.attention_scale or shape.head_dim**-0.5,
        "logits_scaling": 1 / options.logit_scale,
    }


GRANITE = Family(
    model_type="granite",
    architectures={"lm": "GraniteForCausalLM", "scalar": "GraniteForSequenceClassification"},
    read_config=_read,
    write_config=_write,
)
