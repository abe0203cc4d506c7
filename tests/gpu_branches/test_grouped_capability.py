"""Which GPUs multiply the rows of all experts by one kernel."""

import pytest
import torch

from realrl.model.arithmetic import grouped
from realrl.model.arithmetic.grouped import has_grouped_kernel
from realrl.model.arithmetic.ops import PLAIN
from realrl.model.gpu.path import has_grouped_products

CAPABILITIES = {(8, 0): False, (8, 9): False, (9, 0): True, (10, 0): True, (10, 3): True, (12, 0): False}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_only_gpus_for_which_torch_has_the_kernel_group_products(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch falls back to a loop on the host for others, which no CUDA graph can hold."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(grouped, "on_gpu", lambda _: True)
    has_grouped_products.cache_clear()
    weights = torch.zeros(4, 16, 32, dtype=torch.bfloat16)
    assert has_grouped_kernel(weights, PLAIN) == CAPABILITIES[capability]
    has_grouped_products.cache_clear()
