"""Settings that the `config.json` of most decoders has in common, to and from the fields of a shape."""

from collections.abc import Mapping
from typing import Any

from realrl.config.errors import UserError
from realrl.config.explain import brief
from realrl.families.shape import ModelShape, RopeScaling

SCALING_FIELDS = tuple(RopeScaling.model_fields)
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    """Check that settings have the only value that is supported, or none; UserError if not."""
    for key, wanted in fixed.items():
        if config.get(key, wanted) not in (wanted, None):
            raise UserError(
                f"{where}: {key}={brief(config[key])} is not supported; it must be {brief(wanted)}"
            )


def check_full_attention(config: Mapping[str, Any], where: str) -> None:
    """Check that no layer attends to a sliding window only; UserError if one does.

    `layer_types` decides where it is given; else layers from `max_window_layers` on have a window.
    """
    kinds = config.get("layer_types") or ()
    first, layers = (config.get(key) for key in ("max_window_layers", "num_hidden_layers"))
    if not kinds and not (type(first) is int and type(layers) is int and first >= layers):
        check_fixed(config, {"use_sliding_window": False}, where)
    for kind in kinds:
        if kind != "full_attention":
            raise UserError(
                f"{where}: layer_types has {brief(kind)}, which is not supported; all must be 'full_attention'"
            )


def read_sizes(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read fields of `ModelShape` from the settings of a `config.json`, which `where` names in errors.

    Reads the rotary settings of transformers 5 (`rope_parameters`) and those of before (`rope_theta`,
    `rope_scaling`). UserError for what is missing or not supported.
    """
    for key in _REQUIRED:
        if config.get(key) is None:
            raise UserError(f"{where}: {key} is missing")
        if type(config[key]) is not int or config[key] < 1:
            raise UserError(f"{where}: {key}={brief(config[key])} is not a whole number above 0")
    theta, scaling = _read_rope(config, where)
    heads = config["num_attention_heads"]
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "max_positions": config.get("max_position_embeddings", 2048),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "init_std": config.get("initializer_range", 0.02),
    }


def write_sizes(shape: ModelShape) -> dict[str, Any]:
    """Write the settings that `read_sizes` reads, rotary ones in the style of transformers 5 and of before."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_scaling is not None:
        rope = {"rope_type": "llama3", **shape.rope_scaling.model_dump()}
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if shape.rope_scaling is not None else None,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": shape.init_std,
    }


def _read_rope(config: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Read the base of the rotary frequencies, and their scaling if any."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key) or {}
        if not isinstance(settings, Mapping):
            raise UserError(f"{where}: {key}={brief(settings)} is not a section of keys")
        rope |= settings
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor is not supported; whole heads must be rotated")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{where}: rope_type {brief(kind)} is not supported; supported are: default, llama3")
    missing = [key for key in SCALING_FIELDS if key not in rope]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing from the llama3 rotary settings")
    return theta, {key: rope[key] for key in SCALING_FIELDS}
