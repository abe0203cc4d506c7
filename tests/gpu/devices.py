"""Devices that tests of GPUs run on: GPUs where there are some, and a CPU, so that no line first runs on a GPU."""

import pytest
import torch

COUNT = torch.cuda.device_count()
ONE_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(COUNT < 1, reason="needs a CUDA device")]
)
TWO_GPUS = pytest.param(
    "cuda", marks=[pytest.mark.gpu2, pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")]
)
on_one_device = pytest.mark.parametrize("device", ["cpu", ONE_GPU])
on_two_devices = pytest.mark.parametrize("device", ["cpu", TWO_GPUS])
