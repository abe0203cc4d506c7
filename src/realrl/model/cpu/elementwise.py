"""Norm, activation, rotary embedding and soft cap of logits on a CPU, forward and backward."""

import numpy as np

from realrl.model.cpu.arithmetic import (
    bound_above,
    bound_both,
    gelu_slope,
    gelu_tanh_slope,
    normal_cdf,
    sigmoid,
    silu_slope,
    soft_bound,
    tanh_share,
)
from realrl.model.cpu.rows import Work, claim, number, number_of_claim, row, row_kernel


@row_kernel(outputs=1)
def bound_rows(work: Work) -> None:
    """Compute bound * tanh(x / bound): x [N, V], bound -> out [N, V], which may be x."""
    bound = number(work, 1)
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, out = row(work, 0, i), row(work, 2, i)
            for j in range(len(x)):
                out[j] = soft_bound(x[j], bound)
        first, last = claim(work)


ZERO, ONE = np.float32(0.0), np.float32(1.0)


@row_kernel(outputs=2)
def rms_norm_forward(work: Work) -> None:
    """Normalize rows: x [N, H], weight [H], eps -> out [N, H], scales [N, 1]."""
    eps = number(work, 2)
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, weight, out = row(work, 0, i), row(work, 1, i), row(work, 3, i)
            squares = np.float32(0.0)
            for j in range(len(x)):
                squares += x[j] * x[j]
            scale = ONE / np.sqrt(squares / np.float32(len(x)) + eps)
            row(work, 4, i)[0] = scale
            for j in range(len(x)):
                out[j] = x[j] * scale * weight[j]
        first, last = claim(work)


@row_kernel(outputs=3)
def add_rms_norm_forward(work: Work) -> None:
    """Add and normalize: x [N, H], block [N, H], weight [H], eps -> total [N, H], out [N, H], scales [N, 1]."""
    eps = number(work, 3)
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, block, weight = row(work, 0, i), row(work, 1, i), row(work, 2, i)
            total, out = row(work, 4, i), row(work, 5, i)
            squares = np.float32(0.0)
            for j in range(len(x)):  # separate, because a loop that sums must not store (see `FAST_MATH`)
                total[j] = x[j] + block[j]
            for j in range(len(x)):
                squares += total[j] * total[j]
            scale = ONE / np.sqrt(squares / np.float32(len(x)) + eps)
            row(work, 6, i)[0] = scale
            for j in range(len(x)):
                out[j] = total[j] * scale * weight[j]
        first, last = claim(work)


@row_kernel(outputs=2)
def rms_norm_backward(work: Work) -> None:
    """Differentiate: x [N, H], grad [N, H], weight [H], scales [N, 1], added [N, H] or [H] -> grad_x [N, H], weight
    sums [claims, H].

    `added` is another gradient of x. A claim is a range of rows that one thread takes. Each claim has its own
    weight sums, which must be zero before the call. Their total is the weight's gradient, so the result does not
    depend on which thread takes which rows.
    """
    first, last = claim(work)
    while first < last:
        sums = row(work, 6, number_of_claim(work, first))
        for i in range(first, last):
            x, grad, weight = row(work, 0, i), row(work, 1, i), row(work, 2, i)
            added, grad_x = row(work, 4, i), row(work, 5, i)
            scale = row(work, 3, i)[0]
            mean = np.float32(0.0)
            for j in range(len(x)):
                sums[j] += grad[j] * x[j] * scale
            for j in range(len(x)):
                mean += grad[j] * x[j] * weight[j]
            mean = mean * scale * scale / np.float32(len(x))
            for j in range(len(x)):
                grad_x[j] = added[j] + scale * (grad[j] * weight[j] - x[j] * mean)
        first, last = claim(work)


@row_kernel(outputs=1)
def swiglu_forward(work: Work) -> None:
    """Compute a `SwiGLU`: gate_up [N, 2 I], slope, limit, offset -> out [N, I]."""
    slope, limit, offset = number(work, 1), number(work, 2), number(work, 3)
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            gate_up, out = row(work, 0, i), row(work, 4, i)
            width = len(out)
            gate, up = gate_up[:width], gate_up[width:]
            for j in range(width):
                g = bound_above(gate[j], limit)
                out[j] = g * sigmoid(slope * g) * (bound_both(up[j], limit) + offset)
        first, last = claim(work)


