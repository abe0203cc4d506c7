"""Measurements by the ranks of a run: what torch finds, links, clocks.

Usage: python -m realrl.runtime.doctor.ranks FILE DEVICE, as one of several processes that a launcher's variables
describe; the first one writes what was found to FILE.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from realrl.config.errors import UserError
from realrl.config.files import write_whole
from realrl.runtime.doctor.links import GroupFigures, PeerFigures
from realrl.runtime.doctor.local_measurement import BEGUN
from realrl.runtime.network.node_place import find_node_place
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, leave
from realrl.runtime.processes.process import Process, connect
from realrl.runtime.supervision.orphans import end_with_launcher

_ROUNDS = 8
_LARGE = 8 << 20
"""Bytes of a message whose speed is measured."""
_LARGE_ON_GPU = 128 << 20
_MOST = 16
"""Ranks that rank 0 exchanges messages with, on as many nodes as possible."""


def describe_torch() -> dict[str, Any]:
    """Describe this process's torch: versions, and names and bytes of its GPUs."""
    error, devices = "", []
    try:
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            properties = torch.cuda.get_device_properties(number)
            devices.append([properties.name, properties.total_memory])
    except RuntimeError as failure:
        error = " ".join(str(failure).split())
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() and devices else None
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "devices": devices,
        "error": error,
    }


def measure_ranks(process: Process) -> tuple[list[PeerFigures], GroupFigures | None]:
    """Measure links and clocks between rank 0 and others, on all ranks together; figures are those of rank 0."""
    with process.together():
        _compute(process)
    hosts: list[tuple[str, int]] = process.gather((socket.gethostname(), find_node_place().node))
    peers = []
    for other in choose_peers([node for _, node in hosts]):
        if process.rank in (0, other):
            peers.append(_exchange(process, other, *hosts[other]))
    nodes = len({node for _, node in hosts})
    group = _reduce(process, nodes) if process.gpu is not None and process.world > 1 else None
    return peers, group


def _compute(process: Process) -> None:
    """Compute something; UserError where this torch has no kernels for the GPU, or others keep it from working."""
    try:
        torch.ones(1024, device=process.device).sum().item()
    except RuntimeError as error:
        name = "" if process.gpu is None else f", {process.gpu.name},"
        raise UserError(
            f"rank {process.rank} cannot compute on {process.device}{name} with torch {torch.__version__}:"
            f" {' '.join(str(error).split())[:200]}; install a torch build for it, or leave it out"
        ) from None


def choose_peers(nodes: Sequence[int]) -> list[int]:
    """Choose the ranks that rank 0 exchanges messages with: first of every other node, then those of its own.

    `nodes`: the node of each rank.
    """
    firsts = [rank for rank, node in enumerate(nodes) if rank and node != nodes[rank - 1]]
    return sorted([*firsts, *(rank for rank in range(1, len(nodes)) if nodes[rank] == nodes[0])][:_MOST])


def _exchange(process: Process, other: int, host: str, node: int) -> PeerFigures:
    """Exchange messages between rank 0 and another one; both call this."""
    first = process.rank == 0
    peer = other if first else 0
    offsets: list[tuple[float, float]] = []
    number = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        if first:
            sent = time.time()
            dist.send(number, peer, group=process.control)
            dist.recv(number, peer, group=process.control)
            back = time.time()
            offsets.append((back - sent, float(number) - (sent + back) / 2))
        else:
            dist.recv(number, peer, group=process.control)
            number.fill_(time.time())
            dist.send(number, peer, group=process.control)
    round_trip, offset = min(offsets, default=(0.0, 0.0))
    message = torch.zeros(_LARGE, dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        for sender in (True, False):
            (dist.send if sender == first else dist.recv)(message, peer, group=process.control)
        seconds.append((time.perf_counter() - begin) / 2)
    return PeerFigures(
        rank=other,
        host=host,
        node=node,
        round_trip=round_trip,
        offset=offset,
        bytes_per_s=_LARGE / min(seconds),
    )


def _reduce(process: Process, nodes: int) -> GroupFigures:
    """Measure an all-reduce of all GPUs."""
    values = torch.zeros(_LARGE_ON_GPU // 4, device=process.device)
    everyone = tuple(range(process.world))
    group = process.groups({everyone: frozenset({"data"})})[everyone]
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        group.sum(values)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    sent = 2 * _LARGE_ON_GPU * (process.world - 1) / process.world
    return GroupFigures(nodes=nodes, bytes_per_s=sent / min(seconds))


def measure_as_rank(arguments: Sequence[str]) -> int:
    """Measure as one of several processes; the exit status. The first one writes a file."""
    file, device = arguments
    end_with_launcher(int(os.environ[LAUNCHER_VARIABLE]))
    Path(file).with_name(f"{BEGUN}{os.environ['RANK']}").touch()
    found: dict[str, Any] = {"torch": describe_torch(), "peers": [], "group": None, "error": ""}
    choice: Literal["auto", "cpu", "cuda"] = (
        "cpu" if device == "cpu" else "cuda" if device == "cuda" else "auto"
    )
    try:
        with connect(choice) as process:
            peers, group = measure_ranks(process)
            found |= {"peers": list(map(asdict, peers)), "group": group and asdict(group)}
    except UserError as error:
        found["error"] = str(error)
    except (RuntimeError, OSError) as error:
        found["error"] = f"ranks cannot exchange messages: {' '.join(str(error).split())[:300]}"
    if os.environ["RANK"] == "0":
        write_whole(Path(file), json.dumps(found))
    return 0


if __name__ == "__main__":
    leave(measure_as_rank(sys.argv[1:]))
