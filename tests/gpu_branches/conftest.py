"""What GPUs compute, on a CPU."""

from collections.abc import Iterator

import pytest

from realrl.model import attention, logprobs, rotary
from realrl.model.arithmetic import elementwise, grouped, ops
from tests.gpu_branches.cuda_rules import apply_rules


@pytest.fixture
def cuda_rules() -> Iterator[None]:
    """Operators that torch has for CUDA alone, defined for CPU tensors."""
    with apply_rules():
        yield


@pytest.fixture
def gpu_path(cuda_rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computation takes the path of GPUs, kernels in Triton's interpreter, with the values that it has there."""
    for module in (attention, elementwise, grouped, logprobs, ops, rotary):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
    monkeypatch.setattr(attention, "has_flash_attention", lambda _: True)
    monkeypatch.setattr(grouped, "has_grouped_products", lambda _: True)
