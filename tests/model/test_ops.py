"""Gradients written by hand are those autograd derives."""

import pytest
import torch
from torch import Tensor

from realrl.model import ops, rotary


def reference_rotary_emb(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = qkv.view(len(qkv), -1, cos.shape[-1])
    heads = cos.shape[1]
    rotated = x[:, :heads]
    half = rotated.shape[-1] // 2
    swapped_halves = torch.cat((rotated[..., half:], rotated[..., :half]), -1)
    return torch.cat((rotated * cos + swapped_halves * sin, x[:, heads:]), 1).flatten(1)


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * gate.sigmoid() * up


def draws(*sizes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size) for size in sizes]


X, NORM, NARROW, WIDE, GATE_UP, QKV = draws((10, 12), (12,), (5, 12), (40, 12), (10, 14), (10, 5 * 4))
ANGLES = torch.randn(10, 1, 2).expand(-1, 3, -1)
COS = torch.cat((ANGLES.cos(), ANGLES.cos()), -1)
SIN = torch.cat((-ANGLES.sin(), ANGLES.sin()), -1)


# The processor chooses one library; the other must be right, too.
@pytest.mark.parametrize("onednn", [False, torch.backends.mkldnn.is_available()])
@pytest.mark.parametrize(
    ("function", "reference", "inputs"),
    [
        (ops.linear, lambda x, w: x @ w.T, (X, NARROW)),
        (ops.linear, lambda x, w: x @ w.T, (X, WIDE)),
        (lambda x, w: ops.rms_norm(x, w, 1e-3), lambda x, w: reference_norm(x, w, 1e-3), (X, NORM)),
        (ops.swiglu, reference_swiglu, (GATE_UP,)),
        # Rotation works in place, which a leaf that needs a gradient does not allow.
        (
            lambda x: rotary.apply_rotary_emb(x * 1, COS, SIN),
            lambda x: reference_rotary_emb(x, COS, SIN),
            (QKV,),
        ),
    ],
    ids=["linear-narrow", "linear-wide", "rms_norm", "swiglu", "apply_rotary_emb"],
)
def test_operations_match_reference_values_and_gradients(
    function, reference, inputs: tuple[Tensor, ...], onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "ONEDNN", onednn)
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    out, expected = function(*ours), reference(*theirs)
    with torch.no_grad():  # skips autograd's bookkeeping
        torch.testing.assert_close(function(*(x.clone() for x in inputs)), out, rtol=0, atol=0)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, ours, upstream), torch.autograd.grad(expected, theirs, upstream)
    )
