"""Communication of CP ranks, which divide the tokens of a pass (context parallelism).

Between attention functions, each rank computes its own tokens. There are two ways to attend. Either a rank gathers
the keys and values of all tokens, as in Llama 3 (arXiv 2407.21783, section 3.3.2). Or ranks exchange tokens for
heads, so that each attends with some heads in all sequences (DeepSpeed-Ulysses, arXiv 2309.14509). Both ways are
exact however sequences are packed.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.layout.ranges import count_exchanged_heads, exchanges_heads
from realrl.model.attention import attend_to_spans, can_attend_to_spans, varlen_attention
from realrl.model.attention_rule import AttentionRule
from realrl.model.group import Group, all_gather, exchange, reduce_scatter
from realrl.model.packing import Packing, TokenShare
from realrl.model.tensor_parallel import sum_parts


@dataclass(frozen=True)
class ContextParallel:
    """Communication of the CP ranks in a pass whose tokens they divide. `share` has this rank's tokens."""

    group: Group
    share: TokenShare

    def attend(self, qkv: Tensor, heads: int, kv_heads: int, rule: AttentionRule, *, exact: bool) -> Tensor:
        """Compute `varlen_attention` of this rank's tokens. [n, (heads + 2 kv_heads) * D] -> [n, heads * D]

        Ranks exchange heads if they then send less, or if there is no kernel for parts of sequences. Otherwise, or
        if heads do not divide evenly, they gather keys and values.
        """
        has_kernel = not exact and can_attend_to_spans(qkv, heads, kv_heads, rule)
        counts = count_exchanged_heads(heads, kv_heads, self.group.size)
        if counts is not None and (not has_kernel or exchanges_heads(heads, kv_heads, self.group.size)):
            return self._attend_with_some_heads(qkv, heads, kv_heads, counts, rule, exact=exact)
        share = self.share
        width = qkv.shape[1] // (heads + 2 * kv_heads) * heads
        q, own = qkv.split((width, qkv.shape[1] - width), 1)
        kv = _GatherTokens.apply(own, self.group, share)
        outputs = []
        for of_piece, piece in zip(q.split(share.piece_tokens), share.pieces, strict=True):
            seen = kv[piece.first_key : piece.stop]
            if has_kernel:
                outputs.append(attend_to_spans(of_piece, seen, piece.spans, heads, kv_heads, rule))
                continue
            # Other kernels only know whole sequences. The piece lacks the first tokens of its first sequence, so
            # their queries are zeros here, and their outputs are dropped.
            missing = len(seen) - len(of_piece)
            whole = torch.cat((F.pad(of_piece, (0, 0, missing, 0)), seen), 1)
            packing = Packing.of(piece.spans.keys, q.device)
            outputs.append(varlen_attention(whole, packing, heads, kv_heads, rule, exact=exact)[missing:])
        return torch.cat(outputs)

    def _attend_with_some_heads(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        counts: tuple[int, int],
        rule: AttentionRule,
        *,
        exact: bool,
    ) -> Tensor:
        """Attend with this rank's heads to all tokens, and return its tokens with all heads. `counts`: number of
        query heads and of key/value heads of each rank."""
        group, share = self.group, self.share
        index = _order_heads(heads, kv_heads, group.size, counts, qkv.device)
        by_head = qkv.view(len(qkv), heads + 2 * kv_heads, -1).index_select(1, index)
        sent = by_head.view(len(qkv), group.size, -1).transpose(0, 1)
        received = _Exchange.apply(sent, group).flatten(0, 1).index_select(0, share.order)
        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks.split(counts[0])[group.index])
        out = varlen_attention(received, share.whole, *counts, rule, exact=exact)
        sent = out.index_select(0, share.gathered).view(group.size, share.count, -1)
        return _Exchange.apply(sent, group).transpose(0, 1).reshape(share.count, -1)

    def combine(self, values: Tensor, places: Tensor) -> Tensor:
        """Give all ranks the results that each of them has computed for some packed places.

        Every rank must then compute the same with them, so each rank gets the gradient of its own values. values:
        [N, ...]; places: [N], those of a rank differ from those of others -> [T, ...], 0 at places of no rank
        """
        whole = values.new_zeros(self.share.tokens, *values.shape[1:]).index_copy_(0, places, values)
        return sum_parts(whole, self.group)


@lru_cache(maxsize=64)
def _order_heads(
    heads: int, kv_heads: int, ranks: int, counts: tuple[int, int], device: torch.device
) -> Tensor:
    """Index the heads of queries, keys and values that each rank gets, rank by rank."""
    queries, keys = counts
    found = []
    for rank in range(ranks):
        first_key = heads + rank * queries * kv_heads // heads
        found += [*range(rank * queries, (rank + 1) * queries)]
        found += [
            *range(first_key, first_key + keys),
            *range(first_key + kv_heads, first_key + kv_heads + keys),
        ]
    return torch.tensor(found, device=device)


class _Exchange(Function):
    """Exchange parts between ranks: part i goes to rank i. [ranks, ...] -> [ranks, ...], by sender"""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Group) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        exchange(received, parts.contiguous(), group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(grad, memory_format=torch.contiguous_format)
        exchange(returned, grad.contiguous(), ctx.group)
        return returned, None


class _GatherTokens(Function):
    """Gather rows of all ranks in packed order. The backward pass sums the gradients of the ranks. [n, C] -> [n *
    ranks, C]"""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group, share: TokenShare) -> Tensor:
        ctx.group, ctx.share = group, share
        buffer = own.new_empty(group.size * len(own), own.shape[1])
        all_gather(buffer, own.contiguous(), group)
        return buffer.index_select(0, share.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = grad.new_empty(ctx.share.count, grad.shape[1])
        reduce_scatter(own, grad.index_select(0, ctx.share.gathered), ctx.group)
        return own, None, None
