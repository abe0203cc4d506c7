import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ppo_reference import alone, random_items, reference_advantages, reference_kl, reference_reward, to_batch

from realrl.algorithms.base.rows import Responses
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_experience import ExperienceMaker
from realrl.data.batch import Ragged


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from(["score", "bootstrap"]),
    st.sampled_from([None, 1.5]),
    st.sampled_from([0.0, 0.7]),
)
def test_experience_agrees_with_the_definition(
    seed: int, count: int, gamma: float, lam: float, truncated: str, clip: float | None, penalty: float
) -> None:
    config = PPOConfig(
        gamma=gamma,
        lam=lam,
        truncated=truncated,
        reward_clip=clip,
        reward_scale=0.5,
        reward_bias=0.3,
        missing_eos_penalty=penalty,
        kl={"coef": 0.2},
    )
    items = random_items(seed, count)
    experience = ExperienceMaker(config).make_experience(to_batch(items), alone)
    expected = [reference_advantages(item, config, coef=0.2) for item in items]
    assert experience.advantages.tolist() == pytest.approx([a for e in expected for a in e[0]], abs=1e-4)
    assert experience.returns.tolist() == pytest.approx([r for e in expected for r in e[1]], abs=1e-4)
    assert experience.rewards.tolist() == pytest.approx(
        [reference_reward(i, config) for i in items], abs=1e-5
    )
    assert experience.kl.tolist() == pytest.approx([reference_kl(i) for i in items], abs=1e-5)


def test_advantages_of_a_sequence_do_not_depend_on_its_batch() -> None:
    batch, config = to_batch(random_items(3, 6)), PPOConfig()
    whole = ExperienceMaker(config).make_experience(batch, alone)
    rows = whole.actions.spread(whole.advantages).rows()
    for i in range(6):
        single = ExperienceMaker(config).make_experience(batch.select([i]), alone)
        assert single.actions.spread(single.advantages).values.equal(rows[i])


def test_responses_locate_every_token_after_its_prompt() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 6) for _ in range(20)]
    prompts = [rng.randint(0, n) for n in lengths]
    responses = Responses.of(
        Ragged.of([[0] * n for n in lengths], dtype=torch.int64), Ragged.scalars(torch.tensor(prompts))
    )
    expected, start = [], 0
    for row, (n, p) in enumerate(zip(lengths, prompts, strict=True)):
        first = max(p, 1)
        expected += [(start + t, row, t - first) for t in range(first, n)]
        start += n
    found = zip(responses.index.tolist(), responses.row.tolist(), responses.column.tolist(), strict=True)
    assert list(found) == expected
    values = torch.arange(responses.total, dtype=torch.float32)
    assert responses.unpad(responses.pad(values)).equal(values)
    assert responses.spread(values).values[responses.index].equal(values)
    assert responses.row_sums(torch.ones(responses.total)).tolist() == responses.counts.tolist()
