"""Attention over the paged KV cache by plain operations, and caches filled at random."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.layout.kv_blocks import BLOCK_TOKENS, CacheSize, count_blocks
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.kv_cache import PagedCache
from realrl.model.paged_attention import CachedRows


@dataclass(frozen=True, eq=False)
class Case:
    """Rows in a cache of one layer, and the queries, keys and values of their newest tokens."""

    cache: PagedCache
    rows: CachedRows
    qkv: Tensor
    heads: int


def make_case(
    prompts: list[int],
    owns: list[list[int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Make a case with `prompts` of these lengths, each with a row per length of `owns`; blocks lie anywhere.

    What no row stores is NaN, but for the scratch block.
    """
    generator = torch.Generator().manual_seed(seed)
    shared = [count_blocks(n) for n in prompts]
    most = max(count_blocks(n + 1) for row in owns for n in row)
    total = sum(shared) + sum(most * len(row) for row in owns)
    free = (torch.randperm(total, generator=generator) + 1).tolist()
    cache = PagedCache(
        CacheSize(total, 1),
        layers=1,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for pool in (cache.k, cache.v):
        pool.fill_(torch.nan)
        pool[:, 0] = 0.0

    def store(blocks: list[int], length: int) -> None:
        for position in range(length):
            place = 0, blocks[position // BLOCK_TOKENS], slice(None), position % BLOCK_TOKENS
            for pool in (cache.k, cache.v):
                pool[place] = torch.randn(kv_heads, dim, generator=generator).to(dtype)

    prompt_tables, own_tables, starts = [], [], [0]
    for length, count, row_lengths in zip(prompts, shared, owns, strict=True):
        blocks = [free.pop() for _ in range(count)]
        store(blocks, length)
        for own in row_lengths:
            prompt_tables.append(blocks + [0] * (max(1, *shared) - count))
            own_tables.append([free.pop() for _ in range(most)])
            store(own_tables[-1], own)
        starts.append(len(own_tables))
    rows = CachedRows(
        prompt_tables=torch.tensor(prompt_tables),
        prompt_lengths=torch.tensor([n for n, row in zip(prompts, owns, strict=True) for _ in row]),
        own_tables=torch.tensor(own_tables),
        own_lengths=torch.tensor([n for row in owns for n in row]),
        prompt_starts=torch.tensor(starts),
        most=max(map(len, owns)),
    )
    qkv = torch.randn(len(own_tables), (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    return Case(cache, rows, qkv, heads)


def weigh(scores: Tensor, rule: AttentionRule) -> Tensor:
    """Weights of the last token's scores. [kv_heads, group, L]"""
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    if rule.window is not None:
        scores[..., : -rule.window] = -torch.inf
    if rule.sinks is None:
        return scores.softmax(-1)
    sinks = rule.sinks.double().view(*scores.shape[:2], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def attend_by_row(case: Case, rule: AttentionRule = CAUSAL) -> Tensor:
    """Attend from each row's newest token to all tokens of its row, in float64. [B, heads * D]"""
    cache, rows = case.cache, case.rows
    kv_heads, dim = cache.k.shape[2], cache.k.shape[4]
    outputs = []
    for i, qkv in enumerate(case.qkv.double()):
        q, k, v = qkv.view(-1, dim).split((case.heads, kv_heads, kv_heads))
        segments = (
            (rows.prompt_tables[i], int(rows.prompt_lengths[i])),
            (rows.own_tables[i], int(rows.own_lengths[i])),
        )

        def gather(pool: Tensor, newest: Tensor, segments=segments) -> Tensor:
            parts = [pool[0][table].transpose(1, 2).flatten(0, 1)[:length] for table, length in segments]
            return torch.cat([*(part.double() for part in parts), newest[None]])  # [L, kv_heads, D]

        keys, values = gather(cache.k, k), gather(cache.v, v)
        scores = torch.einsum("hgd,lhd->hgl", q.view(kv_heads, -1, dim), keys) / dim**0.5
        outputs.append(torch.einsum("hgl,lhd->hgd", weigh(scores, rule), values).flatten())
    return torch.stack(outputs)
