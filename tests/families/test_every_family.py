"""Every family computes under every kind of parallelism what one process computes, and is exported as it came."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from realrl.engine.buffers import FlatBuffer
from realrl.families.config_json import shape_to_hf
from realrl.families.registry import list_families, model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.huggingface import model_files
from realrl.layout.layout import build_layout
from realrl.layout.region import Region
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.conftest import EVERY_RUN, thin
from tests.engine.learning_on_ranks import Figures, check_learning_on_ranks, learn_alone
from tests.model.small_models import SHAPES as SMALL
from tests.model.small_models import make_theirs

SHAPES = {
    name: shape.model_copy(update={"init_std": 0.2}) for name, shape in SMALL.items() if shape.layers > 1
}
"""Most have three key/value heads, of which two tensor-parallel ranks share one."""
PLACEMENTS = {
    2: (
        Placement(Mesh(0, 2), Strategy(tp=2, micro_batch_tokens=40, sequence_parallel=True)),
        Placement(Mesh(0, 2), Strategy(pp=2, micro_batch_tokens=40)),
        Placement(Mesh(0, 2), Strategy(cp=2, micro_batch_tokens=40)),
    ),
    3: (Placement(Mesh(0, 3), Strategy(tp=3, micro_batch_tokens=40)),),
}
MODELS: dict[str, tuple[ModelShape, Head]] = {name: (shape, "lm") for name, shape in SHAPES.items()}
# Scalar heads of some are enough: they differ in nothing but the last matrix.
MODELS |= {f"{name}, scalar head": (SHAPES[name], "scalar") for name in ("plain", "gemma", "gpt_neox")}


def test_every_family_has_a_small_model() -> None:
    assert {shape.family for shape in SHAPES.values()} == set(list_families())


@pytest.fixture(scope="module")
def alone() -> dict[str, Figures]:
    return learn_alone(MODELS)


@pytest.mark.parametrize("world", thin(PLACEMENTS, 2))
def test_every_family_learns_and_samples_on_several_ranks_as_on_one(
    world: int, alone: dict[str, Figures]
) -> None:
    turns = PLACEMENTS[world]
    cases = [
        (name, placement)
        for i, name in enumerate(MODELS)
        for placement in (turns if EVERY_RUN else turns[i % len(turns) :][:1])
    ]
    check_learning_on_ranks(world, MODELS, cases, alone, tolerance=1e-4)


@pytest.fixture(params=SHAPES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A model that transformers has saved."""
    torch.manual_seed(0)
    theirs = make_theirs(SHAPES[request.param], "lm")
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    return request.param, tmp_path / "theirs"


def stored(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: values for file in files for name, values in load_file(file).items()}


def test_a_model_is_exported_as_it_came_and_opens_without_a_warning(
    saved: tuple[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, source = saved
    shape = model_files.read_shape(source)
    assert shape == SHAPES[name].model_copy(update={"init_std": shape.init_std})
    specs = model_tensors(shape, "lm")
    buffer = FlatBuffer(specs, torch.float32, "cpu")
    assert model_files.load(source, shape, specs, buffer) == []
    model_files.save(tmp_path / "ours", shape, "lm", buffer, None, torch.float32, 60_000)
    before, after = stored(source), stored(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    # Its messages go past pytest otherwise.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    recwarn.clear()
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert not caplog.records and not recwarn.list
    for parameter, other in zip(
        reopened.parameters(), AutoModelForCausalLM.from_pretrained(source).parameters(), strict=True
    ):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_read_their_regions_alone(saved: tuple[str, Path], tp: int) -> None:
    name, source = saved
    shape = SHAPES[name]
    whole = FlatBuffer(model_tensors(shape, "lm"), torch.float32, "cpu")
    model_files.load(source, shape, model_tensors(shape, "lm"), whole)
    placement = Placement(Mesh(0, tp), Strategy(tp=tp))
    layout = build_layout(shape, "lm", placement)
    for rank in range(tp):
        tensors = layout.tensors(rank)
        regions: dict[str, Region] = {local.spec.name: local.region for local in tensors}
        own = FlatBuffer([local.stored for local in tensors], torch.float32, "cpu")
        model_files.load(source, shape, layout.specs, own, regions)
        for local in tensors:
            expected = whole[local.spec.name][local.region.slices]
            assert torch.equal(own[local.spec.name][: len(expected)], expected), local.spec.name


def test_files_of_a_base_model_have_names_without_the_first_part(tmp_path: Path) -> None:
    """As those of openai-community/gpt2, which also hold the masks of attention."""
    shape = SHAPES["gpt2"]
    theirs = make_theirs(shape, "lm")
    state = {name.removeprefix("transformer."): values for name, values in theirs.state_dict().items()}
    del state["lm_head.weight"]
    state["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file({name: values.contiguous() for name, values in state.items()}, tmp_path / "model.safetensors")
    specs = model_tensors(shape, "lm")
    buffer = FlatBuffer(specs, torch.float32, "cpu")
    (tmp_path / "config.json").write_text(json.dumps(shape_to_hf(shape, "lm", "float32", {})))
    assert model_files.load(tmp_path, shape, specs, buffer) == []
    assert torch.equal(buffer["transformer.wte.weight"], theirs.transformer.wte.weight)
