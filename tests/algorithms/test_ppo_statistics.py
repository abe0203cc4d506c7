import math
import random

import pytest
import torch
from ppo_reference import alone, mean_and_std, on_ranks

from realrl.algorithms.clipped_policy_loss import global_moments, whiten
from realrl.algorithms.kl import KLController, token_kl
from realrl.algorithms.policy import KLConfig
from realrl.algorithms.ppo_experience import ReturnScale


def numbers(seed: int, count: int, *, shift: float = 3.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(shift, 2.0) for _ in range(count)]


@pytest.mark.parametrize(("kl", "error"), [(6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (6.0, 0.0), (-5.0, -0.2)])
def test_adaptive_coefficient_follows_the_clipped_relative_error(kl: float, error: float) -> None:
    controller = KLController(KLConfig(coef=0.5, adaptive=True, target=6.0, horizon=1000))
    controller.update(kl=kl, sequences=64)
    assert controller.coef == pytest.approx(0.5 * (1 + error * 64 / 1000))


@pytest.mark.parametrize("split", [(9, 0), (4, 5), (1, 8)])
def test_whitening_uses_the_moments_of_all_ranks(split: tuple[int, int]) -> None:
    values = torch.tensor(numbers(0, 9))
    mean, std = mean_and_std(values.tolist())
    parts = values.split(split)
    done = torch.cat(on_ranks(2, lambda rank, s: whiten(parts[rank], global_moments(parts[rank], s))))
    assert done.tolist() == pytest.approx([(x - mean) / std for x in values.tolist()], rel=1e-5)


def test_running_scale_is_the_deviation_of_everything_seen() -> None:
    scale, seen = ReturnScale("running", beta=0.5), []
    for step, count in enumerate((5, 11, 2)):
        returns = numbers(step, count, shift=step)
        seen += returns
        scale.update(global_moments(torch.tensor(returns, dtype=torch.float64), alone))
    assert scale.std == pytest.approx(mean_and_std(seen)[1])


def test_exponential_scale_weighs_steps_by_age() -> None:
    scale, steps = ReturnScale("exponential", beta=0.7), [numbers(s, 4 + s, shift=s) for s in range(3)]
    for returns in steps:
        scale.update(global_moments(torch.tensor(returns, dtype=torch.float64), alone))
    weights = [0.7 ** (2 - s) for s in range(3)]

    def average(power: int) -> float:
        means = [sum(x**power for x in step) / len(step) for step in steps]
        return sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)

    assert scale.std == pytest.approx(math.sqrt(average(2) - average(1) ** 2))


@pytest.mark.parametrize("mode", ["none", "running", "exponential"])
def test_scale_is_one_before_any_returns_and_where_none_is_wanted(mode: str) -> None:
    scale = ReturnScale(mode, beta=0.9)
    assert scale.std == 1.0
    scale.update(global_moments(torch.tensor(numbers(1, 6)), alone))
    assert (scale.std == 1.0) is (mode == "none")


def test_equal_returns_do_not_blow_errors_up() -> None:
    scale = ReturnScale("running", beta=0.9)
    scale.update(global_moments(torch.full((4,), 2.0), alone))
    assert scale.std == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_moments_leave_out_what_is_not_finite_on_any_rank(bad: float) -> None:
    good = numbers(2, 8)
    parts = torch.tensor([bad, *good[:3]]), torch.tensor([*good[3:], bad])
    moments = on_ranks(2, lambda rank, dp_sum: global_moments(parts[rank], dp_sum))[0]
    assert moments.count == 8
    assert (moments.mean, moments.std) == pytest.approx(mean_and_std(good), rel=1e-5)


@pytest.mark.parametrize("mode", ["running", "exponential"])
def test_returns_that_are_not_finite_change_no_statistics(mode: str) -> None:
    scale = ReturnScale(mode, beta=0.9)
    scale.update(global_moments(torch.tensor(numbers(3, 6)), alone))
    before = scale.state_dict()
    scale.update(global_moments(torch.tensor([math.nan, math.inf]), alone))
    assert scale.state_dict() == before


def test_kl_of_no_finite_sequence_leaves_the_coefficient_alone() -> None:
    controller = KLController(KLConfig(coef=0.5, adaptive=True))
    moments = global_moments(torch.tensor([math.nan]), alone)
    controller.update(kl=moments.mean, sequences=int(moments.count))
    assert controller.coef == 0.5


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of an actor and of a reference over 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        (2 * torch.randn(12, generator=generator, dtype=torch.float64)).log_softmax(0) for _ in range(2)
    )


@pytest.mark.parametrize("kept", [1, 3, 8, 12])
@pytest.mark.parametrize("seed", range(6))
def test_kl_under_restricted_sampling_is_a_divergence_over_the_tokens_that_may_be_drawn(
    seed: int, kept: int
) -> None:
    actor, reference = distributions(seed)
    allowed = actor.topk(kept).indices
    p, q = actor[allowed].exp(), reference[allowed].exp()
    expected = (p / p.sum() * token_kl((actor - reference)[allowed], restricted=True)).sum()
    generalised = (p * (p / q).log() - p + q).sum() / p.sum()
    assert expected.item() == pytest.approx(generalised.item())
    assert expected.item() > 0
    assert token_kl(torch.zeros(3), restricted=True).abs().max() == 0, "0 where both agree"


def test_fixed_coefficient_never_moves() -> None:
    controller = KLController(KLConfig(coef=0.5))
    controller.update(kl=100.0, sequences=64)
    controller.load_state_dict({"kl_coef": 7.0})
    assert controller.coef == 0.5
