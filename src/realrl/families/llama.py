"""The Llama family's Hugging Face `config.json`, to and from our shape."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from realrl.config.errors import UserError
from realrl.config.explain import brief, explain
from realrl.config.json_file import read_json
from realrl.families.shape import TRAINABLE, Family, Head, ModelShape, RopeScaling

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
"""Settings of LlamaConfig that our model has no other value for, at LlamaConfig's defaults."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
UNTOUCHED = ("attention_dropout", "use_cache", *SPECIAL_TOKENS)
"""Settings of LlamaConfig that a shape does not hold and training leaves as they are."""

SCALING_FIELDS = tuple(RopeScaling.model_fields)


def read_config(file: Path, families: Sequence[Family] = TRAINABLE) -> ModelShape:
    """The shape that a `config.json` describes; UserError if it is absent, no JSON, or of a model not supported."""
    return shape_from_hf(read_json(file), where=str(file), families=families)


def shape_from_hf(
    config: Mapping[str, Any], where: str = "config.json", families: Sequence[Family] = TRAINABLE
) -> ModelShape:
    """The shape a Hugging Face `config.json` of one of these families describes; `where` names the file in errors.

    Reads the rotary settings of transformers 5 (`rope_parameters`) and those of before (`rope_theta`,
    `rope_scaling`). UserError for another family, or a setting our model does not have.
    """
    family = config.get("model_type")
    if family not in families:
        names = ", ".join(families)
        raise UserError(f"{where}: model_type {brief(family)} is not supported; supported is: {names}")
    for key, wanted in FIXED.items():
        if config.get(key, wanted) not in (wanted, None):
            raise UserError(
                f"{where}: {key}={brief(config[key])} is not supported; it must be {brief(wanted)}"
            )
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in required:
        if config.get(key) is None:
            raise UserError(f"{where}: {key} is missing")
        if type(config[key]) is not int or config[key] < 1:
            raise UserError(f"{where}: {key}={brief(config[key])} is not a whole number above 0")
    theta, scaling = _rope(config, where)
    heads = config["num_attention_heads"]
    fields: dict[str, Any] = {
        "family": family,
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
    try:
        return ModelShape(**fields)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, ModelShape)}") from error


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Base of the rotary frequencies, and their scaling if any."""
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


def shape_to_hf(shape: ModelShape, head: Head, dtype: str, others: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of `config.json`, understood by transformers 5 and 4 and by inference servers.

    `dtype` is torch's name, such as `float32`; `others` are values of UNTOUCHED settings, of which absent ones are
    left to LlamaConfig. A scalar head is a sequence classifier with one label.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_scaling is not None:
        rope = {"rope_type": "llama3", **shape.rope_scaling.model_dump()}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if head == "lm" else "LlamaForSequenceClassification"],
        "model_type": "llama",
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
        "dtype": dtype,
        "torch_dtype": dtype,
        **FIXED,
        **{name: others[name] for name in UNTOUCHED if name in others},
    }
    if head == "scalar":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config
