"""Attention over keys and values in blocks, by the kernel of the device: of decode steps, and of exact runs.

In exact runs a query's result is a function of the query, its keys and its values alone, bit for bit. Decode steps,
prefills and training go through one kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.cpu.exact_attention import attend_runs_bfloat16, attend_runs_float32
from realrl.model.cpu.paged_attention import attend_bfloat16, attend_float32
from realrl.model.gpu.paged_operator import attend_to_blocks
from realrl.model.gpu.path import load_exact_kernels, on_gpu

RUN_QUERIES = 16
"""Most queries of a run, unless more heads share a key: the least that a GPU's tensor cores multiply."""

_PROMPTS_PER_THREAD = 4
"""Prompts per thread from which on a thread takes whole ones: the last one that is left does not take long then."""


@dataclass(frozen=True, eq=False)
class CachePlaces:
    """Places in the cache for tokens of packed sequences."""

    source: Tensor | None
    """Tokens that are stored, as indices into the packed ones; None for all of them. [N] int64"""
    blocks: Tensor
    """[N] int64"""
    offsets: Tensor
    """Place within the block. [N] int64"""


@dataclass(frozen=True, eq=False)
class KeyRuns:
    """Keys that N rows see, by blocks. A run is neighbouring rows that have keys in common."""

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


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Block tables of B rows that are decoded, as attention reads them.

    Blocks of a table beyond a row's length are any that exist. Rows that share a prompt are neighbours.
    """

    prompt_tables: Tensor
    """[B, blocks of the longest prompt] int64"""
    prompt_lengths: Tensor
    """Tokens in the prompt's segment. [B] int64"""
    own_tables: Tensor
    """[B, blocks of the longest continuation] int64"""
    own_lengths: Tensor
    """Tokens in the row's own segment, without the one that is decoded now. [B] int64"""
    prompt_starts: Tensor | None = None
    """First row of each prompt, and B; known on a CPU. [prompts + 1] int64"""
    most: int = 0
    """Most rows of a prompt; known on a CPU."""

    @property
    def newest(self) -> CachePlaces:
        """Places of the tokens that are decoded now."""
        number = (self.own_lengths // BLOCK_TOKENS).unsqueeze(-1)
        blocks = self.own_tables.gather(1, number).squeeze(-1)
        return CachePlaces(None, blocks, self.own_lengths % BLOCK_TOKENS)

    @property
    def runs(self) -> KeyRuns:
        """Keys that each row sees, the newest included: prompt by prompt on a CPU, row by row on a GPU."""
        own_lengths = self.own_lengths + 1
        if self.prompt_starts is None or on_gpu(own_lengths):
            starts = torch.arange(len(own_lengths) + 1, device=own_lengths.device)
            tables, longest = self.prompt_tables, 0
        else:
            starts = self.prompt_starts
            tables = self.prompt_tables.index_select(0, starts[:-1])
            longest = int((self.prompt_lengths + own_lengths).max())
        return KeyRuns(
            shared_tables=tables,
            shared_lengths=self.prompt_lengths,
            own_tables=self.own_tables,
            own_lengths=own_lengths,
            starts=starts,
            most=self.most,
            longest=longest,
        )


def attend_to_cache(
    qkv: Tensor, k: Tensor, v: Tensor, rows: CachedRows, heads: int, rule: AttentionRule = CAUSAL
) -> Tensor:
    """Store each row's newest token, and attend from it to all tokens of its row.

    qkv: [B, (heads + 2 kv_heads) * D], rotated; k, v: [blocks, kv_heads, BLOCK_TOKENS, D] -> [B, heads * D]
    """
    if qkv.device.type == "cpu":
        return _attend_on_cpu(qkv, k, v, rows, heads, rule)
    return attend_to_blocks(
        qkv,
        k,
        v,
        rows.prompt_tables,
        rows.prompt_lengths,
        rows.own_tables,
        rows.own_lengths,
        heads,
        *rule.bounds,
        rule.sinks,
    )


def _attend_on_cpu(
    qkv: Tensor, k: Tensor, v: Tensor, rows: CachedRows, heads: int, rule: AttentionRule
) -> Tensor:
    assert rows.prompt_starts is not None, "kernels on a CPU work prompt by prompt"
    kv_heads, dim = k.shape[1], k.shape[3]
    out = torch.empty(len(qkv), heads * dim)
    kernel = attend_float32
    # Kernels know where keys and values lie; they get their addresses.
    pools = [pool.as_strided((1,), (1,)) for pool in (k, v)]
    if k.dtype == torch.bfloat16:
        kernel = attend_bfloat16
        pools = [pool.view(torch.int16) for pool in pools]
    prompts = len(rows.prompt_starts) - 1
    kernel(
        prompts * kv_heads,
        qkv.float(),
        *pools,
        rows.prompt_tables,
        rows.prompt_lengths,
        rows.own_tables,
        rows.own_lengths,
        rows.prompt_starts,
        heads,
        kv_heads,
        dim,
        rows.most,
        *rule.for_kernel(heads),
        out,
        claim=_claim_heads(prompts, kv_heads),
    )
    return out.to(qkv.dtype)


def _claim_heads(prompts: int, kv_heads: int) -> int:
    """Count the heads of prompts that a thread takes at a time: all of a prompt, whose keys lie side by side, but
    where that leaves threads without work."""
    return kv_heads if prompts >= _PROMPTS_PER_THREAD * torch.get_num_threads() else 1


def count_run_rows(heads: int, kv_heads: int) -> int:
    """Count the rows of a run of a sequence that is prefilled or trained on."""
    return max(1, RUN_QUERIES // (heads // kv_heads))


def attend_to_runs(
    qkv: Tensor, k: Tensor, v: Tensor, runs: KeyRuns, heads: int, rule: AttentionRule = CAUSAL
) -> Tensor:
    """Attend from each row to the keys that it sees.

    qkv: [N, (heads + 2 kv_heads) * D], of which queries are read; k, v: [blocks, kv_heads, BLOCK_TOKENS, D], as a
    layer of a `PagedCache` has them -> [N, heads * D]
    """
    kv_heads, dim = k.shape[1], k.shape[3]
    if on_gpu(qkv):
        out = qkv.new_empty(len(qkv), heads * dim)
        load_exact_kernels().launch_run_attention(
            qkv.contiguous(),
            k,
            v,
            runs.shared_tables,
            runs.shared_lengths,
            runs.own_tables,
            runs.own_lengths,
            runs.starts,
            heads,
            *rule.bounds,
            rule.sinks,
            out,
        )
        return out
    out = torch.empty(len(qkv), heads * dim)
    kernel = attend_runs_float32
    # Kernels know where keys and values lie; they get their addresses.
    pools = [pool.as_strided((1,), (1,)) for pool in (k, v)]
    if k.dtype == torch.bfloat16:
        kernel = attend_runs_bfloat16
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
        *rule.for_kernel(heads),
        out,
        claim=1,
    )
    return out.to(qkv.dtype)
