import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.algorithms.clipped_policy_loss import compute_policy_loss
from realrl.algorithms.kl import approximate_kl
from realrl.algorithms.ppo_loss import value_loss

number = st.floats(-3, 3, width=32)
triples = st.lists(st.tuples(number, number, number), min_size=1, max_size=12)


def columns(rows: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    return a, b, c


@settings(deadline=None, max_examples=60)
@given(triples, st.sampled_from([0.1, 0.2, 0.5]))
def test_policy_loss_is_the_clipped_surrogate(rows: list[tuple[float, float, float]], clip: float) -> None:
    new, old, advantages = columns(rows)
    result = compute_policy_loss(log_ratio=new - old, advantages=advantages, clip_low=clip, clip_high=clip)
    for i, (n, o, a) in enumerate(rows):
        ratio = math.exp(n - o)
        surrogate = min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
        assert result.loss[i].item() == pytest.approx(-surrogate, abs=1e-9)
        assert result.ratio[i].item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(1.0, 1.0, True), (1.0, -1.0, False), (-1.0, -1.0, True), (-1.0, 1.0, False), (0.05, 1.0, False)],
)
def test_gradient_stops_exactly_where_clipping_decides(
    log_ratio: float, advantage: float, clipped: bool
) -> None:
    new = torch.tensor([log_ratio], requires_grad=True)
    result = compute_policy_loss(
        log_ratio=new, advantages=torch.tensor([advantage]), clip_low=0.2, clip_high=0.2
    )
    result.loss.sum().backward()
    assert result.clipped.tolist() == [clipped]
    assert (new.grad.item() == 0) is clipped


def test_a_huge_ratio_does_not_poison_the_gradient() -> None:
    new = torch.tensor([200.0, -0.5], requires_grad=True)
    result = compute_policy_loss(log_ratio=new, advantages=torch.ones(2), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert new.grad.isfinite().all()


@settings(deadline=None, max_examples=60)
@given(triples, st.sampled_from([None, 0.1, 0.5]))
def test_value_loss_is_the_larger_of_plain_and_clipped(
    rows: list[tuple[float, float, float]], clip: float | None
) -> None:
    values, old, returns = columns(rows)
    result = value_loss(values=values, old_values=old, returns=returns, clip=clip)
    for i, (v, o, r) in enumerate(rows):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        assert result.loss[i].item() == pytest.approx(0.5 * max((v - r) ** 2, (near - r) ** 2), abs=1e-9)
        assert result.clipped[i].item() is ((near - r) ** 2 > (v - r) ** 2)


def test_approximate_kl_is_unbiased() -> None:
    old = torch.log_softmax(torch.randn(5, generator=torch.Generator().manual_seed(0)).double(), 0)
    new = torch.log_softmax(torch.randn(5, generator=torch.Generator().manual_seed(1)).double(), 0)
    estimates = approximate_kl(logprobs=new, old_logprobs=old)
    assert (estimates >= 0).all()
    exact = sum(math.exp(o) * (o - n) for o, n in zip(old.tolist(), new.tolist(), strict=True))
    assert (old.exp() * estimates).sum().item() == pytest.approx(exact)
