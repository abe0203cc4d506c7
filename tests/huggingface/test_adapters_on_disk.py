"""Adapters in PEFT's format: PEFT opens ours, and we open PEFT's, whole or by region, merged or trained on."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer
from realrl.families.adapter_config import ADAPTER_CONFIG, ADAPTER_FILE, adapter_tensors, find_adapters
from realrl.families.adapters import LowRank
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.huggingface import model_files
from realrl.layout.layout import build_layout
from realrl.layout.shard import Shard
from realrl.model.group import make_single_rank_group
from realrl.model.packing import Packing
from realrl.model.transformer import Transformer
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.model.small_models import SHAPES, make_theirs, random_rows

STACKS = ("experts.gate_up_proj", "experts.down_proj")
CASES = {
    "llama": ("plain", LowRank(rank=3, alpha=6.0)),
    "some, scaled by the root": ("qwen3", LowRank(rank=5, targets=("v_proj", "down_proj"), rslora=True)),
    "norms apart": ("qwen2", LowRank(rank=4, dora=True)),
    "fused": ("phi3", LowRank(rank=4, dora=True)),
    "transposed": ("gpt2", LowRank(rank=4, dora=True)),
    "interleaved": ("glm4", LowRank(rank=4)),
    "by heads": ("gpt_neox", LowRank(rank=4)),
    "experts": ("qwen3_moe", LowRank(rank=3, alpha=6.0, targets=("q_proj", *STACKS))),
    "experts alone": ("mixtral", LowRank(rank=3, targets=STACKS, rslora=True)),
    "one matrix of experts": ("glm4_moe", LowRank(rank=4, targets=("k_proj", "experts.gate_up_proj"))),
    "experts in transposed stacks": ("gpt_oss", LowRank(rank=3, targets=("all-linear",))),
    "experts with outputs for inputs": ("llama4", LowRank(rank=3, targets=("o_proj", *STACKS))),
}


def make_base(directory: Path, name: str) -> str:
    torch.manual_seed(0)
    theirs = make_theirs(SHAPES[name], "lm")
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(directory / "base")
    return str(directory / "base")


def open_theirs(base: str) -> PreTrainedModel:
    # torch's kernel for experts wants widths of 16 bytes.
    return AutoModelForCausalLM.from_pretrained(base, experts_implementation="eager")


def load(path: str | Path, shape: ModelShape, head: Head = "lm") -> FlatBuffer:
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    assert not model_files.load(path, shape, tensors, buffer)
    return buffer


def make_adapters(directory: Path, base: str, name: str, lora: LowRank, head: Head = "lm") -> FlatBuffer:
    """Write random adapters, and return all tensors of the model with them."""
    shape = SHAPES[name].model_copy(update={"lora": lora})
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    missing = model_files.load(base, shape, tensors, buffer)
    assert sorted(missing) == sorted(spec.name for spec in adapter_tensors(tensors))
    for missed in missing:
        buffer[missed].normal_(std=0.3)
    model_files.save_adapters(directory, shape, head, buffer, None, torch.float32, base)
    return buffer


def compute_logits(shape: ModelShape, buffer: FlatBuffer, row: torch.Tensor) -> torch.Tensor:
    ours = Transformer(Shard(shape, "lm"), buffer.fused, make_single_rank_group())
    with torch.no_grad():
        return ours.compute_logits(ours(row, Packing.of([len(row)], "cpu")))


@pytest.mark.parametrize("case", CASES)
def test_adapters_are_opened_by_peft_and_merged_by_us(case: str, tmp_path: Path) -> None:
    name, lora = CASES[case]
    base = make_base(tmp_path, name)
    buffer = make_adapters(tmp_path / "ours", base, name, lora)
    (row,) = random_rows(50, [20])
    expected = compute_logits(SHAPES[name].model_copy(update={"lora": lora}), buffer, row)
    theirs = PeftModel.from_pretrained(open_theirs(base), tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(row[None]).logits[0], expected, atol=1e-4, rtol=1e-4)
    assert model_files.read_shape(tmp_path / "ours").lora is None
    merged = load(tmp_path / "ours", SHAPES[name])
    torch.testing.assert_close(compute_logits(SHAPES[name], merged, row), expected, atol=1e-4, rtol=1e-4)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    for spec in model_tensors(SHAPES[name], "lm"):
        whole = load(tmp_path / "merged", SHAPES[name])
        torch.testing.assert_close(merged[spec.name], whole[spec.name], atol=1e-5, rtol=1e-5)
    check_regions(tmp_path / "ours", SHAPES[name], merged)
    again = SHAPES[name].model_copy(update={"lora": lora})
    check_regions(tmp_path / "ours", again, buffer)


@pytest.mark.parametrize("name", ["qwen3_moe-dense", "glm4_moe"])
def test_adapters_of_dense_layers_and_shared_experts_are_merged(name: str, tmp_path: Path) -> None:
    """PEFT takes their names for those of experts, so it does not open them."""
    lora = LowRank(rank=4, targets=("k_proj", "gate_proj", "down_proj"))
    base = make_base(tmp_path, name)
    buffer = make_adapters(tmp_path / "ours", base, name, lora)
    (row,) = random_rows(50, [20])
    expected = compute_logits(SHAPES[name].model_copy(update={"lora": lora}), buffer, row)
    merged = load(tmp_path / "ours", SHAPES[name])
    torch.testing.assert_close(compute_logits(SHAPES[name], merged, row), expected, atol=1e-4, rtol=1e-4)
    blocks = [spec for spec in model_tensors(SHAPES[name], "lm") if spec.parameter in ("gate_up", "down")]
    plain = load(base, SHAPES[name])
    changed = [not torch.equal(merged[spec.name], plain[spec.name]) for spec in blocks]
    assert changed == ["up_proj" not in spec.name for spec in blocks]
    check_regions(tmp_path / "ours", SHAPES[name], merged)


def check_regions(path: Path, shape: ModelShape, whole: FlatBuffer) -> None:
    """What tensor-parallel ranks read of a model alone is what they have of the whole one."""
    layout = build_layout(
        shape,
        "lm",
        Placement(
            Mesh(0, 3),
            Strategy(
                tp=3,
            ),
        ),
    )
    for rank in range(3):
        tensors = layout.tensors(rank)
        own = FlatBuffer([local.stored for local in tensors], torch.float32, "cpu")
        model_files.load(path, shape, layout.specs, own, {local.spec.name: local.region for local in tensors})
        for local in tensors:
            expected = whole[local.spec.name][local.region.slices]
            torch.testing.assert_close(own[local.spec.name][: len(expected)], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "some, scaled by the root",
        "fused",
        "transposed",
        "experts",
        "experts alone",
        "one matrix of experts",
        "experts in transposed stacks",
        "experts with outputs for inputs",
    ],
)
def test_adapters_of_peft_are_merged_and_trained_on(case: str, tmp_path: Path) -> None:
    name, lora = CASES[case]
    base = make_base(tmp_path, name)
    make_adapters(tmp_path / "ours", base, name, lora)
    written = json.loads((tmp_path / "ours" / ADAPTER_CONFIG).read_text())
    targets = {name: written[name] for name in ("target_modules", "target_parameters")}
    settings = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, **targets, use_rslora=lora.rslora, use_dora=lora.dora,
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = get_peft_model(open_theirs(base), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    (row,) = random_rows(50, [20])
    with torch.no_grad():
        expected = theirs(row[None]).logits[0]
    for shape in (SHAPES[name], SHAPES[name].model_copy(update={"lora": lora})):
        found = compute_logits(shape, load(tmp_path / "theirs", shape), row)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_adapters_of_single_experts_are_merged(name: str, tmp_path: Path) -> None:
    """Files of earlier versions have adapters for each expert's gate, up and down. PEFT joins them."""
    base = make_base(tmp_path, name)
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for spec in model_tensors(SHAPES[name], "lm"):
        if spec.expert is not None:
            module = f"base_model.model.{spec.name.removesuffix('.weight')}"
            rows, columns = spec.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    names = sorted({name.split(".")[-3] for name in tensors})
    settings = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "lora_alpha": 3.0}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ADAPTER_CONFIG).write_text(json.dumps(settings | {"target_modules": names}))
    save_file(tensors, tmp_path / "theirs" / ADAPTER_FILE)
    theirs = PeftModel.from_pretrained(open_theirs(base), tmp_path / "theirs").eval()
    (row,) = random_rows(50, [20])
    with torch.no_grad():
        expected = theirs(row[None]).logits[0]
    merged = load(tmp_path / "theirs", SHAPES[name])
    torch.testing.assert_close(compute_logits(SHAPES[name], merged, row), expected, atol=1e-4, rtol=1e-4)
    own = SHAPES[name].model_copy(update={"lora": LowRank(rank=2, alpha=3.0, targets=STACKS)})
    with pytest.raises(UserError, match=r"lora.targets do not agree with the adapters there"):
        load(tmp_path / "theirs", own)


