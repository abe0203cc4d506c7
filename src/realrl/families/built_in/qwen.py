"""Qwen2 and Qwen2.5, Qwen3, and Qwen3-MoE."""

from realrl.config.explain import brief
from realrl.families.built_in.parts import ATTENTION_BIAS, Part, Settings, activation, describe, sizes
from realrl.families.settings import (
    ROUTER_LOSS,
    ConfigReader,
    read_dense_layers,
    read_mixture,
    read_windows,
    write_mixture,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_WINDOW_SETTINGS = ("sliding_window", "max_window_layers", "layer_types")


def _read_windows(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    """Read windows, which `use_sliding_window` turns on. Unless `layer_types` names the layers with a window, these
    are all layers from number `max_window_layers` on."""
    on = config.flag("use_sliding_window", False)
    first = config.size("max_window_layers", 28, least=0)
    if on:
        return read_windows(config, fields["layers"], lambda layer: layer >= first, 4096)
    config.skip("sliding_window")
    return read_windows(config, fields["layers"], lambda _: False, None)


def _write_windows(shape: ModelShape, options: LayerOptions) -> Settings:
    return {**write_windows(shape), "use_sliding_window": bool(shape.windowed_layers)}


_WINDOWS = Part(_read_windows, _write_windows)
_QWEN3_LAYER = LayerOptions(qk_norm="heads")

QWEN2 = describe(
    "qwen2",
    "Qwen2",
    sizes(_DEFAULTS),
    _WINDOWS,
    activation(),
    layer=LayerOptions(qkv_bias=True),
    untouched=_WINDOW_SETTINGS,
)
QWEN3 = describe(
    "qwen3",
    "Qwen3",
    sizes({**_DEFAULTS, "head_dim": 128}),
    _WINDOWS,
    ATTENTION_BIAS,
    activation(),
    layer=_QWEN3_LAYER,
    untouched=_WINDOW_SETTINGS,
)


def _read_experts(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    named, step = config.read("mlp_only_layers", []), config.size("decoder_sparse_step", 1)
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise config.fail(f"mlp_only_layers={brief(named)} is not a list of whole numbers")
    layers = fields["layers"]
    dense = (layer for layer in range(layers) if layer in named or (layer + 1) % step)
    normalised = config.flag("norm_topk_prob", False)
    return {
        **read_dense_layers(config, layers, dense, fields["intermediate_size"]),
        "intermediate_size": config.size("moe_intermediate_size", 768),
        "mixture": read_mixture(config, experts=128, per_token=8, normalised=normalised),
    }


def _write_experts(shape: ModelShape, options: LayerOptions) -> Settings:
    return {
        **write_mixture(shape),
        "intermediate_size": shape.dense_size or shape.intermediate_size,
        "moe_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": shape.mixture is not None and shape.mixture.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*shape.dense_layers],
    }


def _read_one_window(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    """Read the window, which either all layers have or no layer has. Only Qwen3 has a setting for single layers."""
    on = config.flag("use_sliding_window", False)
    window = config.size("sliding_window", 4096) if config.has("sliding_window", 4096) else None
    if not on or window is None:
        return {}
    return {"window": window, "windowed_layers": tuple(range(fields["layers"]))}


def _write_one_window(shape: ModelShape, options: LayerOptions) -> Settings:
    return {"use_sliding_window": bool(shape.windowed_layers), "sliding_window": shape.window}


QWEN3_MOE = describe(
    "qwen3_moe",
    "Qwen3Moe",
    sizes({"num_key_value_heads": 4, "max_position_embeddings": 32768}),
    Part(_read_experts, _write_experts),
    Part(_read_one_window, _write_one_window),
    ATTENTION_BIAS,
    activation(),
    layer=_QWEN3_LAYER,
    mixture=True,
    untouched=("intermediate_size", "max_window_layers", *ROUTER_LOSS),
)
