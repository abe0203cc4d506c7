import random

import pytest
import torch
from ppo_reference import on_ranks

from realrl.algorithms.samples import gather_samples


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
