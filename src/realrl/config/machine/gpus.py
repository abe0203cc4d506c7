"""Presence of GPUs, as far as it shows without torch."""

import os
from pathlib import Path

_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of drivers: NVIDIA's, that of Windows' subsystem for Linux, AMD's."""


def computes_on_gpus(device: str, cluster: str) -> bool:
    """Tell whether a recipe's devices are GPUs: by its `device`, by its cluster's kind, or by this machine's."""
    if device != "auto":
        return device == "cuda"
    kind, colon, _ = cluster.partition(":")
    if colon:
        return kind != "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path(file).exists() for file in _DRIVER_FILES)
