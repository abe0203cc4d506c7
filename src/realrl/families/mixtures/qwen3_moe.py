"""Qwen3-MoE: Qwen3 with many small experts in every layer."""

from collections.abc import Mapping
from typing import Any

from realrl.config.explain import brief
from realrl.families.decoder import decoder_tensors
from realrl.families.family import Family
from realrl.families.mixtures.router_settings import ROUTER_LOSS, read_mixture, write_mixture
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    ConfigReader,
    read_sizes,
    write_activation,
    write_sizes,
)
from realrl.families.shape import ModelShape

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
"""Values of Qwen3MoeConfig for settings that a file may leave out, where they are not the usual ones."""


def _read(config: ConfigReader) -> dict[str, Any]:
    dense = config.read("mlp_only_layers", [])
    if dense != []:
        raise config.fail(
            f"mlp_only_layers={brief(dense)} is not supported; all layers of a model must be alike, as plans take"
            " them to be"
        )
    config.fixed({"decoder_sparse_step": 1})
    bias = config.flag("attention_bias", False)
    options = LayerOptions(
        qk_norm="heads",
        qkv_bias=bias,
        out_bias=bias,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    sizes = read_sizes(config, DEFAULTS)
    windowed = config.flag("use_sliding_window", False)
    window = config.size("sliding_window", 4096) if config.has("sliding_window", 4096) else None
    windows = {"window": window, "windowed_layers": tuple(range(sizes["layers"]))}
    return {
        **sizes,
        **(windows if windowed and window is not None else {}),
        "intermediate_size": config.size("moe_intermediate_size", 768),
        "mixture": read_mixture(
            config, experts=128, per_token=8, normalised=config.flag("norm_topk_prob", False)
        ),
        "layer": options,
    }


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    mixture = shape.mixture
    return {
        **write_sizes(shape),
        **write_mixture(shape),
        "moe_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": mixture is not None and mixture.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": bool(shape.windowed_layers),
        "sliding_window": shape.window,
        "attention_bias": options.qkv_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architectures={"lm": "Qwen3MoeForCausalLM", "scalar": "Qwen3MoeForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=LayerOptions(qk_norm="heads"),
    tensors=decoder_tensors,
    mixture=True,
    untouched=("intermediate_size", "max_window_layers", *ROUTER_LOSS),
)
