"""Training on the path of GPUs, on a CPU: kernels in Triton's interpreter, CUDA operators by their rules."""

import pytest
import torch

from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.adapters import STACKS_B
from realrl.families.shape import Head
from realrl.huggingface.initial_weights import initialise
from realrl.layout import limits
from realrl.recipe.optimizer import OptimizerConfig
from tests.conftest import thin
from tests.gpu_branches.training_cases import SHAPES, SHORT, list_methods, make_batch

# The interpreter computes both sides of a `where`, of which kernels use one.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
CASES = {"float32, recomputed": (torch.float32, True, 1e-4), "bfloat16": (torch.bfloat16, False, 6e-2)}


def make(name: str, head: Head, dtype: torch.dtype) -> Model:
    shape = SHAPES[name].model_copy(update={"init_std": 0.2})
    model = make_unsharded_model(shape, head, dtype=dtype, device=torch.device("cpu"))
    initialise(model.parameters, model.layout.specs, shape, 1)
    generator = torch.Generator().manual_seed(0)
    for spec in model.layout.specs:
        if spec.parameter in STACKS_B.values():  # with zeros, A would have no gradient
            model.parameters[spec.name].normal_(std=0.2, generator=generator)
    return model


def train(model: Model, *, recompute: bool) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of a step of each method, and the gradients of the first."""
    trainer = Trainer(model, OptimizerConfig(lr=1e-2, grad_clip=0.5, eps=1e-4))
    gradients: dict[str, torch.Tensor] = {}
    found = []

    def keep_gradients() -> None:
        for spec in trainer.gradients.tensors:
            gradients.setdefault(spec.name, trainer.gradients[spec.name].clone())

    for method, candidates in list_methods(model.head):
        metrics = trainer.train(
            make_batch(model.head, model.shape, SHORT),
            method,
            [[0, 1, 2, 3]],
            TrainOptions(
                max_tokens=26, recompute=recompute, before_update=keep_gradients, candidates=candidates
            ),
            lr=1e-2,
        )
        found.append(metrics.result())
    return found, gradients


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("name", "head"), thin([*((name, "lm") for name in SHAPES), ("llama, grouped", "scalar")], 2)
)
def test_training_by_the_kernels_of_gpus_matches_the_cpu_in_float32(
    name: str, head: Head, case: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    dtype, recompute, tolerance = CASES[case]
    expected, gradients = train(make(name, head, torch.float32), recompute=False)
    request.getfixturevalue("gpu_path")
    monkeypatch.setattr(limits, "GPU_LOGITS", 700)  # of chunks
    monkeypatch.setattr(limits, "GPU_LOGIT_ROWS", 1)
    got, ours = train(make(name, head, dtype), recompute=recompute)
    for step, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance), step
    for tensor, gradient in gradients.items():
        difference = torch.linalg.vector_norm(ours[tensor] - gradient)
        assert difference <= tolerance * torch.linalg.vector_norm(gradient), tensor
