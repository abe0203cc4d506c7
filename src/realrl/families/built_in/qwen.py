"""Qwen2 and Qwen2.5, Qwen3, and Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from realrl.config.explain import brief
from realrl.families.family import Family
from realrl.families.settings import (
    ROUTER_LOSS,
    ConfigReader,
    read_activation,
    read_layer,
    read_mixture,
    read_sizes,
    read_windows,
    write_activation,
    write_layer,
    write_mixture,
    write_sizes,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

_QWEN2_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_WINDOW_SETTINGS = ("sliding_window", "max_window_layers", "layer_types")


def _read_windows(config: ConfigReader, layers: int) -> dict[str, Any]:
    """Read windows, which `use_sliding_window` turns on. Unless `layer_types` names the layers, they are those
    from `max_window_layers` on."""
    on = config.flag("use_sliding_window", False)
    first = config.size("max_window_layers", 28, least=0)
    if on:
        return read_windows(config, layers, lambda layer: layer >= first, 4096)
    config.skip("sliding_window")
    return read_windows(config, layers, lambda _: False, None)


def _write_windows(shape: ModelShape) -> dict[str, Any]:
    return {**write_windows(shape), "use_sliding_window": bool(shape.windowed_layers)}


def _read_qwen2(config: ConfigReader) -> dict[str, Any]:
    options = LayerOptions(qkv_bias=True, activation=read_activation(config))
    sizes = read_sizes(config, _QWEN2_DEFAULTS)
    return {**sizes, **_read_windows(config, sizes["layers"]), "layer": options}


def _write_qwen2(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), **_write_windows(shape), "hidden_act": write_activation(options)}


QWEN2 = Family(
    model_type="qwen2",
    architectures={"lm": "Qwen2ForCausalLM", "scalar": "Qwen2ForSequenceClassification"},
    read_config=_read_qwen2,
    write_config=_write_qwen2,
    layer=LayerOptions(qkv_bias=True),
    untouched=_WINDOW_SETTINGS,
)


_QWEN3_LAYER = LayerOptions(qk_norm="heads")


def _read_qwen3(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config, {**_QWEN2_DEFAULTS, "head_dim": 128})
    windows = _read_windows(config, sizes["layers"])
    return {**sizes, **windows, "layer": read_layer(config, _QWEN3_LAYER)}


def _write_qwen3(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), **_write_windows(shape), **write_layer(options)}


QWEN3 = Family(
    model_type="qwen3",
    architectures={"lm": "Qwen3ForCausalLM", "scalar": "Qwen3ForSequenceClassification"},
    read_config=_read_qwen3,
    write_config=_write_qwen3,
    layer=_QWEN3_LAYER,
    untouched=_WINDOW_SETTINGS,
)


_QWEN3_MOE_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def _read_qwen3_moe(config: ConfigReader) -> dict[str, Any]:
    dense = config.read("mlp_only_layers", [])
    if dense != []:
        raise config.fail(
            f"mlp_only_layers={brief(dense)} is not supported: plans need layers that are all alike"
        )
    config.fixed({"decoder_sparse_step": 1})
    sizes = read_sizes(config, _QWEN3_MOE_DEFAULTS)
    windowed = config.flag("use_sliding_window", False)
    window = config.size("sliding_window", 4096) if config.has("sliding_window", 4096) else None
    # Unlike Qwen3, it has no setting for single layers: all of them have the window, or none.
    windows = {"window": window, "windowed_layers": tuple(range(sizes["layers"]))}
    return {
        **sizes,
        **(windows if windowed and window is not None else {}),
        "intermediate_size": config.size("moe_intermediate_size", 768),
        "mixture": read_mixture(
            config, experts=128, per_token=8, normalised=config.flag("norm_topk_prob", False)
        ),
        "layer": read_layer(config, _QWEN3_LAYER),
    }


def _write_qwen3_moe(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
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
        **write_layer(options),
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures={"lm": "Qwen3MoeForCausalLM", "scalar": "Qwen3MoeForSequenceClassification"},
    read_config=_read_qwen3_moe,
    write_config=_write_qwen3_moe,
    layer=_QWEN3_LAYER,
    mixture=True,
    untouched=("intermediate_size", "max_window_layers", *ROUTER_LOSS),
)
