"""gpt-oss: the published files, whose experts are packed in MXFP4, and what is refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer
from realrl.families.adapters import LowRank
from realrl.families.config_json import shape_from_hf, shape_to_hf
from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.huggingface import model_files
from realrl.huggingface.directory import read_origin
from realrl.huggingface.mxfp4 import PackedStack, unpack
from realrl.layout.layout import build_layout
from realrl.layout.shard import Shard
from realrl.model.group import make_single_rank_group
from realrl.model.packing import Packing
from realrl.model.transformer import Transformer
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.model.small_models import SHAPES, make_theirs, pack, random_rows

SHAPE = SHAPES["gpt_oss"].model_copy(update={"hidden_size": 64, "intermediate_size": 96})
"""Ranks cut the 96 units of an expert within blocks of 32."""
PACKED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
PUBLISHED = {"experts_per_token": 4, "initial_context_length": 4096, "quantization_config": PACKED}
"""Settings of the published files that no other family has."""


def draw_packed(*sizes: int, low: int = 118, high: int = 126) -> tuple[Tensor, Tensor]:
    """Random blocks and scales for matrices. sizes: [E, M, K] -> [E, M, K / 32, 16], [E, M, K / 32]"""
    *matrices, columns = sizes
    blocks = torch.randint(0, 256, (*matrices, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high, blocks.shape[:-1], dtype=torch.uint8)


def write_packed(directory: Path, shape: ModelShape) -> dict[str, Tensor]:
    """Write files like the published ones, and return all tensors as transformers unpacks them."""
    torch.manual_seed(0)
    theirs = make_theirs(shape, "lm")
    stored, unpacked = {}, {}
    for name, values in theirs.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = values.shape
            blocks, scales = draw_packed(experts, outputs, inputs)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            unpacked[name] = convert_moe_packed_tensors(blocks, scales)
        else:
            stored[name] = unpacked[name] = (torch.randn(values.shape) * 0.2).bfloat16()
    # Blocks and their scales are in different files.
    places = {
        name: f"model-{1 + name.endswith('_scales')}-of-2.safetensors"
        for name in sorted(stored, reverse=True)
    }
    directory.mkdir()
    for file in {*places.values()}:
        save_file({name: stored[name] for name in places if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = shape_to_hf(shape, "lm", "bfloat16", {}) | PUBLISHED
    del config["dtype"], config["torch_dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    return unpacked


def load(directory: Path, shape: ModelShape) -> FlatBuffer:
    specs = model_tensors(shape, "lm")
    buffer = FlatBuffer(specs, torch.float32, "cpu")
    assert model_files.load(directory, shape, specs, buffer) == []
    return buffer


def test_every_byte_and_scale_is_unpacked_as_by_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    for scale in (1, 100, 127, 128, 250):
        scales = torch.full((1, 8, 2), scale, dtype=torch.uint8)
        expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
        assert torch.equal(unpack(blocks, scales), expected)
    assert unpack(blocks, torch.full((1, 8, 2), 255, dtype=torch.uint8)).isnan().all()


def test_a_part_of_a_stack_is_read_from_the_blocks_that_hold_it() -> None:
    blocks, scales = draw_packed(3, 10, 96)
    whole, stack = convert_moe_packed_tensors(blocks, scales), PackedStack(blocks, scales)
    for columns in (slice(0, 96), slice(5, 50), slice(33, 34), slice(64, 96)):
        assert torch.equal(stack[2, columns, slice(3, 8)], whole[2, columns, 3:8])


def test_packed_files_are_read_as_transformers_reads_them_and_saved_unpacked(tmp_path: Path) -> None:
    expected = write_packed(tmp_path / "packed", SHAPE)
    assert model_files.read_dtype(tmp_path / "packed") == torch.bfloat16
    shape = model_files.read_shape(tmp_path / "packed")
    assert shape == SHAPE.model_copy(update={"init_std": shape.init_std})
    buffer = load(tmp_path / "packed", shape)
    origin = read_origin(tmp_path / "packed")
    model_files.save(tmp_path / "saved", shape, "lm", buffer, None, torch.bfloat16, origin=origin)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(values, saved[name]) for name, values in expected.items())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config and config["experts_per_token"] == 4

    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, experts_implementation="eager"
    )
    ours = Transformer(Shard(shape, "lm"), buffer.fused, make_single_rank_group())
    rows = random_rows(shape.vocab_size, [5, 30, 12])
    tokens, lengths = pack(rows)
    with torch.no_grad():
        logits = ours.compute_logits(ours(tokens, Packing.of(lengths, "cpu")))
        wanted = torch.cat([theirs(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-5)


def test_adapters_of_packed_experts_are_trained_on_and_merged(tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", SHAPE)
    lora = LowRank(rank=4, alpha=2.0, targets=("experts.gate_up_proj", "experts.down_proj"))
    shape = SHAPE.model_copy(update={"lora": lora})
    specs = model_tensors(shape, "lm")
    buffer = FlatBuffer(specs, torch.float32, "cpu")
    for name in model_files.load(tmp_path / "packed", shape, specs, buffer):
        buffer[name].normal_()
    base = str(tmp_path / "packed")
    model_files.save_adapters(tmp_path / "adapters", shape, "lm", buffer, None, torch.float32, base)
    again, merged = load(tmp_path / "adapters", shape), load(tmp_path / "adapters", SHAPE)
    assert torch.equal(again.data, buffer.data)
    for layer, expert in product(range(SHAPE.layers), range(SHAPE.mixture.experts if SHAPE.mixture else 0)):
        root = f"model.layers.{layer}.mlp.experts.{expert}"
        for matrix, of_a in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
            a, b = buffer[f"{root}.{of_a}_proj.lora_A.weight"], buffer[f"{root}.{matrix}_proj.lora_B.weight"]
            name = f"{root}.{matrix}_proj.weight"
            torch.testing.assert_close(merged[name], buffer[name] + 0.5 * b @ a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tp", [2, 5])
def test_ranks_read_their_own_parts_of_packed_matrices(tmp_path: Path, tp: int) -> None:
    write_packed(tmp_path / "packed", SHAPE)
    whole = load(tmp_path / "packed", SHAPE)
    layout = build_layout(SHAPE, "lm", Placement(Mesh(0, tp), Strategy(tp=tp)))
    for rank in range(tp):
        tensors = layout.tensors(rank)
        own = FlatBuffer([local.stored for local in tensors], torch.float32, "cpu")
        regions = {local.spec.name: local.region for local in tensors}
        model_files.load(tmp_path / "packed", SHAPE, layout.specs, own, regions)
        for local in tensors:
            expected = whole[local.spec.name][local.region.slices]
            assert torch.equal(own[local.spec.name][: len(expected)], expected), local.spec.name


def change_tensor(directory: Path, ending: str, change: Any) -> None:
    """Change the tensors of a file whose names have an ending."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({k: change(v) if k.endswith(ending) else v for k, v in tensors.items()}, file)


