"""Sizes of models, by the name of a published model or from a `config.json`, and counts of weights in layers."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.config.paths import local_path
from realrl.families.config_json import read_config, shape_from_hf
from realrl.families.registry import find_layer_options
from realrl.families.shape import ModelShape, split_kinds

_NAMED = 12
"""Maximum number of names in an error message."""


@cache
def _read_file() -> dict[str, Any]:
    """Read `sizes.json`: name -> the model's source on the hub, and the settings of `config.json` that count."""
    found: dict[str, Any] = json.loads(
        files("realrl.families").joinpath("sizes.json").read_text(encoding="utf-8")
    )
    return found


@cache
def _read_shape(name: str) -> ModelShape:
    config = _read_file()[name]["config"]
    return shape_from_hf(config, f"sizes.json: {name}", config["model_type"])


class _PublishedShapes(Mapping[str, ModelShape]):
    """Shapes by name. The file is read at the first use, and each shape is made when it is asked for."""

    def __getitem__(self, name: str) -> ModelShape:
        return _read_shape(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_read_file())

    def __len__(self) -> int:
        return len(_read_file())


SHAPES: Mapping[str, ModelShape] = _PublishedShapes()
"""Shapes of published models by name."""


def find_shape(source: str, family: str | None = None) -> ModelShape:
    """Find the sizes of a name in `SHAPES`, of a Hugging Face `config.json` or of a directory with one.

    `family` is for `find_family`; by default the file names it. Raises UserError if the source is none of these.
    """
    if source in SHAPES:
        return SHAPES[source]
    path = local_path(source)
    if path.is_dir():
        return read_config(path / "config.json", family)
    if path.exists():
        return read_config(path, family)
    if path.suffix == ".json" or "/" in source:
        raise UserError(
            f"{source}: no such file; give a config.json, a directory that holds one, or the name of a"
            " published model such as llama-2-7b"
        )
    # A name with another generation or size is another model, not a misspelling.
    hint = nearest(source, [name for name in SHAPES if _find_numbers(name) == _find_numbers(source)])
    some = ", ".join([*SHAPES][:_NAMED])
    suffix = (
        f"did you mean {hint}?" if hint else f"known models are {some}, and others (realrl models lists them)"
    )
    raise UserError(
        f"{source!r} is no model whose sizes are known, and no config.json or directory with one; {suffix}"
    )


def _find_numbers(name: str) -> list[str]:
    """Find the generation and the size in the name of a model."""
    return re.findall(r"\d+(?:\.\d+)?", name)


def count_layer_weights(shape: ModelShape) -> int:
    """Count the parameters of a layer's matrices that a token is multiplied by. All layers of the model must be of
    one kind (`split_kinds`).

    Only the experts that a token is sent to are counted.
    """
    assert not shape.dense_layers, "layers of several kinds have different numbers of weights"
    rotated = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    block = count_block_weights(shape)
    mixture = shape.mixture
    if mixture is not None:
        blocks = mixture.per_token + mixture.shared
        return shape.hidden_size * (rotated + mixture.experts) + blocks * block
    return shape.hidden_size * rotated + block


@cache
def estimate_attention_cost(shape: ModelShape) -> float:
    """Estimate a in the time n + a * n² of a sequence of n tokens, in units of the products of one token.

    In a layer, causal attention takes 2 * heads * head_dim * n² FLOPs, and products take 2 FLOPs per parameter and
    token. A GPU needs 1.4 to 2.0 times as long for a FLOP of attention as for one of products (predicted for A100
    and H100).
    """
    return 1.6 * shape.layers * shape.heads * shape.head_dim / count_matrix_weights(shape)


def count_matrix_weights(shape: ModelShape, last: int | None = None) -> int:
    """Count the parameters of the matrices of all layers, or of the `last` layers, that a token is multiplied
    by."""
    first = 0 if last is None else shape.layers - last
    return sum(
        count_layer_weights(kind.shape) * sum(layer >= first for layer in kind.layers)
        for kind in split_kinds(shape)
    )


def count_block_weights(shape: ModelShape) -> int:
    """Count the parameters of the matrices of a feed-forward block that is `intermediate_size` wide, such as an
    expert."""
    matrices = 3 if find_layer_options(shape).gated else 2
    return matrices * shape.hidden_size * shape.intermediate_size
