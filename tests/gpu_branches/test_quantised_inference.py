"""Quantised models on the path of GPUs: the values that a CPU computes, and no wait of the host."""

import pytest
import torch
from torch import Tensor

from realrl.data.batch import Ragged
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.tensors import Quantisation
from realrl.huggingface.initial_weights import initialise
from realrl.model.packing import Packing
from tests.forked import run_forked
from tests.gpu_branches.fake_gpu import fake_gpu
from tests.gpu_branches.training_cases import SHAPES, SHORT

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
KINDS: tuple[Quantisation, ...] = ("int8", "fp8")


def make(kind: Quantisation, dtype: torch.dtype, device: torch.device) -> Model:
    shape = SHAPES["llama, grouped"].model_copy(update={"init_std": 0.2, "quantised": kind})
    return make_unsharded_model(shape, "lm", dtype=dtype, device=device)


@torch.no_grad()
def score(model: Model) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    rows = Ragged.of([torch.randint(1, 61, (length,), generator=generator) for length in SHORT])
    rows = rows.to(model.device)
    packing = Packing.of(rows.lengths, model.device)
    found = model.compute_output(model.forward(rows, packing, None), rows, packing).logprobs
    assert found is not None
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_on_the_path_of_gpus_are_those_of_the_cpu(
    kind: Quantisation, dtype: torch.dtype, tolerance: float, request: pytest.FixtureRequest
) -> None:
    cpu = torch.device("cpu")
    models = [make(kind, torch.float32, cpu), make(kind, dtype, cpu)]
    for model in models:
        initialise(model.parameters, model.layout.specs, model.shape, 1)
    expected = score(models[0])
    request.getfixturevalue("gpu_path")
    torch.testing.assert_close(score(models[1]), expected, rtol=tolerance, atol=tolerance)


def score_on_a_gpu(_: int) -> None:
    with fake_gpu() as gpu:
        for kind in KINDS:
            for dtype in (torch.float32, torch.bfloat16):
                model = make(kind, dtype, gpu.device)
                model.transformer.prepare_decoding()
                gpu.reads.clear()
                assert score(model).device == gpu.device
                assert not gpu.reads, gpu.reads


def test_quantised_inference_has_right_types_and_devices_on_a_gpu() -> None:
    run_forked(score_on_a_gpu, 1)
