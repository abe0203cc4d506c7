"""Packed batches: positions of sequences, and their padded layout where attention needs it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from realrl.layout.padding import Bucket, bucket_lengths


@dataclass(frozen=True, eq=False)
class PaddedHeads:
    """Index tensors between packed heads and heads laid out by sequence, for buckets of sequences.

    Rows are one head of one token. Padded rows are ordered (bucket, query | key | value, sequence, head,
    position); `gather` finds each of them among the packed rows [T * (heads + 2 kv_heads)] (padding takes any
    row: causality keeps it from being seen) and `gathered` finds each packed row among them. Attention's
    output has padded rows (bucket, sequence, head, position); `spread` finds them among packed output rows
    [T * heads], `spread_padding` lists those that are padding, and `collect` finds each packed output row.
    """

    heads: int
    kv_heads: int
    buckets: tuple[Bucket, ...]
    gather: Tensor
    gathered: Tensor
    spread: Tensor
    spread_padding: Tensor
    collect: Tensor
    masks: tuple[Tensor | None, ...]
    """Masks of the buckets whose scores may be computed whole: 0 where a query sees a key and -inf where not.
    
    None for longer buckets. [heads / kv_heads * L, L], float32
    """

    @property
    def output_rows(self) -> list[int]:
        """Number of padded rows of attention's output, by bucket."""
        return [len(b.sequences) * b.length * self.heads for b in self.buckets]

    @property
    def input_rows(self) -> list[int]:
        """Numbers of padded query, key and value rows of all buckets, in one list."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        return [len(b.sequences) * b.length * n for b in self.buckets for n in counts]


@dataclass(frozen=True, eq=False)
class Packing:
    """B sequences stored back to back, T tokens in all.

    positions: [T] within the sequence. starts: [B + 1] int32, where each sequence begins and the last ends.
    predicted: [T - B] indices of the tokens that have one before them in their sequence.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    starts: Tensor
    predicted: Tensor
    _padded: dict[tuple[int, int], PaddedHeads] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> "Packing":
        """Pack sequences with these lengths, each at least 1."""
        assert len(lengths) > 0 and min(lengths) > 0, "a packing has sequences, and each of them tokens"
        sizes = torch.tensor(lengths)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(sizes, 0, out=starts[1:])
        positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(sizes)
        predicted = positions.nonzero().squeeze(-1)
        return cls(tuple(lengths), positions.to(device), starts.int().to(device), predicted.to(device))

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def rows(self) -> Tensor:
        """Sequence of each token. [T]"""
        sizes = torch.tensor(self.lengths)
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.positions.device)

    def padded(self, heads: int, kv_heads: int) -> PaddedHeads:
        """Compute the padded layout for these numbers of heads, once."""
        key = (heads, kv_heads)
        if key not in self._padded:
            self._padded[key] = _pad_heads(self, heads, kv_heads)
        return self._padded[key]


def _pad_heads(packing: Packing, heads: int, kv_heads: int) -> PaddedHeads:
    buckets = bucket_lengths(packing.lengths)
    starts, lengths = packing.starts.cpu().long(), torch.tensor(packing.lengths)
    total = heads + 2 * kv_heads
    gather, spread, real, real_output = [], [], [], []
    masks: list[Tensor | None] = []
    for bucket in buckets:
        chosen = torch.tensor(bucket.sequences)
        steps = torch.arange(bucket.length)
        inside = (steps < lengths[chosen, None])[:, None]
        token = torch.where(inside, starts[chosen, None, None] + steps, 0)
        for first, count in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)):
            head = torch.arange(first, first + count)[:, None]
            gather.append((token * total + head).flatten())
            real.append(inside.expand(-1, count, -1).flatten())
        spread.append((token * heads + torch.arange(heads)[:, None]).flatten())
        real_output.append(real[-3])
        masks.append(None)
        if bucket.dense:
            hidden = torch.full((bucket.length, bucket.length), float("-inf")).triu(1)
            masks[-1] = hidden.repeat(heads // kv_heads, 1).to(packing.positions.device)

    def inverse(index: Tensor, valid: Tensor, size: int) -> Tensor:
        where = valid.nonzero().squeeze(-1)
        return torch.empty(size, dtype=torch.int64).index_copy_(0, index[where], where)

    tokens = len(packing.positions)
    rows, valid = torch.cat(gather), torch.cat(real)
    output_rows, output_valid = torch.cat(spread), torch.cat(real_output)
    index = {
        "gather": rows,
        "gathered": inverse(rows, valid, tokens * total),
        "spread": output_rows,
        "spread_padding": (~output_valid).nonzero().squeeze(-1),
        "collect": inverse(output_rows, output_valid, tokens * heads),
    }
    device = packing.positions.device
    on_device = {name: value.to(device) for name, value in index.items()}
    return PaddedHeads(heads, kv_heads, buckets, masks=tuple(masks), **on_device)
