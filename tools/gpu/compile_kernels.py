"""Compile realrl's Triton kernels for GPUs that this machine need not have, and check their use of resources.

python tools/gpu/compile_kernels.py [--capabilities 80,90,100] [--models small|all|NAME,...] [--cache DIR]

The engine's own functions launch the kernels on small CPU tensors with the widths and heads of real models; each
launch becomes a compilation. The script prints registers, spilled bytes and shared memory of each kernel. It exits
with 1 if a kernel does not compile, spills in bfloat16, or uses more than a block may have. ptxas and cuobjdump
come with Triton. A GPU machine with the same Triton and sources uses the kernels in the folder of --cache if
TRITON_CACHE_DIR names this folder.
"""

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
# Triton reads both variables when it is first imported.
os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import realrl.model.gpu as package

SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Maximum bytes of shared memory of one block, by compute capability (CUDA programming guide)."""
REGISTERS = 65536
"""Maximum registers of one block, for all of these compute capabilities."""
NO_WINDOW = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and options of a model that decide how its kernels are compiled."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    head_norms: bool = False
    cap: float = 0.0
    window: int = NO_WINDOW
    sinks: bool = False


def _sizes(
    hidden: int, inner: int, heads: int, kv_heads: int, dim: int, vocabulary: int, **rest: Any
) -> Sizes:
    return Sizes(
        hidden=hidden, inner=inner, heads=heads, kv_heads=kv_heads, dim=dim, vocabulary=vocabulary, **rest
    )


MODELS = {
    "qwen2.5-0.5b": _sizes(896, 4864, 14, 2, 64, 151936),
    "qwen2.5-1.5b": _sizes(1536, 8960, 12, 2, 128, 151936),
    "qwen2.5-7b": _sizes(3584, 18944, 28, 4, 128, 152064),
    "qwen3-8b": _sizes(4096, 12288, 32, 8, 128, 151936, head_norms=True),
    "llama-2-7b": _sizes(4096, 11008, 32, 32, 128, 32000),
    "llama-3-70b": _sizes(8192, 28672, 64, 8, 128, 128256),
    "gemma-2-9b": _sizes(3584, 14336, 16, 8, 256, 256000, cap=50.0, window=4096),
    "gemma-3-1b": _sizes(1152, 6912, 4, 1, 256, 262144, head_norms=True, window=512),
    "heads-of-80": _sizes(2560, 10240, 32, 32, 80, 51200),
    "one-kv-head": _sizes(6144, 24576, 48, 1, 128, 49152),
    "sinks": _sizes(2880, 2880, 64, 8, 64, 201088, window=128, sinks=True),
    "odd": _sizes(129, 77, 3, 1, 8, 1000, head_norms=True),
}
SMALL = ("qwen2.5-1.5b", "gemma-2-9b", "sinks")
"""Models that cover heads of 64, 128 and 256 dimensions, soft caps, windows and sinks."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One compiled variant of a kernel, with the resources that ptxas reports."""

    kernel: str
    capability: int
    dtype: str
    seconds: float
    warps: int
    shared: int
    registers: int = 0
    spilled: int = 0
    """Bytes of local memory per thread."""

    def problems(self) -> Iterable[str]:
        """Describe what keeps this variant from running, or from running fast."""
        name = f"{self.kernel} for sm_{self.capability}, {self.dtype}"
        if self.shared > SHARED_BYTES[self.capability]:
            yield f"{name}: {self.shared} bytes of shared memory, of {SHARED_BYTES[self.capability]}"
        if self.registers * self.warps * 32 > REGISTERS:
            yield f"{name}: {self.registers} registers for each of {self.warps * 32} threads"
        # Only tests and float32 runs launch the float32 variants, which may spill.
        if self.spilled and self.dtype == "bfloat16":
            yield f"{name}: spills {self.spilled} bytes a thread"


class NoDevice:
    """Replacement for Triton's driver, for a GPU that this machine does not have."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Triton caches compiled kernels by device number only, so each target needs its own number.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Replaces launches: compiles each kernel variant once, and stores the resources that ptxas reports."""

    def __init__(self) -> None:
        self.found: dict[str, Compiled] = {}
        self.failures: set[str] = set()
        self.capability, self.dtype = 0, ""

    def __enter__(self) -> "Compiler":
        self._getitem = JITFunction.__getitem__
        JITFunction.__getitem__ = lambda kernel, grid: lambda *a, **k: self._compile(kernel, grid, a, k)
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.__getitem__ = self._getitem

    def target(self, capability: int, dtype: torch.dtype) -> None:
        """Set the GPU for later compilations, and the dtype that the report names."""
        self.capability, self.dtype = capability, str(dtype).removeprefix("torch.")
        driver.set_active(NoDevice(capability))

    def _compile(self, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        begin, name = time.perf_counter(), name_kernel(kernel)
        try:
            done = kernel.run(*arguments, grid=grid, warmup=True, **options)
        except Exception as error:  # report the failure and continue with the other kernels
            text = str(error).strip().splitlines() or [""]
            self.failures.add(f"{name} for sm_{self.capability}: {type(error).__name__}: {text[-1][:300]}")
            return
        if done.hash in self.found:
            return
        # Kernels that see only float32 logits compile to the same code under every type.
        made = Compiled(
            kernel=name, capability=self.capability, dtype=self.dtype, seconds=time.perf_counter() - begin,
            warps=done.metadata.num_warps, shared=done.metadata.shared,
        )  # fmt: skip
        self.found[done.hash] = replace(made, **read_usage(done.asm["cubin"]))


def name_kernel(kernel: Any) -> str:
    """Name a kernel as FILE.FUNCTION."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def read_usage(cubin: bytes) -> dict[str, int]:
    """Read registers and spilled bytes from a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "spilled": usage["STACK"] + usage["LOCAL"]}


