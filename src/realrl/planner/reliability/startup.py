"""Seconds until all ranks of a run have started, and the connections that each of them opens for its groups.

This is a prediction: the project has not measured a start on many nodes. The runtime makes the counted groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from realrl.plan.communicators import RankSets, group_splits, list_communicators
from realrl.planner.cluster.efficiency import Efficiency

_GLOO_ADDRESS = 168
"""Bytes of a rank's address in the store, beside 8 for each rank of the group: 152 and the name of its host, with
torch 2.13."""
_GLOO_REQUESTS = 2
"""Requests to the store for the address of each rank: to wait for it, and to read it."""
_MEETING = 6
"""Requests of a rank to the store until all have met (`runtime.processes.rendezvous`)."""

# Seconds of the parts of a start.
_PROCESS = 30.0
"""From the order to start processes to their meeting: scheduler, imports, CUDA context. An assumption; imports
alone are 3 to 5 s here, from a local disk."""
_REQUEST = 15e-6
"""A request to the store, which one thread on one node answers (docs/notes/scale.md)."""
_CONNECTION = 100e-6
"""A connection of gloo: a socket on both sides. An assumption."""
_WORLD = 2.5
"""The first communicator of NCCL, without its share per rank: 2.46 s with NCCL 2.22 on 8 H100 (nccl#534)."""
_SPLIT = 0.6
"""Another communicator, which finds the devices and links of its ranks again: 0.52 s there."""
_NCCL_RANK = 265 / 98_304
"""Each rank of a communicator: NCCL starts among 96k GPUs in 265 s (arXiv 2510.20171). For some thousands,
2.5 minutes were reported in January 2024 (nccl#1156)."""
_SPLIT_SHARE = 0.25
"""Share of `_NCCL_RANK` for each rank of the communicator that is split: one of about four all-gathers. An
assumption."""
_COMPILE = 600e-6
"""To compile and check the programs of all ranks, for each of them, on every rank (docs/notes/scale.md)."""
_WARM_UP = 30.0
"""Extra seconds of the first step: kernels are compiled, and graphs are captured. An assumption."""


@dataclass(frozen=True, kw_only=True)
class StartEstimate:
    """Start of all ranks, but for reading weights and checkpoints."""

    seconds: Mapping[str, float]
    """By part."""
    sockets: int
    """Connections of gloo that a rank has open, at most; they count against its limit of open files."""
    communicators: int
    """Communicators of NCCL that a rank is in, at most."""
    store_requests: int
    """Requests that the store of all ranks answers."""
    store_bytes: int
    """Bytes that it sends."""


def predict_start(rank_sets: RankSets, world: int, *, gpus: bool, efficiency: Efficiency) -> StartEstimate:
    """Predict the start of ranks with these groups. A single rank has no groups, so only its process counts."""
    seconds = {"process": _PROCESS, "compile": _COMPILE * world, "warm-up": _WARM_UP}
    if world == 1:
        return StartEstimate(seconds=seconds, sockets=0, communicators=0, store_requests=0, store_bytes=0)
    everyone = tuple(range(world))
    # The default group, the group `Process.control`, and a group for the threads that write checkpoints.
    gloo = [everyone, everyone]
    if not gpus:
        gloo += [everyone, *(ranks for ranks in rank_sets if ranks != everyone)]
    requests = _MEETING * world + _GLOO_REQUESTS * sum(len(ranks) ** 2 for ranks in gloo)
    answered = sum(len(ranks) ** 2 * (_GLOO_ADDRESS + 8 * len(ranks)) for ranks in gloo)
    sockets = _count_most([(ranks, len(ranks)) for ranks in gloo], world)
    seconds["store"] = _REQUEST * requests + answered / efficiency.host_bytes_per_s
    seconds["gloo"] = _CONNECTION * sockets
    communicators = 0
    if gpus:
        first, *others = list_communicators(rank_sets, world)
        communicators = 1 + _count_most([(one.ranks, 1) for one in others], world)
        seconds["nccl"] = _WORLD + _NCCL_RANK * len(first.ranks)
        for split in group_splits(others):
            largest = max(len(one.ranks) for one in split)
            seconds["nccl"] += _SPLIT + _NCCL_RANK * (_SPLIT_SHARE * world + largest)
    return StartEstimate(
        seconds=seconds,
        sockets=sockets,
        communicators=communicators,
        store_requests=requests,
        store_bytes=answered,
    )


def _count_most(groups: list[tuple[tuple[int, ...], int]], world: int) -> int:
    """Sum the counts of each rank's groups, and return the largest sum."""
    total = [0] * world
    for ranks, count in groups:
        for rank in ranks:
            total[rank] += count
    return max(total)
