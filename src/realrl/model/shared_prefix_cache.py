"""KV cache of sequences that share prompts: keys and values of each prompt are stored once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realrl.model.attention import attention_with_lse, make_padding_mask
from realrl.model.packing import Packing


class SharedPrefixCache:
    """Keys and values of P prompts and, apart from them, of what B rows have generated after these prompts.

    Attention to a row's sequence is that to its prompt and that to its own tokens, combined by their log-sum-exps.
    The rows of a prompt attend to it together, as several queries to the same keys. All rows have generated equally
    many tokens, so that only prompts are padded.

    lengths: [B] int64, tokens per row, prompt included; B shrinks with `keep`.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        prompt_of_row: Sequence[int],
        max_prompt: int,
        max_new_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`prompt_of_row`: B numbers of prompts, each of 0 to P - 1 at least once."""
        self._prompt = torch.tensor(prompt_of_row, dtype=torch.int64, device=device)
        self._prompts = max(prompt_of_row) + 1
        size = (layers, self._prompts, kv_heads, max_prompt, head_dim)
        # Zeros, because what lies beyond a prompt's length is masked out, and 0 x NaN would not be.
        self._prompt_k = torch.zeros(size, dtype=dtype, device=device)
        self._prompt_v = torch.zeros(size, dtype=dtype, device=device)
        size = (layers, len(prompt_of_row), kv_heads, max_new_tokens, head_dim)
        self._own_k = torch.empty(size, dtype=dtype, device=device)
        self._own_v = torch.empty(size, dtype=dtype, device=device)
        self._own_tokens = 0
        self.lengths = torch.zeros(len(prompt_of_row), dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self._prompt)

    def start(self, packing: Packing) -> None:
        """Set the lengths of the prompts; `store` brings their keys and values."""
        assert len(packing.lengths) == self._prompts, "one sequence per prompt"
        assert packing.max_length <= self._prompt_k.shape[3], "cache too small"
        self._prompt_lengths = torch.tensor(packing.lengths, device=self.lengths.device)
        self.lengths = self._prompt_lengths[self._prompt]
        self._arrange()

    def store(self, layer: int, k: Tensor, v: Tensor, packing: Packing) -> None:
        """Store the prompts of a layer. k, v: [T, kv_heads, D]"""
        self._prompt_k[layer].transpose(1, 2)[packing.rows, packing.positions] = k
        self._prompt_v[layer].transpose(1, 2)[packing.rows, packing.positions] = v

    def grow(self) -> None:
        """Extend every row by one token, whose keys and values `attend` brings."""
        assert self._own_tokens < self._own_k.shape[3], "the cache is full"
        self._own_tokens += 1
        self.lengths = self.lengths + 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store each row's newest token, after `grow`, and attend from it to its whole sequence.

        q: [B, heads, D]; k, v: [B, kv_heads, D] -> [B, heads * D]
        """
        rows = len(self)
        self._own_k[layer, :rows, :, self._own_tokens - 1] = k
        self._own_v[layer, :rows, :, self._own_tokens - 1] = v
        own_k, own_v = (x[layer, :rows, :, : self._own_tokens] for x in (self._own_k, self._own_v))
        # The query heads of a key head are its queries.
        q = q.unflatten(1, (k.shape[1], -1))
        own, own_lse = (x.transpose(1, 2) for x in attention_with_lse(q, own_k, own_v, None))
        prompt, prompt_lse = self._attend_to_prompts(layer, q)
        # Softmax over both parts: each part's share of the sum of exponentials.
        share = torch.sigmoid(prompt_lse - own_lse).unsqueeze(-1)
        combined = torch.lerp(own.float(), prompt.float(), share).to(q.dtype)
        return combined.transpose(1, 2).reshape(rows, -1)

    def _attend_to_prompts(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from each row to its prompt.

        q: [B, kv_heads, group, D] -> output [B, group, kv_heads, D] and log-sum-exp [B, group, kv_heads]
        """
        count = self._prompts
        kv_heads, group, dim = q.shape[1:]
        k, v = (x[layer, :count, :, : self._longest] for x in (self._prompt_k, self._prompt_v))
        queries = q.index_select(0, self._row_of_slot).view(count, -1, kv_heads, group, dim)
        queries = queries.transpose(1, 2).reshape(count, kv_heads, -1, dim)
        output, lse = attention_with_lse(queries, k, v, self._mask)
        output = output.transpose(1, 2).reshape(-1, group, kv_heads, dim)
        lse = lse.transpose(1, 2).reshape(-1, group, kv_heads)
        return output.index_select(0, self._slot_of_row), lse.index_select(0, self._slot_of_row)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, which become rows 0, 1, ... in this order; drop prompts without rows.

        rows: [n] int64
        """
        count = len(rows)
        for own in (self._own_k, self._own_v):
            for layer in own:
                layer[:count, :, : self._own_tokens] = layer[rows, :, : self._own_tokens]
        self.lengths = self.lengths[rows]
        prompts, self._prompt = self._prompt[rows].unique(return_inverse=True)
        if len(prompts) < self._prompts:
            self._prompts = len(prompts)
            self._prompt_lengths = self._prompt_lengths[prompts]
            for stored in (self._prompt_k, self._prompt_v):
                for layer in stored:
                    layer[: len(prompts), :, : self._longest] = layer[prompts, :, : self._longest]
        self._arrange()

    def _arrange(self) -> None:
        """Arrange rows by prompt, with equally many slots for each; slots that are left over repeat some row."""
        device = self._prompt.device
        counts = torch.bincount(self._prompt, minlength=self._prompts)
        order = self._prompt.argsort(stable=True)
        prompts = self._prompt[order]
        within = torch.arange(len(self), device=device) - (counts.cumsum(0) - counts)[prompts]
        slots = int(counts.max())
        self._slot_of_row = torch.empty_like(order).index_copy_(0, order, prompts * slots + within)
        self._row_of_slot = torch.zeros(self._prompts * slots, dtype=torch.int64, device=device)
        self._row_of_slot[self._slot_of_row] = torch.arange(len(self), device=device)
        self._longest = int(self._prompt_lengths.max())
        alike = bool((self._prompt_lengths == self._longest).all())
        # A mask that hides nothing costs time too.
        self._mask = (
            None if alike else make_padding_mask(self._prompt_lengths, self._longest, self._prompt_k.dtype)
        )
