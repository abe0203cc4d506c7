"""Matrix products, linear layers and embeddings; gradients of weights are added to float32 gradients directly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.layout.limits import ADDED_ELEMENTS
from realrl.model.arithmetic.autograd import apply_function
from realrl.model.cpu.products import Panels, multiply_rows
from realrl.model.gpu.path import load_kernels, on_gpu

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function (x [N, K], weight [M, K], bias [M] or None) -> x @ weight.T + bias [N, M]."""


@dataclass(frozen=True)
class Products:
    """How matrices are multiplied on a CPU: by one of torch's libraries or our own kernel. On a GPU, only the field
    `exact` matters."""

    onednn: bool = False
    """Multiply float32 matrices with oneDNN, not with torch's default (MKL on x86)."""
    bfloat16: bool = False
    """Round the operands of float32 products to bfloat16; sums stay float32. Attention is not affected."""
    packed: bool = False
    """Pack weights in generate calls, because decode steps multiply few rows."""
    exact: bool = False
    """In forward passes, make each row's products and attention depend only on the row and the weights, bit for
    bit. Backward passes are not affected."""

    def forward_nt(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x @ weight.T as in a forward pass, without gradient. x: [N, K], weight: [M, K] -> [N, M]"""
        return self._multiply_exactly(x, weight, x.dtype) if self.exact else self.matmul_nt(x, weight)

    def _multiply_exactly(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if on_gpu(x):
            out = x.new_empty(len(x), len(weight), dtype=dtype)
            load_kernels().exact.launch_products(x.contiguous(), weight.contiguous(), out)
            return out
        return self.multiply_packed(x, self.pack(weight)).to(dtype)

    @property
    def packs(self) -> bool:
        """Whether decode steps on a CPU use packed weights. Exact products use them, because the kernel for packed
        weights is the exact one."""
        return self.packed or self.exact

    def pack(self, weight: Tensor) -> Panels:
        return Panels.of(weight.bfloat16() if self.bfloat16 else weight)

    def multiply_packed(self, x: Tensor, panels: Panels) -> Tensor:
        """Compute x @ weight.T as in a forward pass, without gradient. x: [N, K] -> [N, M] float32"""
        return multiply_rows(x.bfloat16() if self.bfloat16 else x, panels)

    def matmul_nt(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x @ weight.T without gradient; "nt" as in BLAS: only the second operand is transposed.

        x: [N, K], weight: [M, K] with any strides -> [N, M]
        """
        if not x.shape[-1]:  # this TP rank has no row of the vocabulary; oneDNN does not support K = 0
            return x.new_zeros(len(x), len(weight))
        if on_gpu(x) or x.dtype != torch.float32:
            return F.linear(x, weight)
        if self.bfloat16:
            with _rounding():
                return F.linear(x, weight)
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return F.linear(x, weight)

    def prepare(self, weight: Tensor) -> Tensor | Panels:
        """Prepare a weight for many calls of `matmul_nt_float32`. [M, K]"""
        return self.pack(weight) if self.exact and not on_gpu(weight) else weight

    def matmul_nt_float32(self, x: Tensor, weight: Tensor | Panels) -> Tensor:
        """Compute x @ weight.T in float32 as in a forward pass, without gradient. [N, K], [M, K] -> [N, M]

        For bfloat16 operands, a GPU returns the float32 sums; on a CPU, the sums are rounded to bfloat16 first.
        """
        if isinstance(weight, Panels):
            return self.multiply_packed(x, weight)
        if self.exact:
            return self._multiply_exactly(x, weight, torch.float32)
        if on_gpu(x) and x.shape[-1]:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return self.matmul_nt(x, weight).float()

    def add_weight_gradient(self, grad_out: Tensor, x: Tensor, into: Tensor) -> None:
        """Add grad_out.T @ x, the gradient of the weight of `matmul_nt`, to a float32 gradient.

        grad_out: [N, M], x: [N, K], into: [M, K] float32, contiguous
        """
        if on_gpu(x):
            # The product accumulates in float32: one kernel instead of a product, a cast and an addition.
            torch.addmm(into, grad_out.T, x, out_dtype=torch.float32, out=into)
        elif x.dtype == torch.float32 and self.bfloat16:
            with _rounding():
                torch.addmm(into, grad_out.T, x, out=into)
        elif x.dtype == torch.float32 and not self.onednn:
            torch.addmm(into, grad_out.T, x, out=into)
        else:
            # Compute some rows at a time, so that there is never a second gradient of the whole matrix.
            rows = max(1, ADDED_ELEMENTS // max(1, into.shape[1]))
            for start in range(0, len(into), rows):
                part = slice(start, start + rows)
                into[part] += self.matmul_nt(grad_out[:, part].T, x.T)


PLAIN = Products()


@contextmanager
def _rounding() -> Iterator[None]:
    """Make torch round the operands of float32 products on a CPU to bfloat16.

    It is used only around single products. If it were set for the whole process, attention on a CPU would be
    several times slower and less accurate.
    """
    # torch.backends.mkldnn.matmul calls the same function after some checks.
    set_precision = torch._C._set_fp32_precision_setter
    set_precision("mkldnn", "matmul", "bf16")
    try:
        yield
    finally:
        set_precision("mkldnn", "matmul", "none")


def find_gradient(weight: Tensor) -> Tensor:
    """Return a parameter's float32 gradient. It is created as zeros if the parameter has none yet.

    Our backward passes add to this tensor directly, and return no gradient. Otherwise, autograd would add the
    gradient in another pass over memory. Hooks on the parameter's `AccumulateGrad` node run when the gradient is
    complete (`torch.autograd.graph.get_gradient_edge`).
    """
    assert weight.is_leaf, "gradients are added to those of parameters"
    if weight.grad is None:
        if weight.dtype != torch.float32:
            weight.grad_dtype = torch.float32
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return weight.grad


class LeftOut:
    """Gradients of weights that backward passes leave out, to be computed later. Zero-bubble pipelines do so (arXiv
    2401.10241). Each gradient keeps the input and the gradient of the output of its matrix."""

    _active: "LeftOut | None" = None
    """Where backward passes leave gradients of weights now; None if they compute them. Autograd's own threads must
    see it, so it does not belong to a thread."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Let backward passes inside this context leave out the gradients of weights."""
        assert LeftOut._active is None, "a backward pass leaves out gradients in one place"
        LeftOut._active = self
        try:
            yield
        finally:
            LeftOut._active = None

    @torch.no_grad()
    def compute(self) -> None:
        """Compute all these gradients."""
        self._work.reverse()
        while self._work:
            self._work.pop()()

    @classmethod
    def compute_or_add(cls, work: Callable[[], None]) -> None:
        """Compute a gradient of a weight, or what follows it, now or later. The order stays the same."""
        if cls._active is None:
            work()
        else:
            cls._active._work.append(work)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        if on_gpu(x) and not products.exact:
            return F.linear(x, weight, bias)
        out = products.forward_nt(x, weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        if need_weight:
            add, into = ctx.products.add_weight_gradient, find_gradient(weight)
            LeftOut.compute_or_add(lambda: add(grad, x, into))
        grad_x = ctx.products.matmul_nt(grad, weight.T.to(grad.dtype)) if need_x else None
        return grad_x, None, grad.sum(0, dtype=torch.float32) if need_bias else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, products: Products = PLAIN) -> Tensor:
    """Compute x @ weight.T and add the bias, if any. x: [N, K], weight: [M, K], bias: [M] -> [N, M]

    `weight` is a parameter or needs no gradient; its gradient is added to `weight.grad` (see `find_gradient`).
    """
    return apply_function(_Linear, x, weight, bias, products)


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, table)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        tokens, table = ctx.saved_tensors
        # Add only to the rows of tokens that occur; autograd would make and add a gradient of the whole table.
        find_gradient(table).index_add_(0, tokens, grad.float())
        return None, None


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Look up rows of a table. tokens: [T] int64, table: [V, H], a parameter or a tensor without gradient. ->
    [T, H]"""
    return apply_function(_Embed, tokens, table)
