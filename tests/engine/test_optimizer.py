"""The sharded optimizer against torch's AdamW and gradient clipping on the whole model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realrl.engine.buffers import FlatBuffer
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.families.tensors import Place, TensorSpec
from realrl.model.group import Group, make_single_rank_group
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import wait_to_be_scheduled
from tests.forked import run_forked

# 67 numbers: no shard of 3 ranks ends where a tensor does, and the buffer needs padding.
TENSORS = tuple(
    TensorSpec(name=name, shape=shape, parameter="qkv", place=0, decay=len(shape) > 1)
    for name, shape in (("a", (5, 4)), ("norm", (7,)), ("b", (3, 6)), ("c", (2, 9)), ("bias", (4,)))
)
CASES = {
    "plain": {"grad_clip": None},
    "decay": {"grad_clip": None, "weight_decay": 0.3},
    "clipped": {"grad_clip": 2.0, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6},
}
RATES = (0.1, 0.03, 0.05, 0.02, 0.04)
BAD_STEP = 2
"""The step whose gradient is infinite on one rank."""
RANKS = 3


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {t.name: torch.randn(t.shape, generator=generator) for t in TENSORS}


def gradient(name: str, step: int, rank: int) -> Tensor:
    """One rank's part of a gradient; the whole is the sum over RANKS."""
    index = [tensor.name for tensor in TENSORS].index(name)
    generator = torch.Generator().manual_seed(1000 * index + 10 * step + rank)
    grad = torch.randn(TENSORS[index].shape, generator=generator)
    return grad * torch.inf if step == BAD_STEP and rank == 1 and name == "b" else grad


def sharded(case: str, dtype: torch.dtype, group: Group, ranks: Sequence[int]) -> tuple[FlatBuffer, Tensor]:
    """Parameters and gradient norms after training on a group; this process stands in for `ranks`."""
    parameters = FlatBuffer(TENSORS, dtype, "cpu", multiple_of=group.size)
    gradients = FlatBuffer(TENSORS, torch.float32, "cpu", multiple_of=group.size)
    for name, value in start().items():
        parameters[name].copy_(value)
    optimizer = ShardedAdamW(parameters, gradients, OptimizerConfig.model_validate(CASES[case]), group)
    norms = []
    for step, lr in enumerate(RATES):
        for name in start():
            for rank in ranks:
                gradients[name].add_(gradient(name, step, rank))
        norms.append(optimizer.step(lr))
        if step == BAD_STEP:
            assert gradients.data.any(), "they can still be looked at"
            optimizer.discard()
        assert not gradients.data.any()
    return parameters, torch.tensor(norms)


def expected(case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """The same with torch's own optimizer in float32, rounded to `dtype`."""
    config = OptimizerConfig.model_validate(CASES[case])
    weights = {name: torch.nn.Parameter(value.to(dtype).float()) for name, value in start().items()}
    matrices = [w for w in weights.values() if w.dim() > 1]
    vectors = [w for w in weights.values() if w.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    norms = []
    for step, lr in enumerate(RATES):
        for name, weight in weights.items():
            weight.grad = sum((gradient(name, step, rank) for rank in range(RANKS)), torch.zeros(()))
        limit = torch.inf if config.grad_clip is None else config.grad_clip
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), limit))
        if norms[-1].isfinite():
            for settings in optimizer.param_groups:
                settings["lr"] = lr
            optimizer.step()
    return {name: weight.detach().to(dtype) for name, weight in weights.items()}, torch.stack(norms)


