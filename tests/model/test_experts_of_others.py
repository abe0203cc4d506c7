"""Rows of experts of other ranks, which a decode step gathers but does not compute."""

import pytest
import torch
from torch import Tensor

from realrl.families.shape import Mixture
from realrl.model.arithmetic.grouped import Groups
from realrl.model.arithmetic.ops import PLAIN
from realrl.model.group import make_single_rank_group
from realrl.model.layer import ExpertBlock
from realrl.model.matrices import Matrices


def test_kernels_that_add_biases_to_all_rows_change_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, one kernel adds a bias to each row, also to those of other ranks."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    own, hidden, units = 2, 6, 4
    block = ExpertBlock(
        draw(8, hidden),
        draw(own * 2 * units, hidden),
        draw(own * hidden, units),
        Mixture(experts=8, per_token=2),
        "silu",
        0,
        make_single_rank_group(),
        gate_up_bias=draw(own * 2 * units),
        down_bias=draw(own * hidden),
    )
    # Two experts of this rank, and 2 for those of others.
    chosen = torch.tensor([[0, 2], [2, 2], [1, 0], [2, 1]])
    groups = Groups.of(chosen, own, has_others=True)
    x, weights, matrices = draw(4, hidden), torch.rand(4, 2, generator=generator), Matrices(PLAIN, {}, {})
    expected = block._apply((x, weights), groups, matrices)
    assert not expected[1].any()
    assert expected[0].any()

    def add_to_all(rows: Tensor, biases: Tensor, weights: Tensor, groups: Groups, *_: object) -> Tensor:
        return rows + weights[:, None] * biases.view(-1, rows.shape[1])[groups.numbers]

    monkeypatch.setattr("realrl.model.matrices.add_biases", add_to_all)
    torch.testing.assert_close(block._apply((x, weights), groups, matrices), expected)
