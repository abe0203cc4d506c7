"""Published sizes add up to the published numbers of parameters."""

import pytest

from realrl.families.config_json import check_writing
from realrl.families.registry import model_tensors
from realrl.families.sizes import SHAPES

TOTALS = {
    "llama-2-7b": 6738415616,
    "llama-2-13b": 13015864320,
    "llama-2-70b": 68976648192,
    "codellama-34b": 33743970304,
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "llama-3.2-1b": 1235814400,
    "qwen2.5-0.5b": 494032768,
    "qwen2.5-1.5b": 1543714304,
    "qwen2.5-3b": 3085938688,
    "qwen2.5-7b": 7615616512,
    "qwen2.5-14b": 14770033664,
    "qwen2.5-32b": 32763876352,
    "qwen2.5-72b": 72706203648,
    "qwen3-0.6b": 596049920,
    "qwen3-1.7b": 1720574976,
    "qwen3-4b": 4022468096,
    "qwen3-8b": 8190735360,
    "qwen3-14b": 14768307200,
    "qwen3-32b": 32762123264,
    "gemma-2-2b": 2614341888,
    "gemma-2-9b": 9241705984,
    "gemma-2-27b": 27227128320,
    "gemma-3-1b": 999885952,
    "ministral-8b": 8019808256,
    "mixtral-8x7b": 46702792704,
    "mixtral-8x22b": 140620634112,
    "llama-4-scout": 107769861120,  # of 108641793536, whose others are the vision model's
    "qwen3-30b-a3b": 30532122624,
    "qwen3-235b-a22b": 235093634560,
    "glm-4.5-air": 106852245504,  # without the layer that predicts tokens further ahead
}
"""Elements of the published checkpoints, as their safetensors indices and model cards have them."""
MILLIONS = {
    "llama-3.1-8b": 8030,
    "llama-3.1-70b": 70554,
    "llama-3.1-405b": 405853,
    "llama-3.2-3b": 3213,
    "mistral-7b": 7248,
    "mistral-nemo-12b": 12248,
    "gemma-2b": 2506,
    "gemma-7b": 8538,
    "phi-4": 14660,
    "olmo-2-7b": 7299,
    "olmo-2-13b": 13716,
    "glm-4-9b": 9400,
    "glm-4.5": 352798,  # 355 billion are with the layer that predicts tokens further ahead
    "granite-3.1-2b": 2534,
    "granite-3.1-8b": 8171,
    "gpt-oss-20b": 20910,
    "gpt-oss-120b": 116830,
    "smollm3-3b": 3075,
    "gpt2": 124.44,
    "gpt2-medium": 355,
    "gpt2-large": 774,
    "gpt2-xl": 1558,
    "pythia-410m": 405,
    "pythia-1b": 1012,
    "pythia-1.4b": 1415,
    "pythia-2.8b": 2775,
    "pythia-6.9b": 6857,
    "pythia-12b": 11846,
}
"""Parameters that model cards and the hub name, in millions."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_model_has_the_published_number_of_parameters(name: str) -> None:
    tensors = model_tensors(SHAPES[name], "lm")
    parameters = sum(spec.numel for spec in tensors if spec.parameter != "router_correction")
    if name in TOTALS:
        assert parameters == TOTALS[name]
    else:
        assert parameters / 1e6 == pytest.approx(MILLIONS[name], rel=2e-3)
    check_writing(SHAPES[name])
