"""Compiled kernels keep what is not finite, and do not depend on threads, strides or places in memory."""

from collections.abc import Iterator
from math import prod
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from realrl.families.shape import SWIGLU
from realrl.model.arithmetic.elementwise import add_rms_norm, rms_norm, swiglu
from realrl.model.cpu.arithmetic import exp
from realrl.model.cpu.elementwise import (
    add_rms_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
    rotate,
    swiglu_backward,
    swiglu_forward,
)
from realrl.model.cpu.rows import claim, number, row, row_kernel


@row_kernel(outputs=1)
def exponentials(work):
    """x [N, W] -> out [N, W]"""
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, out = row(work, 0, i), row(work, 1, i)
            for j in range(len(x)):
                out[j] = exp(x[j])
        first, last = claim(work)


@pytest.fixture
def set_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_exponentials_match_torch_at_all_magnitudes() -> None:
    x = torch.linspace(-87, 88, 100_000).view(10, -1)
    out = torch.empty_like(x)
    exponentials(len(x), x, out)
    torch.testing.assert_close(out, x.double().exp().float(), rtol=5e-7, atol=0)


def test_exponentials_of_what_is_not_finite() -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 200.0, -200.0, 0.0]])
    out = torch.empty_like(x)
    exponentials(1, x, out)
    assert out[0, 0].isnan() and out[0, 1].isinf() and out[0, 3].isinf()
    assert (out[0, [2, 4]] < 1e-37).all() and out[0, 5] == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = torch.randn(8, 64)
    x[3, 5] = value
    for numbers in SWIGLU.values():
        # A bound makes infinity finite, but not NaN.
        assert not swiglu(x, numbers)[3].isfinite().all() or numbers.limit < value
    normed = rms_norm(x, torch.ones(64), 1e-6)
    assert normed[3, 5].isnan() and normed[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


def run_all(x: Tensor) -> list[Tensor]:
    """Values and gradients of the kernels. x: [N, 256]"""
    x = x.clone().requires_grad_()
    weight = torch.linspace(0.5, 2, 256, requires_grad=True)
    total, normed = add_rms_norm(x, x.sin(), weight, 1e-6)
    out = swiglu(rms_norm(normed, weight, 1e-6) + total)
    return [out, *torch.autograd.grad(out.square().sum(), (x, weight))]


@pytest.mark.usefixtures("set_threads")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(1000, 256)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run_all(x))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_rows_may_lie_apart_and_gradients_be_expanded() -> None:
    wide = torch.randn(6, 40)
    torch.testing.assert_close(swiglu(wide[:, 8:24]), swiglu(wide[:, 8:24].contiguous()), rtol=0, atol=0)
    x = torch.randn(6, 40, requires_grad=True)
    (grad,) = torch.autograd.grad(swiglu(x).sum(), x)  # the gradient of a sum is one number in memory
    (expected,) = torch.autograd.grad(swiglu(x), x, torch.ones(6, 20))
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


def test_no_rows_are_no_error() -> None:
    assert swiglu(torch.empty(0, 8)).shape == (0, 4)


def test_bfloat16_is_computed_in_float32() -> None:
    x, weight = torch.randn(3000, 48).bfloat16(), torch.linspace(0.5, 2, 48)
    torch.testing.assert_close(swiglu(x), swiglu(x.float()).bfloat16(), rtol=0, atol=0)
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [x.to(dtype).requires_grad_(), weight.clone().requires_grad_()]
        normed = rms_norm(*inputs, 1e-6)
        gradients.append(torch.autograd.grad(normed, inputs, x.flip(0).to(dtype)))
    torch.testing.assert_close(gradients[0][0], gradients[1][0].bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-4, atol=1e-4)


KERNELS = {
    # Arguments: sizes of tensors in the order of the kernel, and numbers; the last ones are outputs.
    "norm": (rms_norm_forward, [(3, 40), (40,), 1e-6], [(3, 40), (3, 1)]),
    "add and norm": (add_rms_norm_forward, [(3, 40), (3, 40), (40,), 1e-6], [(3, 40), (3, 40), (3, 1)]),
    "norm backward": (rms_norm_backward, [(3, 40), (3, 40), (40,), (3, 1), (3, 40)], [(3, 40), (3, 40)]),
    "swiglu": (swiglu_forward, [(3, 80), 1.702, 1.0, 1.0], [(3, 40)]),
    "swiglu backward": (swiglu_backward, [(3, 80), 1.702, 1.0, 1.0, (3, 40)], [(3, 80)]),
    "rotate": (rotate, [(3, 48), (3, 4), (3, 4), 4, 1], [(3, 48)]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_results_do_not_depend_on_where_tensors_lie(name: str) -> None:
    kernel, inputs, outputs = KERNELS[name]
    random = Random(1)
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(size, generator=generator) if isinstance(size, tuple) else size for size in inputs]
    found = set()
    for _ in range(150):
        # One after the other, in any order, and at any distance.
        sizes = [size for size in (*inputs, *outputs) if isinstance(size, tuple)]
        order = random.sample(range(len(sizes)), len(sizes))
        pool, places, end = torch.zeros(2000), {}, random.randrange(20)
        for i in order:
            places[i] = pool[end : end + prod(sizes[i])].view(sizes[i])
            end += prod(sizes[i]) + random.choice([0, 0, 1, 3, 8, 16, 40])
        tensors = iter(places[i] for i in range(len(sizes)))
        arguments = [next(tensors).copy_(x) if isinstance(x, Tensor) else x for x in given]
        results = list(tensors)
        kernel(3, *arguments, *results, claim=3)
        found.add(tuple(result.numpy().tobytes() for result in results))
    assert len(found) == 1


@row_kernel(outputs=1)
def fails(work):
    """x [N, W], elements to allocate -> out [N, W]"""
    first, last = claim(work)
    while first < last:
        scratch = np.empty(int(number(work, 1)), np.float32)
        for i in range(first, last):
            row(work, 2, i)[0] = scratch[0] * 0
        first, last = claim(work)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_without_memory_stops_instead_of_leaving_its_output_as_it_is(
    threads: int, set_threads: None
) -> None:
    torch.set_num_threads(threads)
    x = torch.ones(40, 3)
    fails(len(x), x, 10.0, torch.empty_like(x), claim=1)
    with pytest.raises(MemoryError, match="scratch memory"):
        fails(len(x), x, 2.0**50, torch.empty_like(x), claim=1)
