import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.layout.region import Region

boxes = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)).map(
    lambda n: Region("w", n[:2], n[2:])
)


def cells(region: Region) -> np.ndarray:
    grid = np.zeros((10, 10), dtype=bool)
    grid[tuple(slice(a, b) for a, b in zip(region.offset, region.end, strict=True))] = True
    return grid


@given(boxes, boxes)
def test_an_intersection_is_what_both_cover(a: Region, b: Region) -> None:
    common = a.intersect(b)
    both = cells(a) & cells(b)
    assert (common is None) == (not both.any())
    if common is not None:
        assert (cells(common) == both).all() and common.numel == both.sum()


def test_regions_of_different_tensors_do_not_intersect() -> None:
    assert Region("a", (0,), (4,)).intersect(Region("b", (0,), (4,))) is None


@pytest.mark.parametrize("offset, size", [((0, 0), (1,)), ((-1,), (2,)), ((0,), (-1,))])
def test_an_impossible_box_is_refused(offset: tuple[int, ...], size: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="region of w"):
        Region("w", offset, size)
