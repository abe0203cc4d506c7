"""Elementary functions that the compiler turns into vector instructions."""

import numba
import numpy as np

LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""ln 2 as a sum. The first part has few digits, so that n * _LN2_HIGH is exact."""


@numba.njit(inline="always", error_model="numpy")
def exp(x: np.float32) -> np.float32:
    """Compute e^x to 2 units in the last place (Cephes, expf); 0 below -88, infinity above 89, NaN for NaN."""
    # Comparisons with NaN are false, so NaN stays NaN.
    bounded = np.float32(-88.0) if x < np.float32(-88.0) else x
    bounded = np.float32(89.0) if bounded > np.float32(89.0) else bounded
    n = np.floor(bounded * LOG2_E + np.float32(0.5))
    r = bounded - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    # Build 2^n from its exponent bits, as two factors. A single factor could overflow even if the result does not.
    half = np.int32(n) >> np.int32(1)
    rest = np.int32(n) - half
    low = np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    high = np.int32((rest + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * low * high


@numba.njit(inline="always", error_model="numpy")
def bound_above(x: np.float32, limit: np.float32) -> np.float32:
    """Return x, or `limit` if x is larger. NaN stays NaN."""
    return limit if x > limit else x


@numba.njit(inline="always", error_model="numpy")
def bound_both(x: np.float32, limit: np.float32) -> np.float32:
    """Return x, or the nearest number between -limit and limit. NaN stays NaN."""
    return -limit if x < -limit else bound_above(x, limit)


@numba.njit(inline="always", error_model="numpy")
def soft_bound(x: np.float32, bound: np.float32) -> np.float32:
    """Compute bound * tanh(x / bound), with an error of at most 1e-7 * bound. Uses tanh(|z|) = (1 - e^-2|z|) / (1 +
    e^-2|z|)."""
    power = exp(np.float32(-2.0) * abs(x) / bound)
    size = bound * (np.float32(1.0) - power) / (np.float32(1.0) + power)
    return -size if x < 0 else size


@numba.njit(inline="always", error_model="numpy")
def sigmoid(x: np.float32) -> np.float32:
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))


_TANH_SCALE, _CUBIC = np.float32(1.5957691216057308), np.float32(0.044715)
"""2 sqrt(2 / pi), and the factor of x³, in GELU's tanh approximation (arXiv 1606.08415)."""
_ROOT_HALF, _NORMAL_TOP = np.float32(0.7071067811865476), np.float32(0.3989422804014327)
"""sqrt(1 / 2), and the density of the normal distribution at 0."""


@numba.njit(inline="always", error_model="numpy")
def normal_cdf(x: np.float32) -> np.float32:
    """Compute the normal distribution function.

    Uses the approximation of erfc in Press et al., Numerical Recipes (1992), section 6.2, with a relative error of
    at most 1.2e-7.
    """
    z = abs(x) * _ROOT_HALF
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.5) * z)
    p = np.float32(0.17087277)
    p = p * t - np.float32(0.82215223)
    p = p * t + np.float32(1.48851587)
    p = p * t - np.float32(1.13520398)
    p = p * t + np.float32(0.27886807)
    p = p * t - np.float32(0.18628806)
    p = p * t + np.float32(0.09678418)
    p = p * t + np.float32(0.37409196)
    p = p * t + np.float32(1.00002368)
    p = p * t - np.float32(1.26551223)
    tail = np.float32(0.5) * t * exp(p - z * z)
    return np.float32(1.0) - tail if x > 0 else tail


@numba.njit(inline="always", error_model="numpy")
def gelu_slope(x: np.float32) -> np.float32:
    """Differentiate x * normal_cdf(x)."""
    return normal_cdf(x) + x * _NORMAL_TOP * exp(np.float32(-0.5) * x * x)


@numba.njit(inline="always", error_model="numpy")
def tanh_share(x: np.float32) -> np.float32:
    """Compute the factor of x in GELU's tanh approximation: (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi)
    (x + 0.044715 x³)."""
    return sigmoid(_TANH_SCALE * (x + _CUBIC * x * x * x))


@numba.njit(inline="always", error_model="numpy")
def gelu_tanh_slope(x: np.float32) -> np.float32:
    """Differentiate x * tanh_share(x)."""
    share = tanh_share(x)
    inner = _TANH_SCALE * (np.float32(1.0) + np.float32(3.0) * _CUBIC * x * x)
    return share + x * share * (np.float32(1.0) - share) * inner


@numba.njit(inline="always", error_model="numpy")
def silu_slope(x: np.float32) -> np.float32:
    """Differentiate x * sigmoid(x)."""
    share = sigmoid(x)
    return share * (np.float32(1.0) + x * (np.float32(1.0) - share))


@numba.njit(inline="always")
def count_here(tokens: int, ranks: int, index: int) -> int:
    """Count those of the first `tokens` tokens of a segment that rank `index` holds; see `CachePart`."""
    return (max(0, tokens) + ranks - 1 - index) // ranks
