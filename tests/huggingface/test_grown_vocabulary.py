"""Models whose vocabulary grows when they are read, compared with `resize_token_embeddings` of transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.huggingface import model_files
from realrl.huggingface.directory import find_model_shape
from realrl.layout.region import Region
from realrl.recipe.model import ModelConfig
from tests.model.small_models import make_theirs

OLD, NEW = 37, 45
SIZES = {"hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4}


def save_theirs(path: Path, *, tied: bool, head: Head = "lm") -> ModelConfig:
    torch.manual_seed(0)
    shape = ModelShape(vocab_size=OLD, tied_embeddings=tied, **SIZES)
    make_theirs(shape, head).save_pretrained(path)
    return ModelConfig(path=str(path), vocab_size=NEW)


def read(config: ModelConfig, head: Head = "lm") -> tuple[ModelShape, FlatBuffer]:
    shape = find_model_shape(config)
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    assert config.path is not None
    assert model_files.load(config.path, shape, tensors, buffer) == []
    return shape, buffer


@pytest.mark.parametrize("tied", [False, True])
def test_a_grown_model_is_that_of_transformers(tied: bool, tmp_path: Path) -> None:
    shape, buffer = read(save_theirs(tmp_path / "theirs", tied=tied))
    model_files.save(tmp_path / "ours", shape, "lm", buffer, None, torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    theirs.resize_token_embeddings(NEW, mean_resizing=True)
    assert ours.config.vocab_size == theirs.config.vocab_size == NEW
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    tokens = torch.tensor([[3, 9, 4, 30, 36]])
    with torch.no_grad():
        mine, other = ours(tokens).logits, theirs(tokens).logits
        assert torch.equal(mine[..., :OLD], other[..., :OLD])
        # The rows that transformers adds differ from the mean by noise with 1e-9 of the variance.
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)
        for matrix in (ours.get_input_embeddings().weight, ours.get_output_embeddings().weight):
            torch.testing.assert_close(matrix[OLD:], matrix[:OLD].mean(dim=0).expand(NEW - OLD, -1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ways", [2, 3, 5])
def test_ranks_read_the_rows_of_the_whole_grown_table(tied: bool, ways: int, tmp_path: Path) -> None:
    """Some of the ranks hold old rows only, one holds both kinds, and some hold new rows only."""
    config = save_theirs(tmp_path, tied=tied)
    if tied:  # as some programs write it
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(
            {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
            tmp_path / "model.safetensors",
        )
    shape, whole = read(config)
    rows = NEW // ways if NEW % ways == 0 else NEW // ways + 1
    for first in range(0, NEW, rows):
        regions = {
            spec.name: Region(
                spec.name,
                (first, *(0 for _ in spec.shape[1:])),
                (min(rows, NEW - first), *spec.shape[1:]),
            )
            for spec in model_tensors(shape, "lm")
            if spec.shape[0] == NEW
        }
        assert len(regions) == (1 if tied else 2)
        part = {name: torch.full(region.size, torch.nan) for name, region in regions.items()}
        model_files.load(tmp_path, shape, model_tensors(shape, "lm"), part, regions)
        for name, values in part.items():
            assert torch.equal(values, whole[name][regions[name].slices])


def test_a_classifier_grows_too(tmp_path: Path) -> None:
    config = save_theirs(tmp_path, tied=False, head="scalar")
    _, buffer = read(config, "scalar")
    stored = load_file(tmp_path / "model.safetensors")
    embedding = buffer["model.embed_tokens.weight"]
    assert embedding.shape == (NEW, 16) and torch.equal(embedding[:OLD], stored["model.embed_tokens.weight"])
    assert torch.equal(buffer["score.weight"], stored["score.weight"])


def test_a_vocabulary_does_not_shrink_and_keeps_its_size_at_its_own_number(tmp_path: Path) -> None:
    config = save_theirs(tmp_path, tied=False)
    same = config.model_copy(update={"vocab_size": OLD})
    assert find_model_shape(same) == find_model_shape(config.model_copy(update={"vocab_size": None}))
    with pytest.raises(UserError, match=r"vocab_size=36 is less than the 37 tokens .* can only grow"):
        find_model_shape(config.model_copy(update={"vocab_size": 36}))