@row_kernel(outputs=1)
def swiglu_backward(work: Work) -> None:
    """Differentiate: gate_up [N, 2 I], slope, limit, offset, grad [N, I] -> grad_gate_up [N, 2 I]."""
    slope, limit, offset = number(work, 1), number(work, 2), number(work, 3)
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            gate_up, grad, out = row(work, 0, i), row(work, 4, i), row(work, 5, i)
            width = len(grad)
            gate, up = gate_up[:width], gate_up[width:]
            grad_gate, grad_up = out[:width], out[width:]
            for j in range(width):
                g, u = bound_above(gate[j], limit), bound_both(up[j], limit)
                share = sigmoid(slope * g)
                slope_of_gate = share * (ONE + slope * g * (ONE - share))
                # Comparisons with NaN are false, so NaN stays NaN.
                grad_up[j] = ZERO if abs(up[j]) > limit else grad[j] * g * share
                grad_gate[j] = ZERO if gate[j] > limit else grad[j] * (u + offset) * slope_of_gate
        first, last = claim(work)


SILU, GELU, GELU_TANH = range(3)
"""Numbers that stand for the activations in kernels."""


@row_kernel(outputs=1)
def activate_forward(work: Work) -> None:
    """Compute an activation: x [N, I], number of the activation -> out [N, I].

    If x is [N, 2 I], the result is the activation of each row's first half times its second half.
    """
    kind = int(number(work, 1))
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, out = row(work, 0, i), row(work, 2, i)
            width = len(out)
            if kind == SILU:
                for j in range(width):
                    out[j] = x[j] * sigmoid(x[j])
            elif kind == GELU:
                for j in range(width):
                    out[j] = x[j] * normal_cdf(x[j])
            else:
                for j in range(width):
                    out[j] = x[j] * tanh_share(x[j])
            if len(x) > width:
                up = x[width:]
                for j in range(width):
                    out[j] *= up[j]
        first, last = claim(work)


@row_kernel(outputs=1)
def activate_backward(work: Work) -> None:
    """Differentiate `activate_forward`: x [N, I] or [N, 2 I], number of the activation, grad [N, I] -> grad_x, as
    wide as x."""
    kind = int(number(work, 1))
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, grad, out = row(work, 0, i), row(work, 2, i), row(work, 3, i)
            width = len(grad)
            if kind == SILU:
                for j in range(width):
                    out[j] = grad[j] * silu_slope(x[j])
            elif kind == GELU:
                for j in range(width):
                    out[j] = grad[j] * gelu_slope(x[j])
            else:
                for j in range(width):
                    out[j] = grad[j] * gelu_tanh_slope(x[j])
            if len(x) > width:
                up, grad_up = x[width:], out[width:]
                for j in range(width):
                    out[j] *= up[j]
                if kind == SILU:
                    for j in range(width):
                        grad_up[j] = grad[j] * x[j] * sigmoid(x[j])
                elif kind == GELU:
                    for j in range(width):
                        grad_up[j] = grad[j] * x[j] * normal_cdf(x[j])
                else:
                    for j in range(width):
                        grad_up[j] = grad[j] * x[j] * tanh_share(x[j])
        first, last = claim(work)


@row_kernel(outputs=1)
def rotate(work: Work) -> None:
    """Rotate the first `heads` heads of each row: x [T, at least heads * D], cos, sin [T, D / 2], heads, sign ->
    out, which may be x.

    The sign is 1, or -1 for the inverse rotation.
    """
    heads, sign = int(number(work, 3)), number(work, 4)
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, cos, sin, out = row(work, 0, i), row(work, 1, i), row(work, 2, i), row(work, 5, i)
            half = len(cos)
            for head in range(heads):
                start = 2 * half * head
                a, b = x[start : start + half], x[start + half : start + 2 * half]
                out_a, out_b = out[start : start + half], out[start + half : start + 2 * half]
                for j in range(half):
                    s = sin[j] * sign
                    low, high = a[j], b[j]
                    out_a[j] = low * cos[j] - high * s
                    out_b[j] = high * cos[j] + low * s
            for j in range(2 * half * heads, len(x)):
                out[j] = x[j]
        first, last = claim(work)