def list_kernels() -> set[str]:
    """List the kernels that files of `model/gpu/` launch."""
    names = set()
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        source = (Path(package.__path__[0]) / f"{info.name.rpartition('.')[2]}.py").read_text(
            encoding="utf-8"
        )
        if "import triton" not in source:
            continue  # the module may need a package that is not installed
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, JITFunction) and re.search(rf"\b{name}\[", source):
                names.add(name_kernel(value))
    return names


def launch_elementwise(sizes: Sizes, dtype: torch.dtype, row_counts: Iterable[int]) -> None:
    """Launch norms of these numbers of rows, SwiGLU and rotation, forward and backward."""
    from realrl.families.shape import SWIGLU
    from realrl.model.gpu import elementwise

    heads = sizes.heads + 2 * sizes.kv_heads
    for rows in row_counts:
        x, weight = _leaf(rows, sizes.hidden, dtype=dtype), _leaf(sizes.hidden, dtype=dtype)
        elementwise.RMSNorm.apply(x, weight, 1e-6).sum().backward()
        total, out = elementwise.AddRMSNorm.apply(x, _leaf(rows, sizes.hidden, dtype=dtype), weight, 1e-6)
        torch.autograd.backward((total, out), (torch.zeros_like(total), torch.zeros_like(out)))
        if sizes.head_norms:
            of_heads = torch.zeros(rows, heads, sizes.dim, dtype=dtype)
            for part in (of_heads[:, : sizes.heads], of_heads[:, sizes.heads : -sizes.kv_heads]):
                x = part.requires_grad_()
                elementwise.RMSNorm.apply(x, _leaf(sizes.dim, dtype=dtype), 1e-6).sum().backward()
    elementwise.SwiGLU.apply(_leaf(2, 2 * sizes.inner, dtype=dtype), SWIGLU["silu"]).sum().backward()
    qkv, table = _leaf(2, heads * sizes.dim, dtype=dtype), torch.ones(2, sizes.dim // 2)
    elementwise.RotateHeads.apply(qkv * 1, table, table, sizes.heads + sizes.kv_heads).sum().backward()


def launch_logits(sizes: Sizes, dtype: torch.dtype) -> None:
    """Launch the kernels of log-probabilities, of their gradients, and of top-p."""
    from realrl.model.gpu import logits, nucleus

    chunk, sums = torch.zeros(2, sizes.vocabulary), torch.zeros(2)
    logits.compute_logit_sums(chunk, 1.0, sums, sums.clone())
    logits.compute_logit_sums(chunk, 1.0, sums, None)
    for cap in (0.0, 30.0):
        logits.bound_logits(chunk, cap)
        gradient = torch.empty_like(chunk, dtype=dtype)
        logits.compute_softmax_gradient(chunk, sums, sums, 1.0, cap, gradient)
    nucleus.launch_top_p(chunk, 0.9, torch.empty_like(chunk))


def launch_attention(sizes: Sizes, dtype: torch.dtype, widths: Iterable[tuple[int, int]]) -> None:
    """Launch the attention of decode steps and of exact runs, for block tables of these widths."""
    from realrl.model.gpu import exact, paged_attention

    rows, numbers = 3, torch.zeros(3, dtype=torch.int64)
    pools = torch.zeros(2, 2, sizes.kv_heads, 16, sizes.dim, dtype=dtype)
    qkv = torch.zeros(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.dim, dtype=dtype)
    rule = (sizes.window, sizes.cap, torch.zeros(sizes.heads, dtype=dtype) if sizes.sinks else None)
    for prompt_width, own_width in widths:
        tables = [torch.zeros(rows, width, dtype=torch.int64) for width in (prompt_width, own_width)]
        cache = (*pools, tables[0], numbers, tables[1], numbers)
        paged_attention.launch_attention(qkv, *cache, sizes.heads, *rule)
        paged_attention.launch_attention(qkv, *cache, sizes.heads, *rule, ranks=2, index=1)
        out, sums = torch.zeros(rows, sizes.heads * sizes.dim, dtype=dtype), torch.zeros(rows, sizes.heads)
        runs = (*pools, tables[0], numbers, tables[1], numbers, numbers, torch.arange(rows + 1))
        exact.launch_run_attention(qkv, *runs, sizes.heads, *rule, 1, 0, out, sums)
        exact.launch_run_attention(qkv, *runs, sizes.heads, *rule, 2, 1, out, sums)


def launch_products(sizes: Sizes, dtype: torch.dtype) -> None:
    """Launch the exact products of a layer."""
    from realrl.model.gpu import exact

    qkv = (sizes.heads + 2 * sizes.kv_heads) * sizes.dim
    shapes = ((qkv, sizes.hidden), (sizes.hidden, sizes.heads * sizes.dim), (2 * sizes.inner, sizes.hidden))
    for columns, depth in (*shapes, (sizes.hidden, sizes.inner)):
        x, weight = torch.zeros(3, depth, dtype=dtype), torch.zeros(columns, depth, dtype=dtype)
        exact.launch_products(x, weight, torch.zeros(3, columns, dtype=dtype))


def launch_gradients(sizes: Sizes) -> None:
    """Launch the weight gradients of a layer's experts, which have a kernel only in bfloat16."""
    from realrl.model.gpu.elementwise import add_biases
    from realrl.model.gpu.grouped_gradient import add_grouped_gradient

    ends = torch.full((2,), 3, dtype=torch.int32)
    for columns, depth in ((2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)):
        grad, x = (torch.zeros(3, width, dtype=torch.bfloat16) for width in (columns, depth))
        add_grouped_gradient(grad, x, ends, torch.zeros(2, columns, depth))
        groups, weights = torch.zeros(len(grad), dtype=torch.int64), torch.ones(len(grad))
        add_biases(grad, torch.zeros(2, columns, dtype=grad.dtype), groups, weights)


def _leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def compile_all(
    models: Iterable[str], dtypes: Iterable[str], capabilities: Iterable[int], numbers: Sequence[int]
) -> Compiler:
    """Compile the kernels of models for GPUs. `numbers` are numbers of rows, and widths of block tables."""
    with Compiler() as compiler:
        for capability in capabilities:
            for name in dtypes:
                dtype = getattr(torch, name)
                compiler.target(capability, dtype)
                for model in models:
                    sizes = MODELS[model]
                    launch_elementwise(sizes, dtype, numbers)
                    launch_logits(sizes, dtype)
                    launch_attention(sizes, dtype, product(numbers, numbers))
                    launch_products(sizes, dtype)
                    launch_gradients(sizes)
    return compiler


def report(compiler: Compiler) -> list[str]:
    """Print a line for each kernel and GPU, and return the problems."""
    groups: dict[tuple[str, int, str], list[Compiled]] = {}
    for made in compiler.found.values():
        groups.setdefault((made.kernel, made.capability, made.dtype), []).append(made)
    print(f"{'kernel':34} GPU    type      variants  seconds  registers  spilled   shared")
    for (kernel, capability, dtype), made in sorted(groups.items()):
        most = [max(getattr(one, name) for one in made) for name in ("registers", "spilled", "shared")]
        seconds = sum(one.seconds for one in made)
        print(
            f"{kernel:34} sm_{capability:<3} {dtype:9} {len(made):8} {seconds:8.1f} {most[0]:10} {most[1]:8}"
            f" {most[2]:8}"
        )
    missing = list_kernels() - {made.kernel for made in compiler.found.values()}
    return [
        *(f"does not compile: {failure}" for failure in sorted(compiler.failures)),
        *(f"{name} is launched in model/gpu/ and not compiled here" for name in sorted(missing)),
        *(problem for made in compiler.found.values() for problem in made.problems()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capabilities", default="80,90,100")
    parser.add_argument("--models", default="all", help=f"small, all, or some of {', '.join(MODELS)}")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--cache", type=Path, help="folder to fill; without it nothing is kept")
    options = parser.parse_args()
    small = options.models == "small"
    models = {"small": SMALL, "all": tuple(MODELS)}.get(options.models) or options.models.split(",")
    # Triton compiles different variants for numbers that are 1, multiples of 16, or neither.
    numbers = (5,) if small else (1, 5, 16)
    capabilities = [int(text) for text in options.capabilities.split(",")]
    with tempfile.TemporaryDirectory(prefix="compile-kernels-") as scratch:
        os.environ["TRITON_CACHE_DIR"] = str((options.cache or Path(scratch)).resolve())
        problems = report(compile_all(models, options.dtypes.split(","), capabilities, numbers))
    print(f"\ntorch {torch.__version__}, Triton {triton.__version__}")
    print("\n".join(problems) or "every kernel compiles and fits; in bfloat16 none spills")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
