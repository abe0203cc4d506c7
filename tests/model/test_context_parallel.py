"""Attention of ranks that divide the tokens of packed sequences, beside one rank that has them all."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realrl.model.attention import varlen_attention
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.context_parallel import ContextParallel
from realrl.model.group import Group
from realrl.model.packing import Packing
from realrl.runtime.processes.environment import leave
from tests.forked import run_forked

LENGTHS = {
    "many": [1, 17, 40, 16, 48, 3, 2, 90],
    "one": [133],
    "fewer tokens than ranks": [2, 1],
}
HEADS = [(4, 2), (3, 3), (6, 1)]
"""Query heads and key/value heads."""
RULES = {
    "plain": CAUSAL,
    "all": AttentionRule(window=29, cap=1.5, sinks=torch.zeros(0)),
}
DIM = 8


def draw(lengths: list[int], heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; the gradient of the output; and sinks."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads + kv_heads)
    shapes = (sum(lengths), (heads + 2 * kv_heads) * DIM), (sum(lengths), heads * DIM), (heads,)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def compute(
    lengths: list[int], heads: int, kv_heads: int, rule: AttentionRule, exact: bool, group: Group | None
) -> list[Tensor]:
    """Output and gradients; of a rank of `group`, those of its own tokens, and its part of the sinks' gradient."""
    qkv, upstream, sinks = draw(lengths, heads, kv_heads)
    sinks.requires_grad_(rule.sinks is not None)
    rule = replace(rule, sinks=None if rule.sinks is None else sinks)
    if group is None:
        x = qkv.requires_grad_()
        out = varlen_attention(x, Packing.of(lengths, "cpu"), heads, kv_heads, rule, exact=exact)
    else:
        packing = Packing.of(lengths, "cpu", group=group)
        share = packing.share
        assert share is not None
        x, upstream = share.select(qkv).requires_grad_(), share.select(upstream)
        out = ContextParallel(share).attend(x, heads, kv_heads, rule, exact=exact)
    out.backward(upstream)
    assert x.grad is not None
    found = [out.detach(), x.grad]
    return [*found, sinks.grad] if sinks.grad is not None else found


def run_rank(rank: int, world: int, store: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    group = Group(tuple(range(world)), rank, dist.group.WORLD)
    found = {
        (name, heads, rule, exact): compute(LENGTHS[name], *heads, RULES[rule], exact, group)
        for name in LENGTHS
        for heads in HEADS
        for rule in RULES
        for exact in (False, True)
    }
    torch.save(found, f"{out}-{rank}")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


@pytest.mark.parametrize("world", [2, 4])
def test_outputs_and_gradients_are_those_of_one_rank(tmp_path: Path, world: int) -> None:
    run_forked(run_rank, world, world, str(tmp_path / "store"), str(tmp_path / "out"))
    parts = [torch.load(tmp_path / f"out-{rank}") for rank in range(world)]
    for case in parts[0]:
        name, heads, rule, exact = case
        expected = compute(LENGTHS[name], *heads, RULES[rule], exact, None)
        shares = [
            Packing.of(LENGTHS[name], "cpu", group=Group(tuple(range(world)), i)).share for i in range(world)
        ]
        for figure in range(2):
            found = torch.full_like(expected[figure], torch.nan)
            for part, share in zip(parts, shares, strict=True):
                assert share is not None
                found[share.places[share.real]] = part[case][figure][share.real]
            if exact and figure == 0:
                assert torch.equal(found, expected[0]), case
            torch.testing.assert_close(
                found, expected[figure], rtol=1e-4, atol=1e-5, msg=lambda m, c=case: f"{c}: {m}"
            )
        if len(expected) > 2:
            sinks = sum(part[case][2] for part in parts)
            torch.testing.assert_close(sinks, expected[2], rtol=1e-4, atol=1e-4)
