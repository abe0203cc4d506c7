"""Attention over the paged KV cache by plain operations, and caches filled at random."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realrl.layout.kv_blocks import BLOCK_TOKENS, CachePart, CacheSize, count_blocks
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.group import Group
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


def divide(case: Case, ranks: int) -> list[Case]:
    """Divide the cache of a case among ranks. Each of them has the same rows, in blocks of more tokens."""
    rows = case.rows
    found = []
    for index in range(ranks):
        part = CachePart(ranks, index)
        segments = [
            (tables, lengths, -(-(int(lengths.max()) + 1) // part.block_tokens))
            for tables, lengths in (
                (rows.prompt_tables, rows.prompt_lengths),
                (rows.own_tables, rows.own_lengths),
            )
        ]
        count = sum(len(tables) * blocks for tables, _, blocks in segments)
        cache = PagedCache(
            CacheSize(count, 1, part.block_tokens),
            layers=1,
            kv_heads=case.cache.k.shape[2],
            head_dim=case.cache.k.shape[4],
            dtype=case.cache.k.dtype,
            device=torch.device("cpu"),
            group=Group(tuple(range(ranks)), index),
        )
        for pool in (cache.k, cache.v):
            pool.fill_(torch.nan)
            pool[:, 0] = 0.0
        order = (torch.randperm(count, generator=torch.Generator().manual_seed(ranks)) + 1).tolist()
        wide = []
        for tables, lengths, blocks in segments:
            wide.append(torch.tensor([[order.pop() for _ in range(blocks)] for _ in tables]))
            for table, old, length in zip(wide[-1], tables, lengths.tolist(), strict=True):
                for local, position in enumerate(range(index, length, ranks)):
                    place = 0, table[local // BLOCK_TOKENS], slice(None), local % BLOCK_TOKENS
                    there = 0, old[position // BLOCK_TOKENS], slice(None), position % BLOCK_TOKENS
                    cache.k[place], cache.v[place] = case.cache.k[there], case.cache.v[there]
        # Rows of a prompt share its blocks.
        if rows.prompt_starts is not None:
            counts = rows.prompt_starts.diff()
            wide[0] = wide[0][rows.prompt_starts[:-1]].repeat_interleave(counts, 0)
        own = replace(rows, prompt_tables=wide[0], own_tables=wide[1], part=part)
        found.append(Case(cache, own, case.qkv, case.heads))
    return found


def merge(found: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge the outputs of ranks by the sums of their exponentials, in float64. -> [B, heads * D]"""
    outputs, sums = (torch.stack(parts).double() for parts in zip(*found, strict=True))
    weights = torch.exp2(sums - torch.logsumexp(sums * math.log(2), 0) / math.log(2))
    return (outputs.view(*sums.shape, -1) * weights[..., None]).sum(0).flatten(1)
