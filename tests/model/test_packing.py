"""Memory that attention's side-by-side layout takes."""

from realrl.layout.padding import DENSE_LENGTH
from realrl.model.packing import Packing


def test_masks_are_made_only_where_scores_are_computed_whole() -> None:
    padded = Packing.of([5, DENSE_LENGTH, DENSE_LENGTH + 1, 30, 3000], "cpu").padded(4, 2)
    assert any(mask is None for mask in padded.masks)
    for bucket, mask in zip(padded.buckets, padded.masks, strict=True):
        assert (mask is None) == (bucket.length > DENSE_LENGTH)
        assert mask is None or mask.shape == (2 * bucket.length, bucket.length)
