"""Seconds until all ranks of a run have started, and the connections that each of them opens for its groups.

This is a prediction, because the project has not measured a start on many nodes. The counted groups are those that
the runtime makes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from realrl.plan.communicators import RankSets, group_splits, list_communicators
from realrl.planner.cluster.efficiency import Efficiency

_GLOO_ADDRESS = 168
"""Bytes of a rank's address in the store, without 8 bytes for each rank of the group: 152 bytes and the name of the
host, with torch 2.13."""
_GLOO_REQUESTS = 2
"""Requests to the store for the address of each rank: to wait for it, and to read it."""
_MEETING = 6
"""Requests of a rank to the store until all ranks have met (`runtime.processes.rendezvous`)."""

# Seconds of the parts of a start.
_PROCESS = 30.0
"""Assumed seconds from the request for processes until they meet: scheduler, imports, CUDA context. Imports alone
take 3 to 5 s from a local disk."""
_REQUEST = 15e-6
"""Seconds of a request to the store, which one thread on one node answers (docs/notes/scale.md)."""
_CONNECTION = 100e-6
"""Assumed seconds to open a gloo connection, which is a socket on both sides."""
_WORLD = 2.5
"""Seconds to make the first NCCL communicator, without the part that grows with its ranks: 2.46 s with NCCL 2.22 on
8 H100 (nccl#534)."""
_SPLIT = 0.6
"""Seconds to make another communicator, which finds the devices and links of its ranks again: 0.52 s in
nccl#534."""
_NCCL_RANK = 265 / 98_304
"""Seconds per rank of a communicator. NCCL starts among 96k GPUs in 265 s (arXiv 2510.20171). For some thousands of
GPUs, 2.5 minutes were reported in January 2024 (nccl#1156)."""
_SPLIT_SHARE = 0.25
"""Assumed fraction of `_NCCL_RANK` for each rank of the communicator that is split. A split needs one of about four
all-gathers."""
_COMPILE = 600e-6
"""Seconds per rank to compile and check its program. Every rank does this for all ranks (docs/notes/scale.md)."""
_WARM_UP = 30.0
"""Assumed extra seconds of the first step, in which kernels are compiled and graphs are captured."""


@dataclass(frozen=True, kw_only=True)
class StartEstimate:
    """Prediction of the start of all ranks, without reading weights and checkpoints."""

    seconds: Mapping[str, float]
    """Seconds of each part of the start, by name."""
    sockets: int
    """Largest number of gloo connections that any rank has open. They count towards its limit of open files."""
    communicators: int
    """Largest number of NCCL communicators that any rank is in."""
    store_requests: int
    """Number of requests that the store answers for all ranks."""
    store_bytes: int
    """Bytes that the store sends."""


def predict_start(rank_sets: RankSets, world: int, *, gpus: bool, efficiency: Efficiency) -> StartEstimate:
    """Predict the start of `world` ranks with the groups `rank_sets`. A single rank has no groups, so only its
    process counts."""
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
