"""Conversion between PEFT's `adapter_config.json` and the settings of low-rank adapters.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from realrl.config.errors import UserError
from realrl.config.explain import brief, explain
from realrl.config.json_file import read_json
from realrl.config.paths import local_path
from realrl.families.adapters import ADAPTERS, LORA_A, STACKS_A, LowRank, list_modules
from realrl.families.settings import ConfigReader
from realrl.families.shape import Head
from realrl.families.tensors import TensorSpec

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_TASKS: Mapping[Head, str] = {"lm": "CAUSAL_LM", "scalar": "SEQ_CLS"}
_TRAINING = (
    "auto_mapping inference_mode revision lora_dropout exclude_modules layers_to_transform layers_pattern"
    " megatron_config megatron_core eva_config runtime_config peft_version ensure_weight_tying qalora_group_size"
)
_SCALAR_HEADS = ("classifier", "score")
_IN_FILE = "target_modules target_parameters task_type fan_in_fan_out modules_to_save"
"""Settings that affect only training (`_TRAINING`), or that follow from the file of tensors (`_IN_FILE`)."""
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base model, so that its own weights can be used."""
_FIXED: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings for which only this value is supported."""


@dataclass(frozen=True)
class SavedAdapters:
    """Adapters in a directory in PEFT's format."""

    directory: Path
    base: str
    """Model that the adapters belong to: a directory or hub name."""
    lora: LowRank
    """Settings; `targets` is None unless the file lists plain names of matrices and adapts all layers."""
    parameters: frozenset[str] = frozenset()
    """Last parts of the names of parameters, other than weights of modules, that have adapters, such as
    `gate_up_proj`. They stack the matrices of experts."""


def find_adapters(path: str | Path) -> SavedAdapters | None:
    """Read the settings of the adapters in a directory; None if it has no adapters, or holds a whole model. Raises
    UserError for adapters that are not supported."""
    file = local_path(str(path)) / ADAPTER_CONFIG
    if not file.is_file() or (file.parent / "config.json").is_file():
        return None
    settings = read_json(file)
    config = ConfigReader(settings, str(file))
    if config.read("init_lora_weights", True) not in _BEGINNINGS:
        raise config.fail(
            f"init_lora_weights={brief(config.read('init_lora_weights'))} is not supported: it changes the model"
            " that the adapters belong to; convert them to plain LoRA with PEFT"
        )
    whole = settings.get("modules_to_save") or []
    unsupported = (
        [name for name in whole if name not in _SCALAR_HEADS] if isinstance(whole, list) else [whole]
    )
    if unsupported:
        raise config.fail(
            f"modules_to_save={brief(unsupported)} is not supported except for a scalar head; first merge the"
            " adapters into their model with PEFT's merge_and_unload()"
        )
    for key, wanted in _FIXED.items():
        if config.has(key):
            config.fixed({key: wanted})
    base = config.read("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise config.fail(f"base_model_name_or_path={brief(base)} does not name a model")
    try:
        lora = LowRank(
            rank=config.size("r", 8),
            alpha=config.positive("lora_alpha", 8.0),
            rslora=config.flag("use_rslora", False),
            dora=config.flag("use_dora", False),
            targets=_read_targets(settings),
        )
    except ValidationError as error:
        raise UserError(f"{file}: {explain(error, LowRank)}") from error
    config.skip(*_TRAINING.split(), *_IN_FILE.split())
    # Every other setting is off if it is null, empty or false.
    config.skip(*(key for key in config.unread() if not settings[key]))
    config.check_all_read()
    return SavedAdapters(file.parent, base, lora, frozenset(_list_parameters(settings)))


def _read_targets(settings: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Read the names of adapted matrices; None unless they are plain names that apply to all layers."""
    names = settings.get("target_modules")
    some = any(settings.get(key) for key in ("layers_to_transform", "exclude_modules"))
    names = [] if names is None else names
    plain = isinstance(names, list) and all(isinstance(name, str) and name.isidentifier() for name in names)
    found = [*names, *(f"experts.{name}" for name in _list_parameters(settings))] if plain else []
    return tuple(sorted(found)) if found and not some else None


def _list_parameters(settings: Mapping[str, Any]) -> list[str]:
    """List the last parts of the names of adapted parameters that are not weights of modules."""
    names = settings.get("target_parameters")
    return [str(name).rpartition(".")[2] for name in names] if isinstance(names, list) else []


def write_adapter_config(
    tensors: Sequence[TensorSpec], lora: LowRank, head: Head, base: str
) -> dict[str, Any]:
    """Make the contents of `adapter_config.json` for PEFT. `tensors` are all tensors of the model, adapters
    included."""
    adapted = {
        spec.file_name.partition(".lora_A")[0] for spec in tensors if spec.parameter in LORA_A.values()
    }
    weights = [spec for spec in tensors if spec.file_name.removesuffix(".weight") in adapted]
    held = {spec.parameter for spec in tensors}
    adapted_stacks = {stack for stack, a in STACKS_A.items() if a in held}
    stacks = list_modules(spec for spec in tensors if spec.parameter in adapted_stacks)
    local = local_path(base)
    return {
        "peft_type": "LORA",
        "task_type": _TASKS[head],
        "base_model_name_or_path": str(local.resolve()) if local.is_dir() else base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
        "target_parameters": sorted({module.target for module in stacks}) or None,
        "modules_to_save": None if head == "lm" else [*_SCALAR_HEADS],
        "fan_in_fan_out": any(spec.stored is not None and spec.stored.transposed for spec in weights),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "inference_mode": True,
    }


def adapter_tensors(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Select the tensors that a file of adapters holds: the adapters, and a scalar head."""
    return tuple(s for s in tensors if s.parameter in ADAPTERS or s.parameter == "scalar_head")
