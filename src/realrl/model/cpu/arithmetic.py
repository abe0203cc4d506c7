"""Elementary functions that the compiler turns into vector instructions."""

import numba
import numpy as np

LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""The natural logarithm of 2 as a sum of which the first part has few digits."""


@numba.njit(inline="always", error_model="numpy")
def exp(x: np.float32) -> np.float32:
    """Compute e^x to 2 units of the last place (Cephes, expf); 0 below -88, infinite above 89, NaN of NaN."""
    # Comparisons with NaN are false, so that it stays.
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
    # 2^n from its exponent bits, in two factors, of which neither overflows before the product does.
    half = np.int32(n) >> np.int32(1)
    rest = np.int32(n) - half
    low = np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    high = np.int32((rest + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * low * high


@numba.njit(inline="always", error_model="numpy")
def sigmoid(x: np.float32) -> np.float32:
    """Compute 1 / (1 + e^-x)."""
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))
