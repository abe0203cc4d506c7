"""Conditions for the GPU path, and the import of its Triton kernels."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from realrl.config.errors import UserError
from realrl.config.hardware import find_missing_build_tool

FLASH_CAPABILITY = (8, 0)
"""Lowest compute capability with a flash kernel (Ampere)."""


def on_gpu(tensor: Tensor) -> bool:
    """Check whether a tensor is on a GPU, where Triton and vendor kernels compute."""
    return tensor.device.type != "cpu"


_GROUPED_MAJORS = (9, 10)
"""Major compute capabilities for which torch has a grouped product kernel (`F.grouped_mm`).

On other GPUs, torch reads the ends of groups on the host. The host then waits for the device, which a CUDA graph
does not allow.
"""


@cache
def has_flash_attention(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


@cache
def has_grouped_products(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_MAJORS


@cache
def load_kernels() -> ModuleType:
    """Import the Triton kernels and return their package, `realrl.model.gpu`.

    Raises UserError if Triton, a C compiler or Python's headers are missing.
    """
    if find_spec("triton") is None:
        raise UserError(
            "device=cuda needs the package triton, which PyTorch for CUDA brings on Linux; on Windows, install"
            " triton-windows, or set device=cpu"
        )
    missing = find_missing_build_tool()
    if missing is not None:
        raise UserError(f"device=cuda: {missing}")
    import realrl.model.gpu as kernels
    from realrl.model.gpu import elementwise, exact, grouped_gradient, nucleus  # noqa: F401

    return kernels
