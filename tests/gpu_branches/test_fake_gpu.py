"""Every branch of training on a GPU runs on one that is not there: shapes, types, devices, waits of the host."""

from collections import Counter

import torch

from realrl.engine.model import make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import Head
from realrl.recipe.optimizer import OptimizerConfig
from tests.forked import run_forked
from tests.gpu_branches.fake_gpu import fake_gpu
from tests.gpu_branches.training_cases import LONG, SHAPES, list_methods, make_batch

CASES: list[tuple[str, Head]] = [*((name, "lm") for name in SHAPES), ("llama, grouped", "scalar")]


def train(name: str, head: Head, dtype: torch.dtype, *, max_tokens: int, recompute: bool) -> Counter[str]:
    """Train with every method of the head; how often the host waited, and for what."""
    with fake_gpu() as gpu:
        model = make_unsharded_model(SHAPES[name], head, dtype=dtype, device=gpu.device)
        trainer = Trainer(model, OptimizerConfig(grad_clip=1e-3))
        gpu.reads.clear()
        for method, candidates in list_methods(head):
            trainer.train(
                make_batch(head, model.shape, LONG),
                method,
                [[0, 1, 2, 3]],
                TrainOptions(max_tokens=max_tokens, recompute=recompute, candidates=candidates),
                lr=1e-3,
            )
    return gpu.reads


def train_everything(_: int) -> None:
    for name, head in CASES:
        for dtype, recompute in ((torch.float32, False), (torch.bfloat16, True)):
            train(name, head, dtype, max_tokens=150, recompute=recompute)


def compare_waits(_: int) -> None:
    for head in ("lm", "scalar"):
        one, several = (
            train("llama, grouped", head, torch.bfloat16, max_tokens=most, recompute=False)
            for most in (1000, 150)
        )
        # Losses over some of the tokens select them in every micro-batch.
        assert several - one == Counter({"aten.nonzero.default": 1} if head == "lm" else {}), several


def test_training_steps_have_right_shapes_types_and_devices_on_a_gpu() -> None:
    run_forked(train_everything, 1)


def test_the_host_does_not_wait_for_the_gpu_in_every_micro_batch() -> None:
    run_forked(compare_waits, 1)
