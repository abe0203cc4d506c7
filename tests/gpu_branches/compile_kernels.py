"""Compiles the kernels for a compute capability, without a GPU; called as a program of its own.

python compile_kernels.py 90 [DTYPE ...]
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from realrl.model.gpu import exact, logits, norm, paged_attention, rotary, swiglu

COMPILED: dict[str, Any] = {}


class NoDevice:
    """Driver of a device that is not there."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: Any, grid: Any) -> Any:
    """In place of a launch."""

    def run(*arguments: Any, **options: Any) -> None:
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        COMPILED[f"{kernel.__module__}.{kernel.__name__}"] = compiled

    return run


def main(capability: int, dtypes: list[torch.dtype]) -> None:
    driver.set_active(NoDevice(capability))
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    for dtype in dtypes:
        for rows, width in ((64, 3584), (64, 128), (3, 129)):
            x, weight = torch.zeros(rows, width, dtype=dtype), torch.ones(width, dtype=dtype)
            for function, inputs in ((norm.RMSNorm, (x,)), (norm.AddRMSNorm, (x, x.clone()))):
                leaves = [value.clone().requires_grad_() for value in inputs]
                out = function.apply(*leaves, weight.requires_grad_(), 1e-6)
                torch.autograd.backward(out, [torch.zeros_like(x)] * (2 if isinstance(out, tuple) else 1))
        swiglu.SwiGLU.apply(torch.zeros(4, 2 * 3001, dtype=dtype, requires_grad=True)).sum().backward()
        table = torch.ones(5, 64)
        qkv = torch.zeros(5, 11 * 128, dtype=dtype, requires_grad=True)
        rotary.RotateHeads.apply(qkv * 1, table, table, 9).sum().backward()
        chunk, sums = torch.zeros(4, 152064), torch.zeros(4)
        logits.compute_logit_sums(chunk, 1.0, sums, sums.clone())
        logits.compute_logit_sums(chunk, 1.0, sums, None)
        logits.bound_logits(chunk, 30.0)
        for cap in (0.0, 30.0):
            gradient = torch.empty_like(chunk, dtype=dtype)
            logits.compute_softmax_gradient(chunk, sums, sums, 1.0, cap, gradient)
        x, weight = torch.zeros(3, 256, dtype=dtype), torch.zeros(1000, 256, dtype=dtype)
        exact.launch_products(x, weight, torch.zeros(3, 1000, dtype=dtype))
        pools, numbers = torch.zeros(2, 4, 2, 16, 128, dtype=dtype), torch.zeros(3, dtype=torch.int64)
        qkv, out = torch.zeros(3, 12 * 128, dtype=dtype), torch.zeros(3, 8 * 128, dtype=dtype)
        tables = torch.zeros(3, 5, dtype=torch.int64)
        arguments = (qkv, *pools, tables, numbers, tables, numbers)
        for rule in ((1 << 24, 0.0, None), (4096, 50.0, torch.zeros(8, dtype=dtype))):
            exact.launch_run_attention(*arguments, torch.arange(4), 8, *rule, out)
            paged_attention.launch_attention(*arguments, 8, *rule)
    assert len(COMPILED) == 12, COMPILED
    for name, kernel in COMPILED.items():
        print(name, kernel.metadata.shared, len(kernel.asm["cubin"]))


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret
    main(int(sys.argv[1]), [getattr(torch, name) for name in sys.argv[2:] or ("bfloat16", "float32")])
