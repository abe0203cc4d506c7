"""Paged KV cache: keys and values of sequences that are being generated, in blocks of one pool.

A row (a prompt with its continuation) has two segments of blocks (`layout.kv_blocks`). One segment holds the
prompt, and is shared by all rows of that prompt. The other segment belongs to the row alone. Block tables list the
blocks of each segment. The cache itself does not know which row uses a block.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from realrl.layout.kv_blocks import BLOCK_TOKENS, CachePart, CacheSize
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.group import Group, make_single_rank_group
from realrl.model.paged_attention import (
    CachedRows,
    CachePlaces,
    KeyRuns,
    attend_to_cache,
    attend_to_runs,
    merge_parts,
)
from realrl.model.prefill import EvenShare
from realrl.model.routing import EXPERT_DTYPE, LIKELIEST, NONE_CHOSEN, RecordedRouting


class PagedCache:
    """Keys and values of all layers of a stage, in a pool of blocks.

    k, v: [layers, blocks, kv_heads, BLOCK_TOKENS, D]. On a CPU, the keys of a block are stored dim by dim, so that
    a SIMD vector can hold the scores of all its tokens. Values are padded to whole vectors. experts:
    [layers, blocks, block_tokens, k], the experts that tokens passed through, if they are recorded.

    Context-parallel ranks divide keys and values (`CachePart`), but each of them records the experts of all tokens.
    """

    def __init__(
        self,
        size: CacheSize,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        experts: int = 0,
        group: Group | None = None,
    ) -> None:
        """`experts` is the number of experts per token to record in each layer; 0 records none. The ranks of
        `group` divide the cache."""
        self._group = group or make_single_rank_group()
        self.part = CachePart(self._group.size, self._group.index)
        assert self.part.block_tokens == size.block_tokens, "a block has 16 tokens on each rank"
        pool = (layers, size.blocks + 1, kv_heads)  # one more block: the scratch block
        if device.type == "cpu":
            width = -(-head_dim // BLOCK_TOKENS) * BLOCK_TOKENS
            self.k = torch.empty(*pool, head_dim, BLOCK_TOKENS, dtype=dtype).transpose(-1, -2)
            self.v = torch.empty(*pool, BLOCK_TOKENS, width, dtype=dtype)[..., :head_dim]
        else:
            self.k = torch.empty(*pool, BLOCK_TOKENS, head_dim, dtype=dtype, device=device)
            self.v = torch.empty_like(self.k)
        self.experts: Tensor | None = None
        if experts:
            places = layers, size.blocks + 1, size.block_tokens, experts
            # Dense layers of a mixture never write their entries.
            self.experts = torch.full(places, NONE_CHOSEN, dtype=EXPERT_DTYPE, device=device)

    @property
    def nbytes(self) -> int:
        pools = (self.k, self.v) if self.experts is None else (self.k, self.v, self.experts)
        return sum(pool.untyped_storage().nbytes() for pool in pools)

    def record(
        self, places: CachePlaces, collect: Callable[[Tensor], Tensor] = lambda experts: experts
    ) -> RecordedRouting:
        """Make a routing that writes the chosen experts of tokens into the cache, at the tokens' places. `collect`:
        see `RecordedRouting`."""
        assert self.experts is not None, "the cache has no room for experts"
        return RecordedRouting(self.experts, (places.blocks, places.offsets), LIKELIEST, collect)

    def store(self, layer: int, k: Tensor, v: Tensor, places: CachePlaces) -> None:
        """Store keys and values of tokens that this rank holds. Their places count only its own tokens. k, v: [N,
        kv_heads, D]"""
        self.k[layer][places.blocks, :, places.offsets] = k
        self.v[layer][places.blocks, :, places.offsets] = v

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rows: CachedRows,
        heads: int,
        rule: AttentionRule = CAUSAL,
        *,
        exact: bool = False,
    ) -> Tensor:
        """Store keys and values of each row's newest token, and attend from this token to its whole row. With
        `exact`, the result equals the result in training, bit for bit.

        qkv: [B, (heads + 2 kv_heads) * D], rotated -> [B, heads * D]
        """
        if not exact:
            found = attend_to_cache(qkv, self.k[layer], self.v[layer], rows, heads, rule)
            return merge_parts(found, self._group, qkv.dtype)
        assert self.part.ranks == 1, "results of ranks that divide keys are not exact"
        kv_heads = self.k.shape[2]
        k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1)[:, heads:].split(kv_heads, 1)
        self.store(layer, k, v, rows.newest)
        return attend_to_runs(qkv, self.k[layer], self.v[layer], rows.runs, heads, rule)[0]

    def attend_to_parts(
        self,
        layer: int,
        qkv: Tensor,
        parts: Sequence[KeyRuns],
        heads: int,
        rule: AttentionRule,
        share: EvenShare,
    ) -> Tensor:
        """Attend from T rows to keys that are in the cache. `parts` have some neighbouring rows each; `share` has
        the rows whose results this rank needs. qkv: [T, (heads + 2 kv_heads) * D], only queries are read ->
        [share.count, heads * D]"""
        rows = qkv.split([len(runs.own_lengths) for runs in parts])
        return share.select_rows(
            merge_parts(
                attend_to_runs(of, self.k[layer], self.v[layer], runs, heads, rule), self._group, qkv.dtype
            )
            for of, runs in zip(rows, parts, strict=True)
        )
