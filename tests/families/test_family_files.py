"""Mistakes in the file of a family are one error message, before anything is loaded."""

import json
from pathlib import Path

import pytest

from realrl.config.errors import UserError
from realrl.families.config_json import read_config
from realrl.families.settings import write_sizes
from realrl.families.sizes import find_shape
from realrl.recipe.load import parse_experiment
from tests.model.small_models import SHAPES

FILE = """
from realrl.families.family import Family
from realrl.families.shape import LayerOptions
from realrl.families.settings import read_sizes, write_sizes

def read(config):
    return read_sizes(config)

def write(shape, options):
    return write_sizes(shape)

{change}

FAMILY = Family(
    model_type="mine",
    architectures={{"lm": "MyLM", "scalar": "MyClassifier"}},
    read_config=read,
    write_config=write,
    layer=LayerOptions({options}),
)
"""
SIZES = SHAPES["plain"].model_dump(exclude={"family"})


def family_file(directory: Path, change: str = "", options: str = "") -> str:
    file = directory / "mine.py"
    file.write_text(FILE.format(change=change, options=options))
    return str(file)


def refusal(family: str) -> str:
    """The error message of a recipe with such a model from scratch."""
    model = {"family": family, "shape": SIZES, "tokenizer": "t"}
    recipe = {"algorithm": "sft", "run_dir": "r", "data": {"train": "t"}, "models": {"actor": model}}
    with pytest.raises(UserError) as caught:
        parse_experiment(recipe)
    return str(caught.value)


WRITE = "def write(shape, options):\n    return {}"
BROKEN = {
    WRITE.format("{}['x']"): "FILE raised KeyError: 'x' (FILE:13)",
    WRITE.format("None"): "FILE: write_config must return a mapping, not null",
    WRITE.format("{3: 4}"): "FILE: write_config returns the key 3, which is not text",
    WRITE.format(
        "{**write_sizes(shape), 'x': {1}}"
    ): "FILE: write_config returns what config.json cannot hold: ",
    WRITE.format("{}"): "FILE: what write_config returns: hidden_size is missing",
    WRITE.format("write_sizes(shape) | {'num_key_value_heads': 3}"): (
        "FILE: what write_config returns: heads=4 is not a multiple of kv_heads=3"
    ),
    WRITE.format("write_sizes(shape) | {'rms_norm_eps': 0.5}"): (
        "FILE: read_config does not read back what write_config returns: norm_eps=1e-05 becomes 0.5"
    ),
    WRITE.format("write_sizes(shape) | {'model_type': 'other'}"): (
        "FILE: what write_config returns: model_type is 'other', but family FILE has 'mine'"
    ),
    "def read(config):\n    return {'layers': {}['depth']}": (
        "FILE: read_config of what write_config returns: raised KeyError: 'depth' (FILE:13)"
    ),
    "def read(config):\n    read_sizes(config)": ("FILE: read_config must return a mapping, not null"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_family_that_does_not_read_what_it_writes_is_refused_with_its_recipe(
    change: str, tmp_path: Path
) -> None:
    file = family_file(tmp_path, change)
    assert f"family={BROKEN[change].replace('FILE', file)}" in refusal(file)


def test_a_family_that_cannot_write_is_refused_with_the_model_that_it_reads(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mine", **write_sizes(SHAPES["plain"])}))
    assert read_config(config, family_file(tmp_path)).layers == SIZES["layers"]
    other = tmp_path / "other"
    other.mkdir()
    family = family_file(other, WRITE.format("{}"))
    for read in (read_config, lambda path, family: find_shape(str(path), family)):
        with pytest.raises(
            UserError, match=r"family=.*mine.py: what write_config returns: hidden_size is missing"
        ):
            read(config, family)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("norm='layr'", "FILE:19: LayerOptions: norm: 'layr' is not 'rms' or 'layer'; did you mean layer?"),
        ("qkv_bias=1", "FILE:19: LayerOptions: qkv_bias: 1 is not true or false"),
        ("qk_norms='all'", "FILE:19: LayerOptions: qk_norms: unknown key; did you mean qk_norm?"),
        ("norm='layer'), tensors=lambda *given: (", "family=FILE: parameter attention_norm has no tensor"),
    ],
)
def test_a_contradiction_in_a_family_is_one_message(options: str, message: str, tmp_path: Path) -> None:
    file = family_file(tmp_path, options=options)
    assert refusal(file).endswith(message.replace("FILE", file))


def test_a_family_that_is_not_found_is_one_mistake_and_named_once() -> None:
    message = refusal("gone.py")
    assert message.startswith("models.actor.family=gone.py: there is no file /")
    assert "more mistake" not in message and message.count("gone.py") == 2
