"""Number of keys that attention reads, averaged over layers with and without a sliding window."""

import numpy as np

from realrl.families.shape import ModelShape
from realrl.program.arrays import Real


def average_squares(shape: ModelShape, tokens: Real, squares: Real, *, layers: int | None = None) -> Real:
    """Compute the effective sum of squared lengths, averaged over all layers or over the last `layers` layers.

    A causal query in a sequence of s tokens sees s / 2 keys on average. With a window of w < s tokens, s² - (s -
    w)² replaces s². The result is exact if all sequences have equal length. If not, it is computed for the mean
    length per token, squares / tokens.
    """
    share = find_windowed_share(shape, layers)
    if not share:
        return squares
    length = np.maximum(squares / tokens, 1.0)
    hidden = np.maximum(0.0, length - (shape.window or 0))
    return squares - share * squares * (hidden / length) ** 2


def average_context(shape: ModelShape, context: Real) -> Real:
    """Compute how many keys of a context a decoded token reads, averaged over layers."""
    share = find_windowed_share(shape)
    return context - share * np.maximum(0.0, context - (shape.window or 0)) if share else context


def find_windowed_share(shape: ModelShape, layers: int | None = None) -> float:
    """Find the share of layers with a window, among all layers or the last `layers`."""
    last = shape.layers if layers is None else layers
    if not last:
        return 0.0
    return sum(layer >= shape.layers - last for layer in shape.windowed_layers) / last
