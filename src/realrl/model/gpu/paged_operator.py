"""Attention of a decode step on a GPU as torch sees it: an operator whose result has a shape before it runs."""

import torch
from torch import Tensor


@torch.library.custom_op("realrl::attend_to_blocks", mutates_args=("k", "v"), device_types="cuda")
def attend_to_blocks(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_tables: Tensor,
    prompt_lengths: Tensor,
    own_tables: Tensor,
    own_lengths: Tensor,
    heads: int,
    window: int,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Store each row's newest token, and attend from it to all tokens of its row.

    qkv: [B, (heads + 2 kv_heads) * D], rotated; k, v: [blocks, kv_heads, BLOCK_TOKENS, D]; tables: [B, blocks], and
    lengths: [B], of the segments of rows (`model.paged_attention`); window, cap (0 for none) and sinks as in
    `AttentionRule` -> [B, heads * D]
    """
    # Triton comes with builds of torch for GPUs only.
    from realrl.model.gpu.paged_attention import launch_attention

    return launch_attention(
        qkv.contiguous(),
        k,
        v,
        prompt_tables,
        prompt_lengths,
        own_tables,
        own_lengths,
        heads,
        window,
        cap,
        sinks,
    )


@attend_to_blocks.register_fake
def _(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_tables: Tensor,
    prompt_lengths: Tensor,
    own_tables: Tensor,
    own_lengths: Tensor,
    heads: int,
    window: int,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    return qkv.new_empty(len(qkv), heads * k.shape[3])