def test_experts_with_norms_apart_are_refused() -> None:
    shape = SHAPES["mixtral"].model_copy(update={"lora": LowRank(rank=2, targets=STACKS, dora=True)})
    with pytest.raises(UserError, match=r"lora.dora: experts cannot have it; set dora=false"):
        model_tensors(shape, "lm")


def test_half_of_the_adapters_of_experts_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path, "mixtral")
    make_adapters(tmp_path / "ours", base, "mixtral", LowRank(rank=3, targets=STACKS))
    file = tmp_path / "ours" / ADAPTER_FILE
    name = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"
    save_file({key: values for key, values in load_file(file).items() if key != name}, file)
    with pytest.raises(UserError, match=rf"tensor {name} is missing"):
        load(tmp_path / "ours", SHAPES["mixtral"])


def test_a_classifier_has_its_head_with_its_adapters(tmp_path: Path) -> None:
    base = make_base(tmp_path, "qwen3")
    buffer = make_adapters(tmp_path / "ours", base, "qwen3", LowRank(rank=2), "scalar")
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "ours", num_labels=1)
    assert torch.equal(theirs.base_model.model.score.weight, buffer["score.weight"])
    merged = load(tmp_path / "ours", SHAPES["qwen3"], "scalar")
    assert torch.equal(merged["score.weight"], buffer["score.weight"])
    with pytest.raises(UserError, match=r"score.weight belongs to no matrix of "):
        load(tmp_path / "ours", SHAPES["qwen3"])


