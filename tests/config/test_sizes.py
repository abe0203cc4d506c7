"""Sizes of models by name or from a `config.json`, and of memory with a unit."""

import json
from pathlib import Path

import pytest

from realrl.algorithms.sft import SFTExperiment
from realrl.config.errors import UserError
from realrl.config.values import format_bytes, parse_bytes
from realrl.config.yaml_file import parse_yaml
from realrl.families.sizes import SHAPES
from realrl.recipe.load import dump_experiment, parse_experiment

SETTINGS = {"algorithm": "sft", "run_dir": "x", "data": {"train": "a"}}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_may_be_the_name_of_a_published_model(name: str) -> None:
    experiment = parse_experiment({**SETTINGS, "models": {"actor": {"shape": name}}})
    assert isinstance(experiment, SFTExperiment) and experiment.models.actor.shape == SHAPES[name]
    assert parse_experiment(parse_yaml(dump_experiment(experiment), "dump")) == experiment


@pytest.mark.parametrize(
    ("name", "words"),
    [("llama-2-7", "did you mean llama-2-7b?"), ("gpt", "known models are llama-2-7b, llama-2-13b")],
)
def test_an_unknown_shape_name_is_one_error_message(name: str, words: str) -> None:
    with pytest.raises(
        UserError, match=r"models\.actor\.shape: .* is no model whose sizes are known"
    ) as caught:
        parse_experiment({**SETTINGS, "models": {"actor": {"shape": name}}})
    assert words in str(caught.value)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}


@pytest.mark.parametrize("name", ["config.json", ".", "other-name"])
def test_a_shape_may_be_a_config_file_or_a_directory_with_one(name: str, tmp_path: Path) -> None:
    (tmp_path / (name if name != "." else "config.json")).write_text(json.dumps(LLAMA))
    experiment = parse_experiment({**SETTINGS, "models": {"actor": {"shape": str(tmp_path / name)}}})
    assert isinstance(experiment, SFTExperiment)
    shape = experiment.models.actor.shape
    assert shape is not None and (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 8)
    assert shape.rope_theta == 500.0
    # What a run writes down does not depend on the file.
    assert parse_experiment(parse_yaml(dump_experiment(experiment), "dump")) == experiment


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "config.json",
            None,
            "config.json: no such file; give a config.json, a directory that holds one, or",
        ),
        ("gone/", None, "gone/: no such file; give a config.json"),
        (".", None, "config.json: no such file"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "[1]", "config.json: a JSON object is expected"),
        (
            "config.json",
            '{"model_type": "bert"}',
            "'bert' is not supported; supported are: gemma, gemma2, gemma3_text",
        ),
        (".", '{"model_type": "llama"}', "config.json: hidden_size is missing"),
    ],
)
def test_an_unusable_config_file_is_one_error_message(
    name: str, content: str | None, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    source = f"{tmp_path}/{name}"
    with pytest.raises(UserError, match=r"^models\.actor\.shape: ") as caught:
        parse_experiment({**SETTINGS, "models": {"actor": {"shape": source}}})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("80GiB", 80 * 2**30), ("512 MB", 512 * 10**6), ("1.5KiB", 1536), ("7B", 7), ("2TiB", 2**41)],
)
def test_bytes_are_read_with_a_unit(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["80", "GiB", "80 gigs", "-1GiB", "0GiB", "1iB", ""])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    settings = {**SETTINGS, "models": {"actor": {"path": "a"}}, "device_memory": text}
    with pytest.raises(UserError, match=r"device_memory: .* is not a size; write a number and a unit"):
        parse_experiment(settings)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1.00 KiB"), (13.37 * 2**30, "13.4 GiB"), (2**53, "8192 TiB")],
)
def test_bytes_are_written_with_three_digits(number: float, text: str) -> None:
    assert format_bytes(number) == text
