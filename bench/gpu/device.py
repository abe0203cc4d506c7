"""The device under test: its clock, its peaks of arithmetic and memory, and the shapes to measure."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES as PUBLISHED

SHAPES = {"0.5B": "qwen2.5-0.5b", "1.5B": "qwen2.5-1.5b", "7B": "qwen2.5-7b"}
"""Published shapes by size. Weights are random."""
TINY = ModelShape(
    family="qwen2", vocab_size=512, hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=2,
    head_dim=16, tied_embeddings=True,
)  # fmt: skip
DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU for a dry run with tiny sizes."""

    name: str

    @property
    def place(self) -> torch.device:
        """The device as torch knows it."""
        return torch.device(self.name)

    @property
    def tiny(self) -> bool:
        """Whether sizes are tiny, because this is a CPU."""
        return self.name == "cpu"

    def shape(self, size: str) -> ModelShape:
        """Find the shape of a size."""
        return TINY if self.tiny else PUBLISHED[SHAPES[size]]

    def wait(self) -> None:
        """Wait for all queued work."""
        if not self.tiny:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Return unused memory to the device."""
        if not self.tiny:
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object], repeats: int = 5) -> float:
        """Measure the median seconds of a call, after two warm-up calls."""
        times = []
        for _ in range(repeats + 2):
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])

    @cached_property
    def flops(self) -> float:
        """Operations per second of a large bfloat16 product."""
        n = 256 if self.tiny else 8192
        a, b = (torch.randn(n, n, device=self.place).bfloat16() for _ in range(2))
        return 2 * n**3 / self.seconds(lambda: a @ b, 10)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy, reads and writes together."""
        source = torch.empty(2**20 if self.tiny else 2**30, device=self.place, dtype=torch.uint8)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source), 10)

    def describe(self) -> dict[str, str]:
        """Describe device, driver and torch."""
        if self.tiny:
            return {"device": "CPU, tiny sizes: the figures mean nothing", "torch": torch.__version__}
        memory = torch.cuda.get_device_properties(self.place).total_memory / 2**30
        return {
            "device": f"{torch.cuda.get_device_name(self.place)}, {memory:.0f} GiB",
            "driver": DRIVER.read_text().strip() if DRIVER.exists() else "unknown",
            "cuda": str(torch.version.cuda),
            "torch": torch.__version__,
        }
