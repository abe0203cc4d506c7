import random

import pytest
import torch
from ppo_reference import on_ranks

from realrl.algorithms.base.rows import gather_samples
from realrl.config.errors import UserError


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_gets_all_samples_of_each_prompt_bit_for_bit(ranks: int) -> None:
    prompts, samples = 4, 3
    generator = torch.Generator().manual_seed(ranks)
    values = torch.randn(prompts * samples, generator=generator) * 1e3
    values[5], values[7] = float("inf"), float("nan")
    items = list(range(prompts * samples))
    random.Random(ranks).shuffle(items)
    shares = [sorted(items[rank::ranks]) for rank in range(ranks)]

    def table(rank: int, dp_sum):  # type: ignore[no-untyped-def]
        ids = shares[rank]
        return gather_samples(values[ids], ids, prompts=prompts, samples=samples, dp_sum=dp_sum)

    for result in on_ranks(ranks, table):
        assert torch.equal(
            result.nan_to_num(nan=-1), values.double().view(prompts, samples).nan_to_num(nan=-1)
        )


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ([[0, 1], [2]], r"\(missing: 3, 4, 5\)"),
        ([[0, 1, 2], [2, 3, 4, 5]], r"\(repeated: 2\)"),
        ([[0, 1, 1, 2], [3, 4]], r"\(missing: 5; repeated: 1\)"),
        ([[0, 1, 2, 6], [3, 4, 5, -1]], r"\(beyond these: 2\)"),
    ],
)
def test_items_that_are_not_the_samples_of_all_prompts_are_refused_on_every_rank(
    shares: list[list[int]], problem: str
) -> None:
    def refused(rank: int, dp_sum) -> None:  # type: ignore[no-untyped-def]
        values = torch.ones(len(shares[rank]))
        with pytest.raises(UserError, match=rf"must be 0 to 5, each once, .* 2 prompts {problem}"):
            gather_samples(values, shares[rank], prompts=2, samples=3, dp_sum=dp_sum)

    on_ranks(2, refused)
