"""Mistral: a Llama whose tokens see only a window of those before them, which models here do not have."""

from collections.abc import Mapping
from typing import Any

from realrl.families.family import Family
from realrl.families.settings import check_fixed, read_sizes, write_sizes
from realrl.families.shape import ModelShape

FIXED = {"hidden_act": "silu"}


def _read(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_fixed(config, FIXED, where)
    return read_sizes(config, where)


def _write(shape: ModelShape) -> dict[str, Any]:
    return {**write_sizes(shape), **FIXED}


FAMILY = Family(
    model_type="mistral",
    architectures={"lm": "MistralForCausalLM", "scalar": "MistralForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    trainable=False,
)
