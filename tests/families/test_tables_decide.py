"""What the planner and checkpoints know of a family follows from its table of tensors, whose layers are alike."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from realrl.config.errors import UserError
from realrl.families.family import check_family
from realrl.families.registry import find_family, list_families, model_tensors
from realrl.families.shape import LayerOptions, ModelShape
from realrl.huggingface.headers import find_tensors
from realrl.planner.workload.shard_sizes import LocalSizes

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
}
FILE = """
from dataclasses import replace
from realrl.families.decoder_tensors import decoder_tensors
from realrl.families.shape import LayerOptions
from realrl.families.registry import find_family

def table(shape, head, options):
    {body}

FAMILY = replace(find_family("llama"), tensors=table)
"""


def shape_of(directory: Path, body: str, *, tied: bool = False) -> ModelShape:
    """The shape of a family of its own, whose table of tensors is what the lines of a function return."""
    file = directory / "family.py"
    file.write_text(FILE.format(body=body))
    return ModelShape(family=str(file), tied_embeddings=tied, **SIZES)


@pytest.mark.parametrize("name", list_families())
def test_every_registered_family_has_equal_layers(name: str) -> None:
    check_family(find_family(name))


@pytest.mark.parametrize(
    ("layer", "kept"), [(3, 'spec.layer != 3 or spec.parameter != "out"'), (15, "spec.layer != 15")]
)
def test_a_family_with_a_different_layer_is_refused(tmp_path: Path, layer: int, kept: str) -> None:
    body = f"return [spec for spec in decoder_tensors(shape, head, options) if {kept}]"
    with pytest.raises(UserError, match=rf"family=.*py: layer {layer} has other tensors than layer 0"):
        find_family(shape_of(tmp_path, body).family)


def test_a_layer_of_another_width_is_refused(tmp_path: Path) -> None:
    body = """specs = list(decoder_tensors(shape, head, options))
    wide = decoder_tensors(shape.model_copy(update={"intermediate_size": 16}), head, options)
    return [new if new.layer == 0 else old for old, new in zip(specs, wide)]"""
    with pytest.raises(UserError, match=r"family=.*py: layer 1 has other tensors than layer 0"):
        find_family(shape_of(tmp_path, body).family)


def test_a_tensor_of_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    body = 'return decoder_tensors(shape.model_copy(update={"layers": shape.layers + 1}), head, options)'
    with pytest.raises(UserError, match=r"family=.*py: tensor .* is in layer 16 of 16 layers"):
        find_family(shape_of(tmp_path, body).family)


def test_heads_are_normalised_where_the_table_has_their_norms(tmp_path: Path) -> None:
    body = "return decoder_tensors(shape, head, LayerOptions(qk_norm='heads'))"
    assert LocalSizes(shape_of(tmp_path, body), "lm", 1).qk_norm
    assert not LocalSizes(ModelShape(**SIZES), "lm", 1).qk_norm


UNTIED = 'return decoder_tensors(shape.model_copy(update={"tied_embeddings": False}), head, options)'
"""A family that has a head of its own whatever `config.json` says."""


def test_embeddings_are_tied_where_the_table_says_both_ends(tmp_path: Path) -> None:
    sizes = LocalSizes(shape_of(tmp_path, UNTIED, tied=True), "lm", 1)
    assert not sizes.trained.tied and sizes.trains_head
    llama = ModelShape(tied_embeddings=True, **SIZES)
    assert LocalSizes(llama, "lm", 1).trained.tied and not LocalSizes(llama, "scalar", 1).trained.tied


def test_a_missing_head_is_no_embedding_table_where_the_table_has_both(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, UNTIED, tied=True)
    config = find_family(shape.family).write_config(shape, LayerOptions())
    text = json.dumps({"model_type": "llama", **config})
    (tmp_path / "config.json").write_text(text)
    wanted = model_tensors(shape, "lm")
    stored = {spec.name: torch.zeros(spec.shape) for spec in wanted if spec.parameter != "lm_head"}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor lm_head\.weight is missing"):
        find_tensors(tmp_path, shape, wanted)
