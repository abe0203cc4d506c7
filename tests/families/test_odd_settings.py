"""Settings of `config.json` of any kind: those of published files are read, all others are one error message."""

from itertools import product
from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.families.config_json import shape_from_hf, shape_to_hf
from realrl.families.shape import ModelShape
from tests.conftest import thin
from tests.model.small_models import SHAPES

CASES = {shape.family: shape for name, shape in SHAPES.items() if shape.layers > 1 and name != "biased-yarn"}
ODD = (
    *([], [1], ["a"], [[]], {}, {"a": 1}, {"rope_type": []}, {"rope_type": "yarn", "factor": "2"}),
    *(0, -1, 1, 10**9, 10**400, 0.0, -0.5, 1e-320, 1e308, float("inf"), float("nan")),
    *("", "x", "yarn", "longrope", True, False, None),
)
FURTHER = (
    "rope_scaling",
    "original_max_position_embeddings",
    "layer_types",
    "sliding_window",
    "max_window_layers",
)


@pytest.mark.parametrize("family", thin(CASES, 3))
def test_a_setting_of_any_kind_gives_a_shape_or_one_message(family: str) -> None:
    shape = CASES[family]
    config = shape_to_hf(shape, "lm", "float32", {})
    read = 0
    for key, value in product([*config, *FURTHER], ODD):
        read += gives_a_shape({**config, key: value})
    rope = config.get("rope_parameters", {})
    kinds = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
    for kind, key, value in product(kinds, [*rope, "factor", "short_factor", "beta_fast", "mscale"], ODD):
        changed = {**rope, "rope_type": kind, "factor": 2.0, key: value}
        read += gives_a_shape({**config, "rope_parameters": changed})
    assert read > 40  # such as those with null instead of what is usual


def gives_a_shape(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is read, under the name of its family; under an unknown one it must not be."""
    with pytest.raises(UserError, match="is not supported"):
        shape_from_hf({**config, "model_type": "mystery"})
    try:
        return isinstance(shape_from_hf(config), ModelShape)
    except UserError as error:
        assert "\n" not in str(error)
        return False


PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"pretraining_tp": 2, "is_llama_config": True, "rope_interleaved": False}),  # SmolLM 2
    ("llama", {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}),
    ("llama", {"unsloth_fixed": True, "unsloth_version": "2025.2.5", "pad_token_id": 128004}),
    ("llama", {"_num_labels": 1, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}),
    ("qwen2", {"use_mrope": False, "sliding_window": 131072, "max_window_layers": 70}),
    (
        "phi3",
        {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    ),  # Phi-4
    ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2}),
    (
        "starcoder2",
        {
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "layer_norm_epsilon": 1e-05,
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
    ),
    ("gpt2", {"n_ctx": 1024, "task_specific_params": {"text-generation": {"do_sample": True}}}),
]
"""Settings that published files have besides those that transformers writes, and that change nothing."""


@pytest.mark.parametrize(("family", "further"), PUBLISHED)
def test_settings_of_published_files_that_change_nothing_are_read(
    family: str, further: dict[str, Any]
) -> None:
    shape = CASES[family]
    assert shape_from_hf({**shape_to_hf(shape, "lm", "float32", {}), **further}) == shape
