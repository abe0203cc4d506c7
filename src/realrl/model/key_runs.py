"""Attention of which a query's result is a function of the query, its keys and its values alone, bit for bit.

Decode steps, prefills and training go through the same kernel, over keys and values in blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.model.cpu.exact_attention import attend_bfloat16, attend_float32
from realrl.model.gpu.path import load_exact_kernels, on_gpu

RUN_QUERIES = 16
"""Most queries of a run, unless more heads share a key: the least that a GPU's tensor cores multiply."""


@dataclass(frozen=True, eq=False)
class KeyRuns:
    """Which keys N rows see, by blocks. A run is neighbouring rows that have keys in common."""

    shared_tables: Tensor
    """Blocks of the keys that rows of a run share. [runs, any] int64"""
    shared_lengths: Tensor
    """How many of them each row sees. [N] int64"""
    own_tables: Tensor
    """Blocks of the keys that a row sees after those. [N, any] int64, or [any] where there are none"""
    own_lengths: Tensor
    """How many of its own keys each row sees. [N] int64"""
    starts: Tensor
    """First row of each run, and N. [runs + 1] int64"""
    most: int
    """Most rows of a run."""
    longest: int
    """Most keys that a row sees, or more; known on a CPU."""


def count_run_rows(heads: int, kv_heads: int) -> int:
    """Count the rows of a run of a sequence that is prefilled or trained on."""
    return max(1, RUN_QUERIES // (heads // kv_heads))


def attend_to_runs(qkv: Tensor, k: Tensor, v: Tensor, runs: KeyRuns, heads: int) -> Tensor:
    """Attend from each row to the keys that it sees.

    qkv: [N, (heads + 2 kv_heads) * D], of which queries are read; k, v: [blocks, kv_heads, BLOCK_TOKENS, D], as a
    layer of a `PagedCache` has them -> [N, heads * D]
    """
    kv_heads, dim = k.shape[1], k.shape[3]
    if on_gpu(qkv):
        out = qkv.new_empty(len(qkv), heads * dim)
        load_exact_kernels().attend_to_runs(
            qkv.contiguous(),
            k,
            v,
            runs.shared_tables,
            runs.shared_lengths,
            runs.own_tables,
            runs.own_lengths,
            runs.starts,
            heads,
            out,
        )
        return out
    out = torch.empty(len(qkv), heads * dim)
    kernel = attend_float32
    # Kernels know where keys and values lie; they get their addresses.
    pools = [pool.as_strided((1,), (1,)) for pool in (k, v)]
    if k.dtype == torch.bfloat16:
        kernel = attend_bfloat16
        pools = [pool.view(torch.int16) for pool in pools]
    kernel(
        (len(runs.starts) - 1) * kv_heads,
        qkv.float(),
        *pools,
        runs.shared_tables,
        runs.shared_lengths,
        runs.own_tables,
        runs.own_lengths,
        runs.starts,
        heads,
        kv_heads,
        dim,
        runs.most,
        runs.longest,
        out,
        claim=1,
    )
    return out.to(qkv.dtype)
