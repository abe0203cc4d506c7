"""KV cache of sequences that are being generated."""

import torch
from torch import Tensor

from realrl.model.attention import decode_attention, make_padding_mask
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
        self._mask: Tensor | None = None

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

    def grow(self) -> None:
        """Extend every row by one token, whose keys and values `attend` brings."""
        assert self.longest < self.k.shape[3], "the cache is full"
        self.lengths = self.lengths + 1
        self.longest += 1
        self._mask = make_padding_mask(self.lengths, self.longest, self.k.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store each row's newest token, after `grow`, and attend from it to all that its row stores.

        q: [B, heads, D]; k, v: [B, kv_heads, D] -> [B, heads * D]
        """
        assert self._mask is not None, "the cache has not grown"
        last = self.lengths - 1
        self.k[layer].transpose(1, 2)[self._row, last] = k
        self.v[layer].transpose(1, 2)[self._row, last] = v
        stored_k, stored_v = (x[layer, : len(self), :, : self.longest] for x in (self.k, self.v))
        return decode_attention(q, stored_k, stored_v, self._mask)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, which become rows 0, 1, ... in this order. rows: [n] int64"""
        count = len(rows)
        for store in (self.k, self.v):
            for layer in store:
                layer[:count, :, : self.longest] = layer[rows, :, : self.longest]
        self.lengths = self.lengths[rows]
        self._row = self._row[:count]
        self.longest = int(self.lengths.max()) if count else 0
