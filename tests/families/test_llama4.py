"""Llama 4: how long its sequences may be, which of its files are read, and how stacked experts are saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer
from realrl.families.config_json import shape_from_hf, shape_to_hf
from realrl.families.registry import model_tensors
from realrl.families.shape import RopeScaling
from realrl.huggingface import model_files, shards
from realrl.model.packing import Packing
from realrl.model.rotary import make_rotation
from realrl.runtime.prepare.inputs import check_length
from tests.model.small_models import SHAPES, make_theirs, make_twins, pack, random_rows

SHAPE = SHAPES["llama4"]
LONG = {"max_position_embeddings": 10**7}


def config_with(**changes: Any) -> dict[str, Any]:
    return make_theirs(SHAPE, "lm").config.to_dict() | LONG | changes


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 8191),
        ({"floor_scale": 100}, 99),
        ({"attention_chunk_size": 90, "floor_scale": 100}, 90),
        ({"attn_temperature_tuning": False}, 8192),
        ({"attn_temperature_tuning": 4, "floor_scale": 70}, 69),
        ({"layer_types": ["full_attention"] * 2, "attn_temperature_tuning": False}, 10**7),
        ({"no_rope_layers": [0, 0], "layer_types": None}, 8191),
        ({"no_rope_layers": [1, 1], "attention_chunk_size": 20000}, 20000),
        ({"max_position_embeddings": 77}, 77),
    ],
)
def test_positions_end_where_chunks_or_scaled_scores_begin(changes: dict[str, Any], positions: int) -> None:
    config = config_with(**changes)
    shape = shape_from_hf(config)
    assert shape.max_positions == positions
    written = shape_to_hf(shape, "lm", "float32", config)
    for name in ("max_position_embeddings", "attention_chunk_size", "floor_scale", "attn_temperature_tuning"):
        assert written[name] == config[name]
    assert shape_from_hf(written) == shape


def test_longer_sequences_are_one_message_that_says_what_bounds_them() -> None:
    with pytest.raises(UserError) as caught:
        check_length("data.max_tokens=9000", 9000, shape_from_hf(config_with()), "the model of models.actor")
    assert str(caught.value) == (
        "data.max_tokens=9000 is more than the 8191 positions that the model of models.actor is declared for, or"
        " has within its attention_chunk_size and floor_scale, beyond which attention is not supported"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"layer_types": ["sliding_attention"] * 2},
            "must be a list of 2 words, each chunked_attention or full",
        ),
        ({"floor_scale": 1}, "floor_scale=1 is not a whole number above 1"),
        ({"attn_temperature_tuning": "on"}, "attn_temperature_tuning='on' is not true or false"),
    ],
)
def test_a_model_that_differs_otherwise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        shape_from_hf(config_with(**changes))
    assert words in str(caught.value)


def test_the_model_that_reads_images_too_is_refused_with_the_text_model_in_it() -> None:
    with pytest.raises(UserError, match=r"'llama4' reads more than text and is not .* llama4_text, is: save"):
        shape_from_hf({"model_type": "llama4", "text_config": config_with()})


def test_dense_layers_compute_what_transformers_computes() -> None:
    """As in Llama 4 Maverick."""
    shape = SHAPE.model_copy(update={"dense_layers": (0,), "dense_size": 36})
    ours, _, theirs = make_twins(shape, "lm")
    tokens, lengths = pack(random_rows(shape.vocab_size, [30, 9]))
    with torch.no_grad():
        logits = ours.compute_logits(ours(tokens, Packing.of(lengths, "cpu")))
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens.split(lengths)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_an_empty_list_of_rotated_layers_is_the_usual_one() -> None:
    """As in meta-llama/Llama-4-Scout-17B-16E."""
    config = AutoConfig.for_model(**config_with(no_rope_layers=[], layer_types=None))
    assert shape_from_hf(config_with(no_rope_layers=[])) == shape_from_hf(config.to_dict())


def test_equal_bounds_of_frequencies_divide_those_below() -> None:
    """As in Scout's files, which transformers warns of."""
    scaling = RopeScaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=64
    )
    shape = SHAPE.model_copy(update={"rope_scaling": scaling})
    config = AutoConfig.for_model(**shape_to_hf(shape, "lm", "float32", {}))
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    rotation = make_rotation(shape, 0)
    assert rotation is not None
    torch.testing.assert_close(rotation.frequencies, expected)
    assert make_rotation(shape, 1) is None


@pytest.mark.parametrize("limit", [1, 20_000])
def test_stacks_of_experts_are_saved_expert_by_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(shards, "PORTION_BYTES", limit)
    specs = model_tensors(SHAPE, "lm")
    experts = [spec for spec in specs if spec.expert is not None]
    largest = max(
        sum(part.region.numel for part in portion if part.spec in experts)
        for portion in shards.list_portions(specs, torch.float32)
    )
    matrices = 2 * SHAPE.intermediate_size * SHAPE.hidden_size
    assert largest == matrices if limit == 1 else largest <= limit / 4
    theirs = make_theirs(SHAPE, "lm")
    theirs.save_pretrained(tmp_path / "theirs")
    buffer = FlatBuffer(specs, torch.float32, "cpu")
    model_files.load(tmp_path / "theirs", SHAPE, specs, buffer)
    model_files.save(tmp_path / "ours", SHAPE, "lm", buffer, None, torch.float32)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
