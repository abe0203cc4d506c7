"""Size of the KV cache."""

from realrl.planner.arrays.arrays import Ints, Real, truncate
from realrl.planner.workload.shard_sizes import LocalSizes


def kv_cache_bytes(sizes: LocalSizes, *, tokens: Real, layers: Real, element_bytes: int) -> Ints:
    """Compute the bytes of keys and values of `tokens` in `layers` on one TP rank."""
    return truncate(2 * layers * tokens * sizes.cache_dim * element_bytes)
