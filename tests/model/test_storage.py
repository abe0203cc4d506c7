"""Parameters and gradients live in flat buffers."""

import pytest
import torch
from small_models import SHAPES, pack, random_rows

from realrl.engine.buffers import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.tensors import TensorSpec
from realrl.huggingface import initial_weights
from realrl.huggingface.initial_weights import initialise
from realrl.layout.region import Region
from realrl.layout.shard import Shard
from realrl.model.group import make_single_rank_group
from realrl.model.packing import Packing
from realrl.model.transformer import Transformer

SHAPE = SHAPES["grouped-tied"]


def built(dtype: torch.dtype, head: str = "lm") -> tuple[Transformer, FlatBuffer, FlatBuffer]:
    """A model, its weights, and the float32 buffer its gradients add up in."""
    tensors = model_tensors(SHAPE, head)
    weights, grads = FlatBuffer(tensors, dtype, "cpu"), FlatBuffer(tensors, torch.float32, "cpu")
    initialise(weights, tensors, SHAPE.model_copy(update={"init_std": 0.3}), seed=1)
    model = Transformer(Shard(SHAPE, head), weights.fused, make_single_rank_group())
    for name, parameter in model.named_parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = grads.fused(*model.sources[name])
    return model, weights, grads


def loss(model: Transformer, rows: list[torch.Tensor]) -> torch.Tensor:
    tokens, lengths = pack(rows)
    packing = Packing.of(lengths, "cpu")
    hidden = model(tokens, packing)
    if model.shard.head == "scalar":
        return model.compute_values(hidden, packing).square().sum()
    return -model.compute_logprobs(hidden, tokens, packing, temperature=1.0)[0].sum()


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_gradients_of_micro_batches_add_up_in_the_buffer(head: str) -> None:
    model, _, grads = built(torch.float32, head)
    rows = random_rows(SHAPE.vocab_size, [9, 4, 12])
    loss(model, rows).backward()
    whole = grads.data.clone()
    grads.data.zero_()
    for row in rows:
        loss(model, [row]).backward()
    assert whole.abs().max() > 0
    torch.testing.assert_close(grads.data, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_bfloat16_weights_add_up_float32_gradients(head: str) -> None:
    model, _, grads = built(torch.bfloat16, head)
    exact, _, exact_grads = built(torch.float32, head)
    rows = random_rows(SHAPE.vocab_size, [9, 4, 12, 30])
    for _ in range(2):
        loss(model, rows).backward()
        loss(exact, rows).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.data_ptr() == grads.fused(*model.sources[name]).data_ptr()
    assert torch.nn.functional.cosine_similarity(grads.data, exact_grads.data, dim=0) > 0.99


def test_parameters_are_views_that_cover_the_flat_buffer() -> None:
    model, weights, _ = built(torch.float32)
    weights.data.zero_()
    assert all(parameter.abs().sum() == 0 for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == weights.data.numel()
    assert {name for names in model.sources.values() for name in names} == {t.name for t in weights.tensors}


def test_the_flat_buffer_is_padded_with_zeros_to_a_multiple() -> None:
    sizes = {"a": (3, 2), "b": (1, 2)}
    tensors = [TensorSpec(name=name, shape=size, parameter="qkv", place=0) for name, size in sizes.items()]
    buffer = FlatBuffer(tensors, torch.float32, "cpu", multiple_of=5)
    assert buffer.data.tolist() == [0] * 10
    buffer["b"].fill_(1)
    assert buffer.offset("b") == 6 and buffer.fused("a", "b")[3].tolist() == [1, 1]


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    tensors = model_tensors(SHAPE, "lm")
    buffers = [FlatBuffer(order, torch.float32, "cpu") for order in (tensors, tensors[::-1], tensors)]
    for buffer, seed in zip(buffers, (1, 1, 2), strict=True):
        initialise(buffer, buffer.tensors, SHAPE, seed)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(buffers[0][name], buffers[1][name])
    assert not torch.equal(buffers[0][name], buffers[2][name])
    assert not torch.equal(buffers[0][name], buffers[0]["model.layers.1.mlp.gate_proj.weight"])
    assert buffers[0][name].std().item() == pytest.approx(SHAPE.init_std, rel=0.1)
    assert (buffers[0]["model.norm.weight"] == 1).all()


def test_a_rank_draws_the_same_numbers_for_its_region_as_for_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of rows are drawn apart: no two are alike, and a region begins and ends within one."""
    monkeypatch.setattr(initial_weights, "_DRAWN_ELEMENTS", 4 * SHAPE.hidden_size)
    spec = next(spec for spec in model_tensors(SHAPE, "lm") if spec.parameter == "embedding")
    rows, columns = spec.shape
    whole = torch.zeros(spec.shape)
    initialise({spec.name: whole}, [spec], SHAPE, 1)
    blocks = whole[: rows - rows % 4].view(-1, 4, columns)
    assert len(blocks.unique(dim=0)) == len(blocks) and (whole != 0).all()
    for first, last, left, right in (
        (0, rows, 0, columns),
        (3, 10, 2, 7),
        (4, 8, 0, columns),
        (rows, rows, 0, 1),
    ):
        region = Region(spec.name, (first, left), (last - first, right - left))
        own = torch.zeros(region.size)
        initialise({spec.name: own}, [spec], SHAPE, 1, {spec.name: region})
        assert torch.equal(own, whole[region.slices])
