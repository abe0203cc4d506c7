"""What is recomputed gives the same values and gradients, and is computed twice."""

import torch
from torch import Tensor

from realrl.model.arithmetic.autograd import checkpoint_activations


def test_gradients_reach_the_input_and_the_parameters_that_are_used() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, -1.0, 0.5]))
    source = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    graphs: list[bool] = []

    def run(x: Tensor) -> Tensor:
        graphs.append(torch.is_grad_enabled())
        return (x * weight).square()

    found = []
    for compute in (run, lambda x: checkpoint_activations(run, x)):
        (compute(2 * source).sum() * 5).backward()
        found.append((source.grad, weight.grad))
        source.grad = weight.grad = None
    (expected_source, expected_weight), (got_source, got_weight) = found
    assert torch.equal(got_source, expected_source) and torch.equal(got_weight, expected_weight)
    assert graphs == [True, False, True]


def test_gradients_are_added_to_those_that_are_there() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, -1.0]))
    flat = torch.ones(2)
    weight.grad = flat
    checkpoint_activations(
        lambda x: x * weight, torch.tensor([5.0, 7.0], requires_grad=True)
    ).sum().backward()
    assert weight.grad is flat and torch.equal(flat, torch.tensor([6.0, 8.0]))