CHANGES = {
    "peft_type='LOHA' is not supported": {"peft_type": "LOHA"},
    "bias='all' is not supported": {"bias": "all"},
    "rank_pattern=": {"rank_pattern": {"q_proj": 3}},
    "layer_replication=": {"layer_replication": [[0, 1]]},
    "init_lora_weights='pissa' is not supported": {"init_lora_weights": "pissa"},
    "base_model_name_or_path=null does not name a model": {"base_model_name_or_path": None},
    "gone: no such model directory": {"base_model_name_or_path": "./gone"},
    "r=0 is not a whole number above 0": {"r": 0},
    "has shape": {"r": 2},
    "lora_alpha='a' is not a finite number": {"lora_alpha": "a"},
    "lora_magnitude_vector does not match": {"use_dora": True},
    "mystery=1 is an unknown setting": {"mystery": 1},
}


@pytest.mark.parametrize("message", CHANGES)
def test_adapters_that_would_compute_something_else_are_refused(message: str, tmp_path: Path) -> None:
    base = make_base(tmp_path, "plain")
    make_adapters(tmp_path / "ours", base, "plain", LowRank(rank=3))
    file = tmp_path / "ours" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | CHANGES[message]))
    with pytest.raises(UserError) as caught:
        load(tmp_path / "ours", SHAPES["plain"])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LowRank(rank=4), "adapters with rank=3, but the recipe has lora.rank=4"),
        (LowRank(rank=3, alpha=1.0), "adapters with alpha=32.0, but the recipe has lora.alpha=1.0"),
        (LowRank(rank=3, targets=("q_proj",)), "lora.targets do not agree with the adapters there"),
        (
            LowRank(rank=3, targets=("w_proj",)),
            "the model has no matrix w_proj; it has q_proj, k_proj, v_proj",
        ),
    ],
)
def test_adapters_are_trained_on_with_their_own_settings(lora: LowRank, message: str, tmp_path: Path) -> None:
    base = make_base(tmp_path, "plain")
    make_adapters(tmp_path / "ours", base, "plain", LowRank(rank=3))
    with pytest.raises(UserError, match=message):
        load(tmp_path / "ours", SHAPES["plain"].model_copy(update={"lora": lora}))


def test_tensors_that_belong_nowhere_are_named(tmp_path: Path) -> None:
    base = make_base(tmp_path, "plain")
    make_adapters(tmp_path / "ours", base, "plain", LowRank(rank=3))
    file = tmp_path / "ours" / ADAPTER_FILE
    tensors = load_file(file)
    name = "base_model.model.lm_head.lora_A.weight"
    save_file(tensors | {name: torch.ones(3, 32)}, file)
    with pytest.raises(UserError, match=rf"tensor {name} belongs to no matrix of "):
        load(tmp_path / "ours", SHAPES["plain"])
    save_file(tensors | {"lm_head.lora_A.weight": torch.ones(3, 32)}, file)
    with pytest.raises(
        UserError, match=r"tensor lm_head.lora_A.weight does not begin with base_model.model."
    ):
        load(tmp_path / "ours", SHAPES["plain"])
    name, values = next(iter(tensors.items()))
    save_file(tensors | {name: values * float("nan")}, file)
    with pytest.raises(UserError, match=r"has values that are not finite"):
        load(tmp_path / "ours", SHAPES["plain"])
    file.unlink()
    with pytest.raises(UserError, match=r"adapter_model.safetensors is missing"):
        load(tmp_path / "ours", SHAPES["plain"])


@pytest.mark.parametrize("kept", [["lm_head"], ["embed_tokens", "score"]])
def test_whole_modules_of_peft_are_refused_with_the_way_out(tmp_path: Path, kept: list[str]) -> None:
    settings = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 4, "modules_to_save": kept}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        UserError, match=rf"modules_to_save=\['{kept[0]}'\] is not supported.*merge_and_unload"
    ):
        find_adapters(tmp_path)
