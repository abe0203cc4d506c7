"""Llama, from the second generation on."""

from collections.abc import Mapping
from typing import Any

from realrl.families.family import Family
from realrl.families.settings import check_fixed, read_sizes, write_sizes
from realrl.families.shape import ModelShape

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
"""Settings of LlamaConfig that models here have no other value for, at LlamaConfig's defaults."""


def _read(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_fixed(config, FIXED, where)
    return read_sizes(config, where)


def _write(shape: ModelShape) -> dict[str, Any]:
    return {**write_sizes(shape), **FIXED}


FAMILY = Family(
    model_type="llama",
    architectures={"lm": "LlamaForCausalLM", "scalar": "LlamaForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    buffers=("rotary_emb.inv_freq",),
)
