"""Gradients and biases of experts on a GPU: the kernels in Triton's interpreter."""

import pytest
import torch

from realrl.model.arithmetic.grouped import Groups, add_biases, grouped_linear
from realrl.model.arithmetic.ops import PLAIN
from realrl.model.gpu.grouped_gradient import add_grouped_gradient


@pytest.mark.parametrize(
    "rows", [(0, 5, 70, 0, 64), (3, 0, 0), (0, 0), (130, 1)], ids=lambda rows: "-".join(map(str, rows))
)
@pytest.mark.parametrize(("height", "width"), [(136, 24), (144, 208)])
def test_gradients_are_those_of_float64_and_of_groups_without_rows_stay(
    rows: tuple[int, ...], height: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(height)
    grad, x = (torch.randn(sum(rows), n, generator=generator).bfloat16() for n in (height, width))
    before = torch.randn(len(rows), height, width, generator=generator)
    ends = torch.tensor(rows).cumsum(0).int()
    into = before.clone()
    add_grouped_gradient(grad, x, ends, into)
    for group, (g, a) in enumerate(zip(grad.split(rows), x.split(rows), strict=True)):
        expected = before[group].double() + g.double().T @ a.double()
        torch.testing.assert_close(into[group].double(), expected, rtol=1e-6, atol=2e-5)
        assert len(g) or torch.equal(into[group], before[group])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 1500])
def test_biases_of_groups_match_the_cpu(width: int, dtype: torch.dtype, gpu_path: None) -> None:
    generator = torch.Generator().manual_seed(4)
    experts = torch.randint(0, 3, (20, 2), generator=generator)  # none has the last
    groups = Groups.of(experts, 4)
    rows, biases = (torch.randn(n, width, generator=generator).to(dtype) for n in (40, 4))
    weights, factors = torch.rand(40, generator=generator), torch.randn(40, width, generator=generator)
    parameter = torch.nn.Parameter(biases.flatten())
    given = weights.clone().requires_grad_()
    out = add_biases(rows.clone(), parameter, given, groups, PLAIN)
    out.backward(factors.to(dtype))
    chosen = experts.flatten()[groups.order]
    wide = [x.double().requires_grad_() for x in (biases, weights)]
    expected = rows.double() + wide[0][chosen] * wide[1][:, None]
    expected.backward(factors.to(dtype).double())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    found = (out, parameter.grad.view(4, width), given.grad)
    for ours, reference in zip(found, (expected, *(x.grad for x in wide)), strict=True):
        scale = reference.abs().max().item()
        torch.testing.assert_close(ours.double(), reference, rtol=0, atol=tolerance * max(1, scale))


def test_small_gradients_of_many_micro_batches_are_not_rounded_away(gpu_path: None) -> None:
    """Beside products of float32, gradients that were rounded to bfloat16 would be off by some 2^-9 each."""
    generator = torch.Generator().manual_seed(3)
    stack = torch.nn.Parameter(torch.randn(4 * 16, 24, generator=generator).bfloat16())
    stack.grad_dtype = torch.float32
    stack.grad = torch.zeros(4 * 16, 24)
    expected = torch.zeros(4, 16, 24, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(20, 24, generator=generator).bfloat16()
        experts = torch.randint(0, 3, (20, 1), generator=generator)  # none has the last
        groups = Groups.of(experts, 4)
        factors = torch.randn(20, 16, generator=generator).bfloat16()
        grouped_linear(x, stack, groups, PLAIN, of_tokens=True).backward(factors)
        for row, (token, factor) in enumerate(zip(groups.gather(x), factors, strict=True)):
            group = int((groups.ends <= row).sum())
            expected[group] += factor.double()[:, None] * token.double()
    torch.testing.assert_close(stack.grad.double().view(4, 16, 24), expected, rtol=1e-5, atol=1e-5)