@pytest.mark.parametrize(
    ("ending", "change", "words"),
    [
        ("_scales", lambda x: x[:, :, :1].contiguous(), "do not hold matrices in the format MXFP4"),
        ("_blocks", lambda x: x.to(torch.int8), "do not hold matrices in the format MXFP4"),
        ("_scales", lambda x: torch.full_like(x, 255), "has values that are not finite"),
        ("gate_up_proj_bias", lambda x: x.to(torch.uint8), "has type U8; accepted are F64"),
    ],
)
def test_damaged_files_are_one_message(tmp_path: Path, ending: str, change: Any, words: str) -> None:
    write_packed(tmp_path / "packed", SHAPE)
    change_tensor(tmp_path / "packed", ending, change)
    with pytest.raises(UserError, match=words):
        load(tmp_path / "packed", SHAPE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq' is not supported"),
        ({"quantization_config": PACKED | {"bits": 4}}, "bits=4 is an unknown setting"),
        ({"swiglu_limit": 6.0}, "swiglu_limit=6.0 is not supported; it must be 7.0"),
        ({"rope_parameters": None, "rope_scaling": None}, "rope_parameters is missing"),
    ],
)
def test_what_would_change_the_computation_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        shape_from_hf(shape_to_hf(SHAPE, "lm", "bfloat16", {}) | changes)