def run_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    assert dist.group.WORLD is not None
    group = Group(tuple(range(RANKS)), rank, dist.group.WORLD)
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            parameters, norms = sharded(case, dtype, group, [rank])
            torch.save((parameters.data, norms), f"{directory}/{case}-{dtype}-{rank}")
    dist.destroy_process_group()
    leave(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of RANKS processes ends with, a file for each."""
    directory = tmp_path_factory.mktemp("ranks")
    run_forked(run_rank, RANKS, str(directory))
    return directory


# A rounding error of the sum may carry a bfloat16 number over to its neighbour.
CLOSE = {torch.float32: {}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9}}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("case", CASES)
def test_one_rank_updates_like_torch_adamw(case: str, dtype: torch.dtype) -> None:
    parameters, norms = sharded(case, dtype, make_single_rank_group(), range(RANKS))
    weights, reference_norms = expected(case, dtype)
    torch.testing.assert_close(norms, reference_norms)
    for name, weight in weights.items():
        torch.testing.assert_close(parameters[name], weight, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("case", CASES)
def test_sharded_updates_equal_torch_adamw(case: str, dtype: torch.dtype, results: Path) -> None:
    weights, reference_norms = expected(case, dtype)
    parameters = FlatBuffer(TENSORS, dtype, "cpu", multiple_of=RANKS)
    for rank in range(RANKS):
        data, norms = torch.load(results / f"{case}-{dtype}-{rank}")
        torch.testing.assert_close(norms, reference_norms)
        parameters.data.copy_(data)
        for name, weight in weights.items():
            torch.testing.assert_close(parameters[name], weight, **CLOSE[dtype])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_no_state(value: float) -> None:
    parameters, gradients = (FlatBuffer(TENSORS, torch.float32, "cpu") for _ in range(2))
    parameters.data.normal_(generator=torch.Generator().manual_seed(1))
    before = parameters.data.clone()
    optimizer = ShardedAdamW(
        parameters, gradients, OptimizerConfig(weight_decay=0.1), make_single_rank_group()
    )
    gradients["b"][0, 0] = value
    norm = torch.tensor(optimizer.step(0.1))
    assert not norm.isfinite() and torch.equal(parameters.data, before)
    assert gradients["b"][0, 0].equal(torch.tensor(value)) or value != value, "it can still be looked at"
    optimizer.discard()
    gradients["b"][0, 0] = 1.0
    assert optimizer.step(0.1) == 1.0
    assert parameters.data.isfinite().all() and not torch.equal(parameters.data, before)


def test_bfloat16_parameters_keep_updates_too_small_for_them() -> None:
    parameters = FlatBuffer(TENSORS, torch.bfloat16, "cpu")
    gradients = FlatBuffer(TENSORS, torch.float32, "cpu")
    parameters.data.fill_(1.0)
    optimizer = ShardedAdamW(parameters, gradients, OptimizerConfig(), make_single_rank_group())
    for _ in range(64):
        gradients.data.fill_(1.0)
        optimizer.step(1e-3)  # a quarter of the distance to the next smaller bfloat16
    torch.testing.assert_close(parameters.data.float(), torch.full((67,), 1 - 0.064), rtol=0, atol=2**-8)


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_scaled_head_is_updated_as_its_multiple(dtype: torch.dtype) -> None:
    """Adam on `head / scale`, with the gradients that has, is Adam on the head at a rate times the scale, and the
    norm is that of those gradients."""
    scale, tensors = (
        3.0,
        (
            TensorSpec(name="norm", shape=(7,), parameter="norm", place=Place.LAST, decay=False),
            TensorSpec(name="score", shape=(1, 6), parameter="scalar_head", place=Place.LAST),
        ),
    )
    parameters = FlatBuffer(tensors, dtype, "cpu")
    gradients = FlatBuffer(tensors, torch.float32, "cpu")
    parameters.data.normal_(generator=torch.Generator().manual_seed(1))
    config = OptimizerConfig(weight_decay=0.1, grad_clip=2.0, eps=1e-30)
    optimizer = ShardedAdamW(parameters, gradients, config, make_single_rank_group())
    small = torch.nn.Parameter(parameters["score"].float() / scale)
    other = torch.nn.Parameter(parameters["norm"].float())
    groups = [{"params": [small]}, {"params": [other], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.02, betas=config.betas, eps=config.eps, weight_decay=0.1)
    for step in range(4):
        gradients.data.normal_(generator=torch.Generator().manual_seed(step))
        small.grad, other.grad = gradients["score"] * scale, gradients["norm"].clone()
        norm = torch.nn.utils.clip_grad_norm_([small, other], 2.0)
        assert optimizer.step(0.02, head_scale=scale) == pytest.approx(norm.item(), rel=1e-5)
        reference.step()
    torch.testing.assert_close(parameters["score"], (small * scale).detach().to(dtype), **CLOSE[dtype])
    torch.testing.assert_close(parameters["norm"], other.detach().to(dtype), **CLOSE[dtype])


def test_discarded_gradients_do_not_affect_the_next_step() -> None:
    parameters, gradients = (FlatBuffer(TENSORS, torch.float32, "cpu") for _ in range(2))
    optimizer = ShardedAdamW(parameters, gradients, OptimizerConfig(), make_single_rank_group())
    gradients.data.fill_(3.0)
    optimizer.discard()
    assert optimizer.step(0.1) == 0.0
