"""Sums of squares of gradients: their values, and the memory that they take."""

import pytest
import torch

from realrl.engine.training import optimizer
from realrl.engine.training.optimizer import sum_squares
from tests.allocations import count_allocated

SIZES = (1, 2**16 - 1, 2**16, 5 * 2**16 + 77)


@pytest.fixture(params=["cpu", "gpu path"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "on_gpu", lambda _: request.param == "gpu path")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("size", SIZES)
def test_squares_are_summed_as_in_float64(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3
    total = sum_squares(values)
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(float(values.double().square().sum()), rel=2e-6)


@pytest.mark.usefixtures("path")
def test_a_sum_of_squares_of_nothing_is_zero_and_of_infinity_is_infinite() -> None:
    assert float(sum_squares(torch.ones(0))) == 0
    values = torch.ones(2**16 + 3)
    values[5] = torch.inf
    assert not sum_squares(values).isfinite()
    values[5] = torch.nan
    assert not sum_squares(values).isfinite()


@pytest.mark.usefixtures("path")
def test_a_sum_of_squares_copies_no_gradients() -> None:
    """A copy to float64 would take 8 bytes per element."""
    values = torch.randn(2**22)
    assert count_allocated(lambda: sum_squares(values)) < len(values) // 100
