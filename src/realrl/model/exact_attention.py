"""Causal attention over packed sequences by the exact kernel, which reads keys and values in blocks."""

import torch
from torch import Tensor

from realrl.layout.kv_blocks import CacheSize
from realrl.model.cache import PagedCache
from realrl.model.key_runs import attend_to_runs, count_run_rows
from realrl.model.packing import Packing


def attend_exactly(qkv: Tensor, packing: Packing, heads: int, kv_heads: int) -> Tensor:
    """Compute `attention.varlen_attention` without gradient, each row as a decode step would.

    qkv: [T, (heads + 2 kv_heads) * D] -> [T, heads * D]
    """
    heads_of_rows = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    k, v = heads_of_rows[:, heads : heads + kv_heads], heads_of_rows[:, heads + kv_heads :]
    blocked = packing.arrange_blocks(count_run_rows(heads, kv_heads))
    cache = PagedCache(
        CacheSize(blocked.count, 1),
        layers=1,
        kv_heads=kv_heads,
        head_dim=qkv.shape[1] // (heads + 2 * kv_heads),
        dtype=qkv.dtype,
        device=qkv.device,
    )
    with torch.no_grad():
        cache.store(0, k, v, blocked.places)
        return attend_to_runs(qkv, cache.k[0], cache.v[0], blocked.runs, heads)
