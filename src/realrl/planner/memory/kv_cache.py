"""Size of the KV cache."""

from realrl.planner.workload.shard_sizes import LocalSizes


def kv_cache_bytes(sizes: LocalSizes, *, tokens: float, layers: int, element_bytes: int) -> int:
    """Compute the bytes of keys and values of `tokens` in `layers` on one TP rank."""
    return int(2 * layers * tokens * sizes.cache_dim * element_bytes)
