"""Agreement of ranks on a reallocation, checked before parameters move."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.runtime.processes.process import Process

# Above every tag of `Exchange`, with which these messages share the control group.
_DIGEST_TAG, _PAIR_TAG, CHECKSUM_TAG = 1 << 22, 1 << 23, 1 << 24


class ReallocationError(Exception):
    """Disagreement of ranks on what is sent, or data that arrived damaged: a bug, or a fault of the hardware."""


def agree(
    process: Process, label: str, ranks: Sequence[int], schedule: str, pairs: Mapping[int, str]
) -> None:
    """Check that `schedule` is the same on all `ranks`, and each pair agrees on its messages; else
    ReallocationError.

    `pairs`: peer -> hash of what is exchanged with it. All ranks call this together.
    """
    mine, first = _digest(schedule), ranks[0]
    everyone = torch.empty(len(ranks), len(mine), dtype=torch.uint8)
    if process.rank == first:
        rows = dict(zip(ranks, everyone, strict=True))
        rows.pop(first).copy_(mine)
        swap(process, {}, rows, _DIGEST_TAG)
        swap(process, dict.fromkeys(rows, everyone), {}, _DIGEST_TAG + 1)
    else:
        swap(process, {first: mine}, {}, _DIGEST_TAG)
        swap(process, {}, {first: everyone}, _DIGEST_TAG + 1)
    other = [rank for rank, row in zip(ranks, everyone, strict=True) if not torch.equal(row, mine)]
    if other:
        names = ", ".join(map(str, other))
        raise ReallocationError(f"{label}: rank {process.rank} and ranks {names} have different schedules")
    own = {peer: _digest(text) for peer, text in pairs.items()}
    theirs = swap(process, own, {peer: torch.empty_like(row) for peer, row in own.items()}, _PAIR_TAG)
    for peer, row in own.items():
        if not torch.equal(row, theirs[peer]):
            raise ReallocationError(
                f"{label}: rank {process.rank} and rank {peer} cut what they exchange into different messages"
            )


def swap(
    process: Process, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int
) -> Mapping[int, Tensor]:
    """Exchange small CPU tensors: send by rank, fill others, and return those."""
    works = [dist.isend(tensor, peer, group=process.control, tag=tag) for peer, tensor in sent.items()]
    for peer, tensor in received.items():
        dist.recv(tensor, peer, group=process.control, tag=tag)
    for work in works:
        assert work is not None, "every rank is part of the control group"
        work.wait()
    return received


def _digest(text: str) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
