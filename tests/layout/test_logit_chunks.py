"""Rows of logits that are computed at a time."""

import pytest

from realrl.layout.limits import count_kept_logit_rows, count_logit_rows


@pytest.mark.parametrize(
    ("columns", "rows"), [(151_936, 1664), (262_144, 1024), (32_000, 8320), (128_256, 2048), (1 << 24, 128)]
)
def test_chunks_on_a_gpu_fill_its_tiles_of_128_rows(columns: int, rows: int) -> None:
    """2^28 logits at most, unless 128 rows have more."""
    assert count_logit_rows(columns, cpu=False) == rows
    assert count_kept_logit_rows(columns, cpu=False) == rows


@pytest.mark.parametrize(("columns", "rows", "kept"), [(32_000, 32, 524), (151_936, 6, 110), (1 << 21, 1, 8)])
def test_chunks_on_a_cpu_fit_its_caches(columns: int, rows: int, kept: int) -> None:
    assert count_logit_rows(columns, cpu=True) == rows
    assert count_kept_logit_rows(columns, cpu=True) == kept
