"""Mixtral: Mistral with experts, of which each token passes through two."""

from collections.abc import Mapping
from typing import Any

from realrl.families.decoder import Names, named_decoder
from realrl.families.family import Family
from realrl.families.mixtures.router_settings import ROUTER_LOSS, read_mixture, write_mixture
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

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}
"""Values of MixtralConfig for settings that a file may leave out, where they are not the usual ones."""
FIXED = {"router_jitter_noise": 0.0}
"""Noise on what routers read in training, which would send tokens elsewhere than sampling did."""


def _read(config: ConfigReader) -> dict[str, Any]:
    config.fixed(FIXED)
    options = LayerOptions(activation=config.choice("hidden_act", ACTIVATIONS, "silu"))
    sizes = read_sizes(config, DEFAULTS)
    return {
        **sizes,
        **read_windows(config, sizes["layers"], lambda _: True, None),
        "mixture": read_mixture(config, experts=8, per_token=2, normalised=True),
        "layer": options,
    }


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_mixture(shape),
        **FIXED,
        "sliding_window": shape.window,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="mixtral",
    architectures={"lm": "MixtralForCausalLM", "scalar": "MixtralForSequenceClassification"},
    read_config=_read,
    write_config=_write,
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
