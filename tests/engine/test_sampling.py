"""Sampling: noise that depends on what is drawn, and the distribution it draws from."""

import pytest
import torch

from realrl.engine.generation.sampling import compute_uniform, sample
from realrl.recipe.settings import GenerationConfig

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def draw(count: int, **settings: object) -> torch.Tensor:
    ids = torch.arange(count)
    noise = compute_uniform(7, 3, ids, torch.zeros_like(ids))
    tokens, _ = sample(LOGITS.expand(count, -1), GenerationConfig.model_validate(settings), noise)
    return tokens


def splitmix64(state: int) -> int:
    """The published finaliser, on Python integers."""
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_noise_matches_integer_arithmetic() -> None:
    golden = 0x9E3779B97F4A7C15
    for seed, step, sequence, position in [(0, 0, 0, 0), (1, 5, 17, 400), (2**31, 1 << 40, 10**9, 7)]:
        key = splitmix64(seed + golden)
        for part in (step, sequence, position):
            key = splitmix64((key ^ part) + golden)
        expected = (key >> 11) * 2.0**-53
        got = compute_uniform(seed, step, torch.tensor([sequence]), torch.tensor([position]))
        assert got.item() == expected


def test_noise_is_uniform_and_uncorrelated_over_neighbours_and_calls() -> None:
    ids = torch.arange(400).repeat_interleave(50)
    positions = torch.arange(50).repeat(400)
    noise = compute_uniform(1, 2, ids, positions).view(400, 50)
    counts = torch.histc(noise.float(), 20, 0, 1)
    assert ((counts - 1000).square() / 1000).sum() < 45  # chi-square of 19 degrees: 99.9 % lie below 43.8
    centred = noise - 0.5
    of_another_call = compute_uniform(1, 2, ids, positions, call=1).view(400, 50) - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), of_another_call):
        assert (centred * other).mean().abs() < 4 / 12 / 20_000**0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_follow_the_distribution_at_the_temperature(temperature: float) -> None:
    count = 40_000
    frequencies = torch.bincount(draw(count, temperature=temperature), minlength=5) / count
    expected = (LOGITS / temperature).softmax(-1)
    assert ((frequencies - expected).abs() < 4 * (expected / count).sqrt()).all()


def test_greedy_sampling_takes_the_most_likely_token() -> None:
    assert (draw(10, greedy=True) == 0).all()


def test_top_k_and_top_p_exclude_the_rest() -> None:
    assert set(draw(2000, top_k=2).tolist()) == {0, 1}
    probabilities = LOGITS.softmax(-1)  # 0.56, 0.21, 0.13, 0.08, 0.03
    assert set(draw(2000, top_p=float(probabilities[:2].sum()) - 0.01).tolist()) == {0, 1}
    assert set(draw(2000, top_p=float(probabilities[0]) - 0.01).tolist()) == {0}
    assert set(draw(4000, top_k=5, top_p=1.0).tolist()) == {0, 1, 2, 3, 4}


def test_recorded_logprobs_are_over_the_whole_vocabulary_at_the_temperature() -> None:
    noise = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    settings = GenerationConfig(temperature=0.7, top_k=2, top_p=0.9)
    tokens, logprobs = sample(LOGITS.expand(50, -1), settings, noise)
    expected = (LOGITS / 0.7).log_softmax(-1)[tokens]
    torch.testing.assert_close(logprobs, expected)


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for noise in (0.0, 0.5, 1 - 2.0**-53):
        tokens, _ = sample(logits, GenerationConfig(), torch.tensor([noise], dtype=torch.float64))
        assert tokens.item() == 1
