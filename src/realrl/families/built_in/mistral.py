"""Mistral and Mistral Nemo, Ministral and Mixtral."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.settings import (
    ROUTER_LOSS,
    ConfigReader,
    read_activation,
    read_mixture,
    read_sizes,
    read_windows,
    write_activation,
    write_mixture,
    write_sizes,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}


def _read_mistral(config: ConfigReader) -> dict[str, Any]:
    options = LayerOptions(activation=read_activation(config))
    sizes = read_sizes(config, _DEFAULTS)
    return {**sizes, **read_windows(config, sizes["layers"], lambda _: True, 4096), "layer": options}


def _write_mistral(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), "sliding_window": shape.window, "hidden_act": write_activation(options)}


MISTRAL = Family(
    model_type="mistral",
    architectures={"lm": "MistralForCausalLM", "scalar": "MistralForSequenceClassification"},
    read_config=_read_mistral,
    write_config=_write_mistral,
)


def _write_ministral(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), **write_windows(shape), "hidden_act": write_activation(options)}


# Its file says layer by layer which ones have the window, so that some may have none.
MINISTRAL = Family(
    model_type="ministral",
    architectures={"lm": "MinistralForCausalLM", "scalar": "MinistralForSequenceClassification"},
    read_config=_read_mistral,
    write_config=_write_ministral,
)


_MIXTRAL_DEFAULTS = {**_DEFAULTS, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
_MIXTRAL_FIXED = {"router_jitter_noise": 0.0}
"""Noise on the router's inputs in training would send tokens to other experts than in sampling."""


def _read_mixtral(config: ConfigReader) -> dict[str, Any]:
    config.fixed(_MIXTRAL_FIXED)
    sizes = read_sizes(config, _MIXTRAL_DEFAULTS)
    return {
        **sizes,
        **read_windows(config, sizes["layers"], lambda _: True, None),
        "mixture": read_mixture(config, experts=8, per_token=2, normalised=True),
        "layer": LayerOptions(activation=read_activation(config)),
    }


def _write_mixtral(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_mixture(shape),
        **_MIXTRAL_FIXED,
        "sliding_window": shape.window,
        "hidden_act": write_activation(options),
    }


MIXTRAL = Family(
    model_type="mixtral",
    architectures={"lm": "MixtralForCausalLM", "scalar": "MixtralForSequenceClassification"},
    read_config=_read_mixtral,
    write_config=_write_mixtral,
    tensors=named_decoder(
        Names(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts",
            expert_gate="w1",
            expert_up="w3",
            expert_down="w2",
        )
    ),
    mixture=True,
    untouched=ROUTER_LOSS,
)
