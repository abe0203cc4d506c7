"""Sampling: noise that depends on what is drawn, and the distribution it draws from."""

from collections.abc import Callable

import pytest
import torch

from realrl.engine.generation.sampler import Sampler, choose_tokens, choose_tokens_on_gpu, keep_top_p
from realrl.engine.generation.sampling_noise import SamplingNoise, SamplingSeed
from realrl.recipe.generation import GenerationConfig

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def compute_uniform(
    seed: int, step: int, sequences: torch.Tensor, positions: torch.Tensor, *, call: int = 0
) -> torch.Tensor:
    noise = SamplingNoise(SamplingSeed(seed, step, call=call))
    return noise.draw(noise.make_keys(sequences), positions)


def sample(
    logits: torch.Tensor,
    noise: torch.Tensor,
    *,
    recorded: float | None = None,
    position: int = 0,
    **settings: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities; recorded at the temperature of sampling unless another is given. Token 4 ends
    sequences."""
    config = GenerationConfig.model_validate(settings)
    recorded = config.temperature if recorded is None else recorded
    sampler = Sampler(config, temperature=recorded, stop_token_ids=(4,), device=torch.device("cpu"))
    return sampler.sample(logits, torch.full((len(logits),), position), noise)


def draw(count: int, **settings: object) -> torch.Tensor:
    ids = torch.arange(count)
    return sample(LOGITS.repeat(count, 1), compute_uniform(7, 3, ids, torch.zeros_like(ids)), **settings)[0]


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
    tokens, logprobs = sample(LOGITS.repeat(50, 1), noise, recorded=0.7, temperature=1.3, top_k=2, top_p=0.9)
    expected = (LOGITS / 0.7).log_softmax(-1)[tokens]
    torch.testing.assert_close(logprobs, expected)


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for noise in (0.0, 0.5, 1 - 2.0**-53):
        tokens, _ = sample(logits.clone(), torch.tensor([noise], dtype=torch.float64))
        assert tokens.item() == 1


def test_stop_tokens_are_forbidden_up_to_the_minimum_and_do_not_change_log_probabilities() -> None:
    logits, noise = torch.tensor([[0.0, 1.0, 0.0, 0.0, 9.0]]), torch.tensor([0.5], dtype=torch.float64)
    for greedy in (False, True):
        early, logprob = sample(logits, noise, min_new_tokens=3, position=2, greedy=greedy)
        assert early.item() != 4
        torch.testing.assert_close(logprob, logits.log_softmax(-1)[:, early.item()])
        assert sample(logits, noise, min_new_tokens=3, position=3, greedy=greedy)[0].item() == 4


def restrict_by_sorting(probabilities: torch.Tensor, share: float) -> torch.Tensor:
    """The definition of top-p: in descending order, equal ones by their place."""
    ordered, order = probabilities.double().sort(dim=-1, descending=True, stable=True)
    keep = ordered.cumsum(-1) - ordered < share * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, order, (ordered * keep).float())


@pytest.mark.parametrize("share", [1e-6, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("vocabulary", [1, 5, 128, 1000])
def test_top_p_keeps_what_sorting_keeps(vocabulary: int, share: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    sharp = torch.randn(20, vocabulary, generator=generator).mul_(3).softmax(-1)
    # Powers of two: sums are exact, so that many tokens are equal and the share is met exactly.
    tied = 2.0 ** -torch.randint(1, 6, (20, vocabulary), generator=generator).float()
    for probabilities in (sharp, tied, torch.full((2, vocabulary), 2.0**-10), sharp * (sharp > 0.01)):
        assert torch.equal(keep_top_p(probabilities, share), restrict_by_sorting(probabilities, share))


@pytest.mark.parametrize("choose", [choose_tokens, choose_tokens_on_gpu])
@pytest.mark.parametrize(("vocabulary", "last"), [(700, 690), (640, 640), (640, 500), (7, 6)])
def test_tokens_are_those_at_which_the_cumulative_sum_exceeds_the_noise(
    vocabulary: int, last: int, choose: Callable
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 4, (400, vocabulary), generator=generator).float()  # with sums that are exact
    weights[:, 0] = 1
    weights[:, last:] = 0
    noise = torch.randint(0, 1024, (400,), generator=generator).double() / 1024
    until = weights.double().cumsum(-1)
    expected = (until <= noise[:, None] * until[:, -1:]).sum(-1)
    assert torch.equal(choose(weights, noise), expected)
    highest = choose(weights, torch.full((400,), 1 - 2.0**-53, dtype=torch.float64))
    assert (weights.gather(1, highest[:, None]) > 0).all()


def test_logits_that_are_not_finite_lead_to_a_token_of_the_vocabulary() -> None:
    logits = torch.full((3, 7), torch.nan)
    noise = torch.tensor([0.0, 0.5, 0.99], dtype=torch.float64)
    for settings in ({}, {"top_p": 0.5}, {"top_k": 3}, {"greedy": True}):
        tokens, logprobs = sample(logits, noise, **settings)
        assert ((tokens >= 0) & (tokens < 7)).all() and logprobs.isnan().all()
