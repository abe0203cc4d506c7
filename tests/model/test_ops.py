"""Gradients written by hand are those autograd derives."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from realrl.model import rotary
from realrl.model.arithmetic import elementwise, ops


def reference_rotary_emb(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = qkv.view(len(qkv), -1, cos.shape[-1] * 2)
    heads = 3
    rotated = x[:, :heads]
    cos, sin = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
    half = rotated.shape[-1] // 2
    swapped_halves = torch.cat((rotated[..., half:], rotated[..., :half]), -1)
    return torch.cat((rotated * cos + swapped_halves * sin, x[:, heads:]), 1).flatten(1)


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * gate.sigmoid() * up


def reference_activation(x: Tensor, activation: str, gated: bool) -> Tensor:
    gate, up = x.chunk(2, -1) if gated else (x, None)
    match activation:
        case "silu":
            out = gate * gate.sigmoid()
        case "gelu":
            out = gate * torch.erfc(-gate / 2**0.5) / 2
        case "gelu_tanh":
            out = gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2
        case "clamped_silu":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
            out = gate * (1.702 * gate).sigmoid()
    return out if up is None else out * up


def draws(*sizes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size) for size in sizes]


X, NORM, NARROW, WIDE, GATE_UP, QKV = draws((10, 12), (12,), (5, 12), (40, 12), (10, 14), (10, 5 * 4))
ANGLES = torch.randn(10, 2)
COS, SIN = ANGLES.cos(), ANGLES.sin()


WAYS = [ops.PLAIN, *([ops.Products(onednn=True)] if torch.backends.mkldnn.is_available() else [])]
"""Libraries that multiply in full precision: a processor chooses one, and the other must be right, too."""


@pytest.mark.parametrize(
    ("function", "reference", "inputs"),
    [
        *(
            (partial(ops.linear, products=products), lambda x, w: x @ w.T, (X, w))
            for w in (NARROW, WIDE)
            for products in WAYS
        ),
        (lambda x, w: elementwise.rms_norm(x, w, 1e-3), lambda x, w: reference_norm(x, w, 1e-3), (X, NORM)),
        (elementwise.swiglu, reference_swiglu, (GATE_UP,)),
        (
            lambda x, b, w: torch.cat(elementwise.add_rms_norm(x, b, w, 1e-3)),
            lambda x, b, w: torch.cat((x + b, reference_norm(x + b, w, 1e-3))),
            (X, X * 0.3, NORM),
        ),
        *(
            (
                partial(elementwise.activate, activation=activation, gated=gated),
                partial(reference_activation, activation=activation, gated=gated),
                (GATE_UP * scale,),
            )
            for activation, gated in (
                *product(("silu", "gelu", "gelu_tanh"), (True, False)),
                ("clamped_silu", True),
            )
            for scale in (1, 30)
        ),
        # Rotation works in place, which a leaf that needs a gradient does not allow.
        (
            lambda x: rotary.apply_rotary_emb(x * 1, COS, SIN, 3),
            lambda x: reference_rotary_emb(x, COS, SIN),
            (QKV,),
        ),
    ],
)
def test_operations_match_reference_values_and_gradients(
    function, reference, inputs: tuple[Tensor, ...]
) -> None:
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    out, expected = function(*ours), reference(*theirs)
    with torch.no_grad():  # skips autograd's bookkeeping
        torch.testing.assert_close(function(*(x.clone() for x in inputs)), out, rtol=0, atol=0)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(expected)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs])


@pytest.mark.parametrize("products", [*WAYS, ops.Products(bfloat16=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_are_added_to_those_of_other_passes_in_float32(
    dtype: torch.dtype, products: ops.Products
) -> None:
    buffer = torch.full((5 * 12,), 3.0)
    weight = torch.nn.Parameter(NARROW.to(dtype))
    weight.grad_dtype = torch.float32
    weight.grad = buffer.view(5, 12)
    x = X.to(dtype)
    for _ in range(2):
        (
            ops.linear(x, weight, products=products) + ops.embed(torch.tensor([1, 4, 1]), weight)[:, :5].sum()
        ).sum().backward()
    sums = x.float().sum(0).expand(5, -1)
    occurrences = torch.tensor([0.0, 2, 0, 0, 1])[:, None] * (torch.arange(12) < 5) * 10 * 5
    assert weight.grad.data_ptr() == buffer.data_ptr()
    tolerance = {"rtol": 2**-8, "atol": 2**-6} if dtype == torch.bfloat16 or products.bfloat16 else {}
    torch.testing.assert_close(buffer.view(5, 12), 3 + 2 * (sums + occurrences), **tolerance)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x = X.clone().requires_grad_()
    ops.linear(x, NARROW).sum().backward()
    assert NARROW.grad is None and x.grad is not None


def test_hooks_of_a_parameter_run_once_all_its_uses_have_added_their_gradients() -> None:
    table = torch.nn.Parameter(NARROW.clone())
    node, seen = get_gradient_edge(table).node, []
    node.register_hook(lambda *_: seen.append(table.grad.clone()))
    for _ in range(2):
        ops.linear(ops.embed(torch.tensor([0, 3]), table), table).sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], table.grad)
    torch.testing.assert_close(seen[1], 2 * seen[0])


def test_rounded_products_are_exact_products_of_rounded_operands() -> None:
    """On processors without instructions for it, torch may leave operands as they are."""
    x, weight = torch.randn(64, 96), torch.randn(80, 96)
    out = ops.Products(bfloat16=True).matmul_nt(x, weight)
    rounded = x.bfloat16().double() @ weight.bfloat16().double().T
    near = [
        torch.allclose(out.double(), of, rtol=1e-5, atol=1e-4)
        for of in (rounded, x.double() @ weight.double().T)
    ]
    assert any(near)


def test_precision_of_other_products_is_left_alone() -> None:
    x = torch.randn(64, 96)
    before = x @ x.T
    ops.Products(bfloat16=True).matmul_nt(x, x)
    with pytest.raises(RuntimeError):
        ops.Products(bfloat16=True).matmul_nt(x, torch.randn(3, 5))
    torch.testing.assert_close(x @ x.T, before, rtol=0, atol=0)
