"""Quantised matrices beside an independent quantisation, under every layout, and what is computed with them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.engine.buffers import FlatBuffer
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.adapters import LowRank
from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.families.tensors import Quantisation, TensorSpec
from realrl.huggingface import model_files
from realrl.huggingface.initial_weights import initialise
from realrl.huggingface.tensor_conversion import Weights, write_quantised
from realrl.layout.layout import build_layout
from realrl.layout.region import Region
from realrl.layout.sets import BASE, QUANTISED, TrainablePart, build_parameter_sets
from realrl.model.arithmetic.ops import PLAIN, Products
from realrl.model.packing import Packing
from realrl.model.quantised import QuantisedMatrix
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.recipe.generation import GenerationConfig
from tests.huggingface.test_adapters_on_disk import make_adapters, make_base
from tests.huggingface.test_memory_of_models import Allocations
from tests.model.small_models import SHAPES, make_theirs, random_rows

CPU = torch.device("cpu")
FAMILIES = ("plain", "grouped-tied", "gpt2", "gpt_neox", "phi3", "glm4", "mixtral", "gpt_oss")
"""Separate matrices, tied embeddings, transposed ones, heads one by one, fused ones, heads in another order,
experts, experts with biases in stacks whose columns alternate."""
KINDS: tuple[Quantisation, ...] = ("int8", "fp8")
CUTS = ((1, 1), (2, 1), (3, 1), (1, 2), (3, 2))
"""tp, pp; three ranks cut feed-forward units unevenly."""
MATRICES = ("qkv", "out", "gate_up", "down", "experts_gate_up", "experts_down")
PART = TrainablePart(quantised=True)


def list_fp8() -> np.ndarray:
    """Finite numbers of float8_e4m3fn by their bytes: a sign, four bits of exponent and three of mantissa."""
    numbers = []
    for byte in range(128):
        exponent, mantissa = byte >> 3, byte & 7
        scale = 2.0 ** (max(exponent, 1) - 7)
        numbers.append(scale * ((exponent > 0) + mantissa / 8))
    numbers[127] = np.nan
    return np.array([*numbers, *(-number for number in numbers)])


def quantise_row(row: np.ndarray, kind: Quantisation) -> tuple[np.ndarray, np.float32]:
    """Bytes and the scale of a row."""
    largest = np.float32({"int8": 127, "fp8": 448}[kind])
    scale = np.float32(np.abs(row).max() / largest) or np.float32(1)
    numbers = (row.astype(np.float32) / scale).astype(np.float64)
    if kind == "int8":
        return (np.round(numbers) % 256).astype(np.uint8), scale
    distances = np.abs(list_fp8() - numbers[:, None])
    near = distances == np.nanmin(distances, axis=1, keepdims=True)
    # Of two equally near numbers the one with the even byte is taken.
    odd = np.arange(256) % 2
    return np.argmax(near * (2 - odd), axis=1).astype(np.uint8), scale


def save(directory: Path, name: str) -> str:
    torch.manual_seed(0)
    theirs = make_theirs(SHAPES[name], "lm")
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(directory)
    return str(directory)


def quantised(name: str, kind: Quantisation) -> ModelShape:
    return SHAPES[name].model_copy(update={"quantised": kind})


def read(
    path: str, shape: ModelShape, *, dtype: torch.dtype = torch.float32, products: Products = PLAIN
) -> Model:
    model = make_unsharded_model(shape, "lm", dtype=dtype, device=CPU, products=products)
    model_files.load(path, shape, model.layout.specs, model.parameters)
    return model


def widen(model: Model) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a quantised model in float32."""
    for spec in model_tensors(model.shape.model_copy(update={"quantised": None}), "lm"):
        values = model.parameters[spec.name]
        if spec.parameter in MATRICES:
            kind = torch.int8 if model.shape.quantised == "int8" else torch.float8_e4m3fn
            scales = model.parameters[f"{spec.name}_scale"].view(torch.float32)
            values = values.view(kind).float() * scales
        yield spec.name, values.float()


