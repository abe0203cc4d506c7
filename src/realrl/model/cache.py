"""KV cache of sequences that are being generated."""

import torch
from torch import Tensor

from realrl.model.packing import Packing


class KVCache:
    """Keys and values of `rows` sequences of up to `max_tokens` tokens each, in every layer.

    lengths: [B] int64, tokens stored per row; B shrinks with `keep`. longest: no row is longer than this.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        size = (layers, rows, kv_heads, max_tokens, head_dim)
        # Zeros, because what lies beyond a row's length is masked out, and 0 x NaN would not be.
        self.k = torch.zeros(size, dtype=dtype, device=device)
        self.v = torch.zeros(size, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.longest = 0
        self._row = torch.arange(rows, device=device)

    def __len__(self) -> int:
        return len(self.lengths)

    def start(self, packing: Packing) -> None:
        """Set the lengths of the prompts; `store` brings their keys and values."""
        assert len(packing.lengths) == len(self) and packing.max_length <= self.k.shape[3], "cache too small"
        self.lengths = torch.tensor(packing.lengths, device=self.lengths.device)
        self.longest = packing.max_length

    def store(self, layer: int, k: Tensor, v: Tensor, packing: Packing) -> None:
        """Store the prompts of a layer. k, v: [T, kv_heads, D]"""
        self.k[layer].transpose(1, 2)[packing.rows, packing.positions] = k
        self.v[layer].transpose(1, 2)[packing.rows, packing.positions] = v

    def grow(self) -> Tensor:
        """Extend every row by one token; return the mask of visible keys: [B, 1, 1, longest] bool."""
        assert self.longest < self.k.shape[3], "the cache is full"
        self.lengths = self.lengths + 1
        self.longest += 1
        steps = torch.arange(self.longest, device=self.lengths.device)
        return (steps < self.lengths.unsqueeze(-1))[:, None, None]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store each row's newest token, after `grow`; return all that is stored.

        k, v: [B, kv_heads, D] -> two views [B, kv_heads, longest, D]
        """
        last = self.lengths - 1
        self.k[layer].transpose(1, 2)[self._row, last] = k
        self.v[layer].transpose(1, 2)[self._row, last] = v
        rows = len(self)
        return self.k[layer, :rows, :, : self.longest], self.v[layer, :rows, :, : self.longest]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, which become rows 0, 1, ... in this order. rows: [n] int64"""
        count = len(rows)
        for store in (self.k, self.v):
            for layer in store:
                layer[:count, :, : self.longest] = layer[rows, :, : self.longest]
        self.lengths = self.lengths[rows]
        self._row = self._row[:count]
        self.longest = int(self.lengths.max()) if count else 0
