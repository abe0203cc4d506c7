"""Every family computes under every kind of parallelism what one process computes, and is exported as it came."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from realrl.checkpoint import huggingface
from realrl.checkpoint.initial_weights import initialise
from realrl.engine.flat import FlatBuffer
from realrl.engine.model import make_unsharded_model
from realrl.families.config_json import shape_to_hf
from realrl.families.registry import list_families, model_tensors
from realrl.families.shape import Head
from realrl.layout import limits
from realrl.layout.layout import build_layout
from realrl.layout.region import Region
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process, wait_to_be_scheduled
from tests.engine.test_parallel import CPU, batch, build, learn
from tests.forked import run_forked
from tests.model.small_models import SHAPES as SMALL
from tests.model.small_models import make_theirs

SHAPES = {
    name: shape.model_copy(update={"init_std": 0.2}) for name, shape in SMALL.items() if shape.layers > 1
}
"""Most have three key/value heads, of which two tensor-parallel ranks share one."""
STRATEGIES = {
    2: (
        Strategy(1, 2, 1, micro_batch_tokens=40, sequence_parallel=True),
        Strategy(1, 1, 2, micro_batch_tokens=40),
    ),
    3: (Strategy(1, 3, 1, micro_batch_tokens=40),),
}
TOLERANCE = 1e-4


def heads_of(name: str) -> tuple[Head, ...]:
    """Scalar heads of some are enough: they differ in nothing but the last matrix."""
    return ("lm", "scalar") if name in ("plain", "gemma", "gpt_neox") else ("lm",)


CASES = [(name, head) for name in SHAPES for head in heads_of(name)]


def test_every_family_has_a_small_model() -> None:
    assert {shape.family for shape in SHAPES.values()} == set(list_families())


def run_rank(rank: int, world: int, store: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    limits.BUCKET_ELEMENTS = 3000  # several buckets even in models as small as these
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    process = Process(rank, world, CPU, dist.new_group(backend="gloo"))
    placements = [Placement(Mesh(0, world), strategy) for strategy in STRATEGIES[world]]
    groups = process.groups(list_rank_sets(placements))
    results = {}
    for name, head in CASES:
        for placement in placements:
            model = build(SHAPES[name], head, process, placement, groups)
            results[name, head, str(placement)] = learn(model, batch(head, SHAPES[name]))
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    results = {}
    for name, head in CASES:
        shape = SHAPES[name]
        model = make_unsharded_model(shape, head, dtype=torch.float32, device=CPU)
        initialise(model.parameters, model.layout.specs, shape, 1)
        results[name, head] = learn(model, batch(head, shape))
    return results


@pytest.mark.parametrize("world", STRATEGIES)
def test_every_family_learns_and_samples_on_several_ranks_as_on_one(
    world: int, alone: dict[tuple[str, str], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run_forked(run_rank, world, world, f"{scratch}/store", str(tmp_path / "out"))
    results = torch.load(tmp_path / "out")
    assert len(results) == len(CASES) * len(STRATEGIES[world])
    for (name, head, placement), metrics in results.items():
        for figure, value in alone[name, head].items():
            where = f"{name}, {head}, {placement}: {figure}"
            torch.testing.assert_close(
                metrics[figure],
                value,
                rtol=TOLERANCE,
                atol=TOLERANCE / 10,
                msg=lambda m, w=where: f"{w}: {m}",
            )


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
    saved: tuple[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, source = saved
    shape = huggingface.read_shape(source)
    assert shape == SHAPES[name].model_copy(update={"init_std": shape.init_std})
    specs = model_tensors(shape, "lm")
    buffer = FlatBuffer(specs, torch.float32, "cpu")
    assert huggingface.load(source, shape, specs, buffer) == []
    huggingface.save(tmp_path / "ours", shape, "lm", buffer, None, torch.float32, 60_000)
    before, after = stored(source), stored(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    with caplog.at_level("WARNING"):
        reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert not caplog.records
    for parameter, other in zip(
        reopened.parameters(), AutoModelForCausalLM.from_pretrained(source).parameters(), strict=True
    ):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_read_their_regions_alone(saved: tuple[str, Path], tp: int) -> None:
    name, source = saved
    shape = SHAPES[name]
    whole = FlatBuffer(model_tensors(shape, "lm"), torch.float32, "cpu")
    huggingface.load(source, shape, model_tensors(shape, "lm"), whole)
    placement = Placement(Mesh(0, tp), Strategy(1, tp, 1))
    layout = build_layout(shape, "lm", placement)
    for rank in range(tp):
        tensors = layout.tensors(rank)
        regions: dict[str, Region] = {local.spec.name: local.region for local in tensors}
        own = FlatBuffer([local.stored for local in tensors], torch.float32, "cpu")
        huggingface.load(source, shape, layout.specs, own, regions)
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
    assert huggingface.load(tmp_path, shape, specs, buffer) == []
    assert torch.equal(buffer["transformer.wte.weight"], theirs.transformer.wte.weight)