def unquantised(model: Model, dtype: torch.dtype, products: Products = PLAIN) -> Model:
    """A model whose weights are what those of a quantised one stand for."""
    plain = model.shape.model_copy(update={"quantised": None})
    found = make_unsharded_model(plain, "lm", dtype=dtype, device=CPU, products=products)
    for name, values in widen(model):
        found.parameters[name].copy_(values)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_matrices_are_quantised_by_rows_and_all_else_is_not(
    name: str, kind: Quantisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, name)
    plain = read(path, SHAPES[name])
    monkeypatch.setattr("realrl.huggingface.tensor_conversion.PART_ELEMENTS", 200)
    model = read(path, quantised(name, kind))
    for spec in plain.layout.specs:
        values = plain.parameters[spec.name]
        if spec.parameter not in MATRICES:
            assert torch.equal(model.parameters[spec.name], values), spec.name
            continue
        rows = values[:: max(1, len(values) // 5)]
        ours = model.parameters[spec.name][:: max(1, len(values) // 5)]
        scales = model.parameters[f"{spec.name}_scale"].view(torch.float32)[:: max(1, len(values) // 5)]
        for row, found, scale in zip(rows.numpy(), ours.numpy(), scales.numpy(), strict=True):
            expected, factor = quantise_row(row, kind)
            assert (found == expected).all() and scale[0] == factor, spec.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "gpt2", "phi3"])
def test_nothing_larger_than_a_part_is_held_in_a_wide_type_while_reading(
    name: str, kind: Quantisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shape = save(tmp_path, name), quantised(name, kind)
    part = 4 * max(shape.hidden_size, shape.intermediate_size)
    monkeypatch.setattr("realrl.huggingface.tensor_conversion.PART_ELEMENTS", part)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=CPU)
    with Allocations() as made:
        model_files.load(path, shape, model.layout.specs, model.parameters)
    # Rows of heads in another order come together.
    assert made.largest <= 4 * max(part, shape.head_dim * shape.hidden_size)
    assert model.parameters[model.layout.specs[0].name].any()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_of_extremes_stay_what_they_are(kind: Quantisation) -> None:
    shape = quantised("plain", kind)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=CPU)
    spec = next(spec for spec in model.layout.specs if spec.parameter == "out")
    values = torch.zeros(spec.shape)
    values[1], values[2, 0], values[3] = 3.0e38, -1e-40, torch.linspace(-1, 1, spec.shape[1])
    write_quantised(model.parameters, spec, slice(0, len(values)), values, slice(None))
    wide = dict(widen(model))[spec.name]
    assert torch.equal(wide[:2], values[:2]) and wide.isfinite().all()
    assert (wide[3] - values[3]).abs().max() <= (1 / 254 if kind == "int8" else 1 / 27)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_holds_the_same_bytes(
    name: str, fresh: bool, kind: Quantisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read from files in small parts, or made anew."""
    path, shape = save(tmp_path, name), quantised(name, kind)
    monkeypatch.setattr("realrl.huggingface.tensor_conversion.PART_ELEMENTS", 200)

    def fill(
        tensors: Sequence[TensorSpec], into: Weights, regions: Mapping[str, Region] | None = None
    ) -> None:
        if fresh:
            initialise(into, [t for t in tensors if regions is None or t.name in regions], shape, 3, regions)
        else:
            model_files.load(path, shape, tensors, into, regions)

    for tp, pp in CUTS:
        layout = build_layout(shape, "lm", Placement(Mesh(0, tp * pp), Strategy(tp=tp, pp=pp)))
        whole = make_unsharded_model(shape, "lm", dtype=torch.float32, device=CPU).parameters
        fill(layout.specs, whole)
        for rank in range(tp * pp):
            own = {}
            for part, of in build_parameter_sets(shape, "lm", PART, trained=False).items():
                held = [t.stored for t in layout.tensors(rank) if t.spec in of.tensors]
                own[part] = FlatBuffer(held, torch.uint8 if part == QUANTISED else torch.float32, "cpu")
            assert own[QUANTISED].tensors[0].parameter == "qkv_scale", "scales are aligned"
            found = {t.name: buffer[t.name] for buffer in own.values() for t in buffer.tensors}
            regions = {local.spec.name: local.region for local in layout.tensors(rank)}
            fill(layout.specs, found, regions)
            for name_, region in regions.items():
                assert torch.equal(found[name_][: region.size[0]], whole[name_][region.slices]), (
                    name_,
                    tp,
                    rank,
                )


@pytest.mark.parametrize(("name", "lora"), [("qwen2", LowRank(rank=4, dora=True)), ("gpt2", LowRank(rank=4))])
def test_adapters_are_merged_before_rows_are_quantised(name: str, lora: LowRank, tmp_path: Path) -> None:
    base = make_base(tmp_path, name)
    make_adapters(tmp_path / "adapters", base, name, lora)
    merged = read(str(tmp_path / "adapters"), SHAPES[name])
    model_files.save(tmp_path / "merged", SHAPES[name], "lm", merged.parameters, None, torch.float32)
    shape = quantised(name, "int8")
    expected = read(str(tmp_path / "merged"), shape).parameters
    layout = build_layout(shape, "lm", Placement(Mesh(0, 3), Strategy(tp=3)))
    for local in layout.tensors(1):
        if local.spec.parameter == "down":
            own = {
                spec.name: torch.zeros(spec.shape, dtype=torch.uint8)
                for spec in (t.stored for t in layout.tensors(1))
                if spec.parameter in ("down", "down_scale")
            }
            regions = {local.spec.name: local.region}
            model_files.load(tmp_path / "adapters", shape, layout.specs, own, regions)
            assert torch.equal(own[local.spec.name], expected[local.spec.name][local.region.slices])
    ours = read(str(tmp_path / "adapters"), shape).parameters
    assert all(torch.equal(ours[spec.name], expected[spec.name]) for spec in layout.specs)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, "plain")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"layers.1.mlp.down_proj.weight has values that are not finite"):
        read(path, quantised("plain", "fp8"))


@torch.no_grad()
def score(model: Model) -> Tensor:
    """Log-probabilities of random tokens."""
    rows = Ragged.of(random_rows(model.shape.vocab_size, [9, 17, 4, 23]))
    packing = Packing.of(rows.lengths, CPU)
    found = model.compute_output(model.forward(rows, packing, None), rows, packing).logprobs
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("grouped-tied", PLAIN),
        ("grouped-tied", Products(onednn=True)),
        ("grouped-tied", Products(bfloat16=True)),
        ("grouped-tied", Products(exact=True)),
        ("mixtral", PLAIN),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_weights_that_bytes_stand_for(
    kind: Quantisation, dtype: torch.dtype, name: str, products: Products, tmp_path: Path
) -> None:
    model = read(save(tmp_path, name), quantised(name, kind), dtype=dtype, products=products)
    assert torch.equal(score(model), score(unquantised(model, dtype, products)))


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("plain", PLAIN),
        ("plain", Products(packed=True)),
        ("plain", Products(exact=True)),
        ("qwen3_moe", Products(packed=True)),
    ],
)
def test_a_quantised_model_generates_what_the_weights_that_bytes_stand_for_do(
    name: str, products: Products, tmp_path: Path
) -> None:
    model = read(save(tmp_path, name), quantised(name, "int8"), products=products)
    found = []
    for one in (model, unquantised(model, torch.float32, products)):
        prompts = Batch((0, 1, 2), {"prompts": Ragged.of(random_rows(64, [3, 9, 5]))})
        batch = generate(
            one, prompts, "prompts", sampling=GenerationConfig(max_new_tokens=6), stop_token_ids=(2,),
            seed=SamplingSeed(0, 0, 0), kv_capacity=200,
        )  # fmt: skip
        found.append(batch)
    assert torch.equal(found[0]["sequences"].values, found[1]["sequences"].values)
    torch.testing.assert_close(found[0]["logprobs"].values, found[1]["logprobs"].values, rtol=1e-5, atol=1e-5)


def test_widening_rounds_once_and_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(-127, 128, (37, 11), dtype=torch.int8)
    scales = torch.rand(37, 1)
    matrix = QuantisedMatrix(values, scales)
    expected = torch.from_numpy(values.numpy().astype(np.float32) * scales.numpy())
    for most in (1, 50, 10**6):
        monkeypatch.setattr("realrl.model.quantised.CPU_WIDENED", most)
        assert torch.equal(matrix.widen(torch.float32), expected)
        assert torch.equal(matrix.widen(torch.bfloat16), expected.bfloat16())


def test_memory_that_was_released_is_filled_again(tmp_path: Path) -> None:
    model = read(save(tmp_path, "plain"), quantised("plain", "int8"))
    expected = score(model)
    for held in model.sets.values():
        held.memory.offload()
    assert sum(held.memory.nbytes for held in model.sets.values()) == 0
    for held in model.sets.values():
        held.memory.load()
    assert [*model.sets] == [BASE, QUANTISED]
    assert torch.equal(score(model), expected)
