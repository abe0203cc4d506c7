import math
import random

import pytest
import torch
from ppo_reference import alone, mean_and_std, on_ranks

from realrl.algorithms.ppo.kl import KLController
from realrl.algorithms.ppo.normalization import ValueNorm, global_moments, whiten
from realrl.config.algorithms import KLConfig


def numbers(seed: int, count: int, *, shift: float = 3.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(shift, 2.0) for _ in range(count)]


@pytest.mark.parametrize(("kl", "error"), [(6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (6.0, 0.0), (-5.0, -0.2)])
def test_adaptive_coefficient_follows_the_clipped_relative_error(kl: float, error: float) -> None:
    controller = KLController(KLConfig(coef=0.5, adaptive=True, target=6.0, horizon=1000))
    controller.update(kl=kl, sequences=64)
    assert controller.coef == pytest.approx(0.5 * (1 + error * 64 / 1000))


def test_fixed_coefficient_never_moves() -> None:
    controller = KLController(KLConfig(coef=0.5))
    controller.update(kl=100.0, sequences=64)
    controller.load_state_dict({"kl_coef": 7.0})
    assert controller.coef == 0.5


@pytest.mark.parametrize("split", [(9, 0), (4, 5), (1, 8)])
def test_whitening_uses_the_moments_of_all_ranks(split: tuple[int, int]) -> None:
    values = torch.tensor(numbers(0, 9))
    mean, std = mean_and_std(values.tolist())
    parts = values.split(split)
    done = torch.cat(on_ranks(2, lambda rank, s: whiten(parts[rank], global_moments(parts[rank], s))))
    assert done.tolist() == pytest.approx([(x - mean) / std for x in values.tolist()], rel=1e-5)


@pytest.mark.parametrize("values", [[2.5] * 4, [0.1] * 7, [1.0], []])
def test_whitening_of_equal_values_is_zero(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert whiten(tensor, global_moments(tensor, alone)).abs().sum() < 1e-5


def test_running_statistics_are_those_of_everything_seen() -> None:
    norm, seen = ValueNorm("running", beta=0.5), []
    for step, count in enumerate((5, 11, 2)):
        returns = numbers(step, count, shift=step)
        seen += returns
        norm.update(global_moments(torch.tensor(returns, dtype=torch.float64), alone))
    assert (norm.mean, norm.std) == pytest.approx(mean_and_std(seen))


def test_exponential_statistics_weigh_steps_by_age() -> None:
    norm, steps = ValueNorm("exponential", beta=0.7), [numbers(s, 4 + s, shift=s) for s in range(3)]
    for returns in steps:
        norm.update(global_moments(torch.tensor(returns, dtype=torch.float64), alone))
    weights = [0.7 ** (2 - s) for s in range(3)]

    def average(power: int) -> float:
        means = [sum(x**power for x in step) / len(step) for step in steps]
        return sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)

    assert norm.mean == pytest.approx(average(1))
    assert norm.std == pytest.approx(math.sqrt(average(2) - average(1) ** 2))


@pytest.mark.parametrize("mode", ["none", "running", "exponential"])
def test_denormalise_undoes_normalise(mode: str) -> None:
    norm = ValueNorm(mode, beta=0.9)
    values = torch.tensor(numbers(1, 6))
    assert norm.normalise(values).equal(values), "before any update values are what they are"
    norm.update(global_moments(values, alone))
    torch.testing.assert_close(norm.denormalise(norm.normalise(values)), values)
    assert norm.normalise(values).equal(values) is (mode == "none")


def test_equal_returns_do_not_blow_values_up() -> None:
    norm = ValueNorm("running", beta=0.9)
    norm.update(global_moments(torch.full((4,), 2.0), alone))
    assert norm.std == pytest.approx(0.1)
