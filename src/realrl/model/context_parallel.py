"""Communication of CP ranks, which divide the tokens of a pass (context parallelism).

Between attention functions, each rank computes its own tokens. For attention it gathers the keys and values of all
tokens, as Llama 3 does (arXiv 2407.21783, section 3.3.2). So sequences may be packed in any way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.model.attention import attend_to_spans
from realrl.model.attention_rule import AttentionRule
from realrl.model.group import reduce_scatter
from realrl.model.packing import TokenShare
from realrl.model.tensor_parallel import sum_parts


@dataclass(frozen=True)
class ContextParallel:
    """Communication of the CP ranks in a pass whose tokens they divide. `share` has this rank's tokens."""

    share: TokenShare

    def attend(self, qkv: Tensor, heads: int, kv_heads: int, rule: AttentionRule, *, exact: bool) -> Tensor:
        """Compute `varlen_attention` of this rank's tokens. [n, (heads + 2 kv_heads) * D] -> [n, heads * D]"""
        width = qkv.shape[1] // (heads + 2 * kv_heads) * heads
        q, own = qkv.split((width, qkv.shape[1] - width), 1)
        return self.attend_to(q, _GatherTokens.apply(own, self.share), heads, kv_heads, rule, exact=exact)

    def attend_to(
        self, q: Tensor, kv: Tensor, heads: int, kv_heads: int, rule: AttentionRule, *, exact: bool
    ) -> Tensor:
        """Attend from this rank's tokens to keys that were gathered. q: [n, heads * D]; kv: [n * ranks, 2 *
        kv_heads * D] -> [n, heads * D]"""
        outputs = [
            attend_to_spans(
                part, kv[piece.first_key : piece.stop], piece.spans, heads, kv_heads, rule, exact=exact
            )
            for part, piece in zip(q.split(self.share.piece_tokens), self.share.pieces, strict=True)
        ]
        return torch.cat(outputs)

    def combine(self, values: Tensor, places: Tensor) -> Tensor:
        """Give all ranks the results that each of them has computed for some packed places.

        Every rank must then compute the same with them, so each rank gets the gradient of its own values. values:
        [N, ...]; places: [N], those of a rank differ from those of others -> [T, ...], 0 at places of no rank
        """
        whole = values.new_zeros(self.share.tokens, *values.shape[1:]).index_copy_(0, places, values)
        return sum_parts(whole, self.share.group)


class _GatherTokens(Function):
    """Gather rows of all ranks in packed order. The backward pass sums the gradients of the ranks. [n, C] -> [n *
    ranks, C]"""

    @staticmethod
    def forward(ctx: Any, own: Tensor, share: TokenShare) -> Tensor:
        ctx.share = share
        return share.gather(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(ctx.share.count, grad.shape[1])
        reduce_scatter(own, grad.index_select(0, ctx.share.gathered), ctx.share.group)
        return own, None
