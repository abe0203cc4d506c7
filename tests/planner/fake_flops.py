"""Arithmetic that the engine executes, counted by torch, on a GPU that is not there and on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from realrl.model.arithmetic import ops
from realrl.model.attention import load_packed_attention
from realrl.model.cpu.products import Panels
from realrl.model.gpu.path import load_kernels
from realrl.plan.placement import Placement
from realrl.program.memory import StoredModel
from tests.gpu_branches.fake_gpu import fake_gpu
from tests.planner.lone_rank import LoneRank, Sequences, nobody_else


def _multiply(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """2 for each number of a and column of b. a: [N, K]; b: [K, M], or of experts [E, K, M]"""
    return 2 * a[0] * a[1] * b[-1]


def _add_product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    return _multiply(a, b)


def _add_gradients(grad: Any, x: Any, *_: Any, **__: Any) -> int:
    return 2 * grad[0] * grad[1] * x[1]


def _attend(q: Any, k: Any, v: Any, starts: Any, k_starts: Any, longest: int, *_: Any, **__: Any) -> int:
    """Two products of half of the scores of sequences of one length. q: [T, heads, D]"""
    tokens, heads, dim = q
    return 2 * tokens * longest * heads * dim


def _attend_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    sums: Any,
    starts: Any,
    k_starts: Any,
    longest: int,
    *_: Any,
    **__: Any,
) -> int:
    """Five: scores once more, and the gradients of values, weights, queries and keys."""
    return 5 * _attend(q, k, v, starts, k_starts, longest) // 2


def count_on_a_gpu(
    kind: str, model: StoredModel, placement: Placement, stage: int, lengths: tuple[int, ...]
) -> int:
    """Operations of a train or inference call on the first TP rank of a stage; in a process of its own.

    Sequences are of one length. Elementwise operations are not counted.
    """
    load_packed_attention()
    load_kernels()
    packed = torch.ops.torch_attn
    formulas: dict[Any, Any] = {
        torch.ops.aten.mm: _multiply,
        torch.ops.aten.addmm: _add_product,
        torch.ops.aten._grouped_mm: _multiply,
        torch.ops.realrl.add_grouped_gradient: _add_gradients,
        packed._varlen_attn: _attend,
        packed._varlen_attn_backward: _attend_backward,
    }
    with fake_gpu() as gpu:
        lone = LoneRank(model, placement, placement.rank(dp=0, pp=stage), gpu.device)
        with nobody_else(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            run = lone.train if kind == "train" else lone.infer
            run(Sequences.of(lengths, model))
    return counter.get_total_flops()


class PackedProducts:
    """Operations of products with weights that a generate call on a CPU has packed."""

    flops = 0


@contextmanager
def count_packed_products() -> Iterator[PackedProducts]:
    """Count the operations of the CPU's own kernel, which torch does not see."""
    found, multiply = PackedProducts(), ops.multiply_rows

    def counted(x: torch.Tensor, panels: Panels) -> torch.Tensor:
        out = multiply(x, panels)
        found.flops += 2 * x.shape[0] * x.shape[1] * out.shape[1]
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "multiply_rows", counted)
        yield found
