"""GLM-4.5: router corrections stay exact in bfloat16, further layers of its files are not read, and what is
refused. And how files of other mixtures say which layers are dense."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from realrl.algorithms.sft_loss import SFTMethod
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.engine.buffers import FlatBuffer
from realrl.engine.model import make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.config_json import shape_from_hf, shape_to_hf
from realrl.families.registry import model_tensors
from realrl.huggingface import model_files, shards
from realrl.huggingface.tensor_conversion import split_exactly
from realrl.recipe.optimizer import OptimizerConfig
from tests.model.small_models import SHAPES, make_theirs, random_rows

SHAPE = SHAPES["glm4_moe"]
CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


def write_files(directory: Path) -> dict[str, Tensor]:
    """Write files as published: in bfloat16 but for corrections, and with a layer that predicts further tokens."""
    torch.manual_seed(0)
    theirs = make_theirs(SHAPE, "lm")
    theirs.save_pretrained(directory)
    tensors = {
        name: torch.randn(values.shape) * 9 if name.endswith("correction_bias") else values.bfloat16()
        for name, values in load_file(directory / "model.safetensors").items()
    }
    further = {"model.layers.3.eh_proj.weight": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors | further, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return tensors


@pytest.mark.parametrize("limit", [shards.PORTION_BYTES, 1])
def test_a_bfloat16_model_keeps_its_corrections_bit_for_bit(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PORTION_BYTES", limit)
    tensors = write_files(tmp_path / "theirs")
    shape = model_files.read_shape(tmp_path / "theirs")
    specs = model_tensors(shape, "lm")
    buffer = FlatBuffer(specs, torch.bfloat16, "cpu")
    assert model_files.load(tmp_path / "theirs", shape, specs, buffer) == []
    assert torch.equal(buffer[CORRECTION].float().sum(1), tensors[CORRECTION])
    model_files.save(tmp_path / "ours", shape, "lm", buffer, None, torch.bfloat16, 60_000)
    after = {
        name: values
        for file in (tmp_path / "ours").glob("*.safetensors")
        for name, values in load_file(file).items()
    }
    assert after.keys() == tensors.keys()
    for name, values in tensors.items():
        assert after[name].dtype == values.dtype and torch.equal(after[name], values), name
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors.values())
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_training_changes_routers_but_not_their_corrections(dtype: torch.dtype, recompute: bool) -> None:
    model = make_unsharded_model(SHAPE, "lm", dtype=dtype, device=torch.device("cpu"))
    torch.manual_seed(0)
    for spec in model.layout.specs:
        values = torch.randn(spec.shape) * 0.2
        if spec.parameter == "router_correction":
            values = split_exactly(torch.randn(len(values)) * 9)
        model.parameters[spec.name].copy_(values)
    before = {spec.name: model.parameters[spec.name].clone() for spec in model.layout.specs}
    tokens = Ragged.of(random_rows(SHAPE.vocab_size, [9, 17]))
    mask = torch.ones_like(tokens.values)
    mask[list(tokens.offsets[:-1])] = 0
    batch = Batch((0, 1), {"tokens": tokens, "loss_mask": Ragged(mask, tokens.lengths)})
    trainer = Trainer(model, OptimizerConfig(lr=0.01, weight_decay=0.1), router_loss=0.1)
    options = TrainOptions(max_tokens=20, recompute=recompute)
    trainer.train(batch, SFTMethod(), [[0, 1]], options, lr=0.01).result()
    for spec in model.layout.specs:
        kept = torch.equal(model.parameters[spec.name], before[spec.name])
        assert kept == (spec.parameter == "router_correction") or spec.expert is not None, spec.name


def test_three_bfloat16_numbers_add_up_to_any_usual_number() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(10_000, generator=generator) * 10.0 ** torch.arange(-4, 4).repeat(1250)
    parts = split_exactly(numbers)
    assert torch.equal(parts.bfloat16().float().sum(1), numbers)


def test_a_layer_that_should_be_there_is_not_taken_for_a_further_one(tmp_path: Path) -> None:
    write_files(tmp_path)
    shape = model_files.read_shape(tmp_path).model_copy(update={"layers": 4})
    buffer = FlatBuffer(model_tensors(shape, "lm"), torch.float32, "cpu")
    with pytest.raises(UserError, match=r"tensor model.layers.3.* is missing"):
        model_files.load(tmp_path, shape, model_tensors(shape, "lm"), buffer)


def config_with(name: str, **changes: Any) -> dict[str, Any]:
    return make_theirs(SHAPES[name], "lm").config.to_dict() | changes


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("glm4_moe", {"first_k_dense_replace": 3}, "none of the 3 layers has experts"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 must divide the 8 experts into groups of 2 or more"),
        ("glm4_moe", {"n_group": 8}, "n_group=8 must divide the 8 experts into groups of 2 or more"),
        (
            "glm4_moe",
            {"topk_group": 5},
            "topk_group=5 of n_group=4 must be groups with num_experts_per_tok=3",
        ),
        (
            "glm4_moe",
            {"topk_group": 1},
            "topk_group=1 of n_group=4 must be groups with num_experts_per_tok=3",
        ),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "none of the 2 layers has experts"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers=[true] is not a list of whole numbers"),
        ("llama4", {"moe_layers": []}, "none of the 2 layers has experts"),
        ("llama4", {"moe_layers": 1}, "moe_layers=1 is not a list of whole numbers"),
    ],
)
def test_layers_and_groups_that_make_no_mixture_are_refused(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        shape_from_hf(config_with(name, **changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "dense", "size"),
    [
        ("glm4_moe", {"first_k_dense_replace": 2}, (0, 1), 44),
        ("glm4_moe", {"first_k_dense_replace": 0}, (), None),
        ("qwen3_moe", {"mlp_only_layers": [1, 7], "intermediate_size": 30}, (1,), 30),
        ("qwen3_moe", {"decoder_sparse_step": 2, "intermediate_size": 30}, (0,), 30),
        (
            "llama4",
            {"moe_layers": None, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 30},
            (0,),
            30,
        ),
        ("llama4", {"moe_layers": [0], "intermediate_size_mlp": 30}, (1,), 30),
    ],
)
def test_files_say_which_layers_are_dense(
    name: str, changes: dict[str, Any], dense: tuple[int, ...], size: int | None
) -> None:
    shape = shape_from_hf(config_with(name, **changes))
    assert (shape.dense_layers, shape.dense_size) == (dense, size)
    assert shape_from_hf(shape_to_hf(shape, "lm", "float32", {})) == shape
