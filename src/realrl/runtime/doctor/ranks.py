"""Measurements on the ranks of a run: the devices that torch finds, and the links between ranks.

Usage: python -m realrl.runtime.doctor.ranks FILE DEVICE, as a rank of a launcher. Rank 0 writes FILE twice: with
torch's versions and GPUs as soon as torch is loaded, and later with the links too.
"""

import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from realrl.config.errors import UserError
from realrl.config.files import write_whole
from realrl.runtime.doctor.links import Link
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, leave
from realrl.runtime.processes.network import find_node_place
from realrl.runtime.processes.process import Process, connect
from realrl.runtime.supervision.orphans import end_with_launcher

_LARGE, _LARGE_ON_GPU = 8 << 20, 128 << 20
"""Bytes of the messages that measure speed, on CPUs and on GPUs."""
_MOST_PEERS = 16
"""Maximum number of ranks with which rank 0 measures a link."""


def describe_torch() -> dict[str, Any]:
    """Describe torch in this process: its versions, and names and memory in bytes of its GPUs."""
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


def measure_links(process: Process) -> list[Link]:
    """Measure the links from rank 0 to other ranks over gloo, and between all GPUs over NCCL.

    All ranks call this together. Only rank 0 returns all links.
    """
    with process.together():
        _compute(process)
    everyone: list[tuple[str, int]] = process.gather((socket.gethostname(), find_node_place().node))
    hosts, nodes = zip(*everyone, strict=True)
    first_of_nodes = [rank for rank in range(1, len(nodes)) if nodes[rank] != nodes[rank - 1]]
    of_this_node = [rank for rank in range(1, len(nodes)) if nodes[rank] == nodes[0]]
    links = []
    for other in (first_of_nodes + of_this_node)[:_MOST_PEERS]:
        if process.rank in (0, other):
            round_trip = _exchange(process, other, 8, rounds=8)
            speed = 2 * _LARGE / _exchange(process, other, _LARGE, rounds=3)
            name = f"gloo from rank 0 to rank {other} ({hosts[other]})"
            between = nodes[other] != nodes[0]
            links.append(Link(name=name, between_nodes=between, bytes_per_s=speed, round_trip=round_trip))
    if process.gpu is not None and process.world > 1:
        speed, several = _reduce(process), len(set(nodes)) > 1
        links.append(Link(name="NCCL among all GPUs", between_nodes=several, bytes_per_s=speed, nccl=True))
    return links


def _compute(process: Process) -> None:
    """Try a small computation on the device of this rank.

    Raises UserError if it fails: for example, torch has no kernels for the GPU, or another program blocks it.
    """
    try:
        torch.ones(1024, device=process.device).sum().item()
    except RuntimeError as error:
        name = "" if process.gpu is None else f", {process.gpu.name},"
        raise UserError(
            f"rank {process.rank} cannot compute on {process.device}{name} with torch {torch.__version__}:"
            f" {' '.join(str(error).split())[:200]}; install a torch build for it, or leave it out"
        ) from None


def _exchange(process: Process, other: int, size: int, rounds: int) -> float:
    """Send a message of `size` bytes from rank 0 to another rank and back. Returns the shortest time in seconds.

    Both ranks call this.
    """
    first = process.rank == 0
    message = torch.zeros(size, dtype=torch.uint8)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for sends in (first, not first):
            (dist.send if sends else dist.recv)(message, other if first else 0, group=process.control)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _reduce(process: Process) -> float:
    """Measure an all-reduce over all GPUs. Returns the bytes per second that each GPU sends."""
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
    # In a ring, each rank sends every byte twice, except its own part.
    return 2 * _LARGE_ON_GPU * (process.world - 1) / process.world / min(seconds)


def measure_as_rank(file: Path, device: Literal["auto", "cpu", "cuda"]) -> int:
    """Measure as a local rank. Rank 0 writes `file`. Returns the exit status."""
    end_with_launcher(int(os.environ[LAUNCHER_VARIABLE]))
    found: dict[str, Any] = {"torch": describe_torch(), "links": [], "error": ""}

    def write() -> None:
        if os.environ["RANK"] == "0":
            write_whole(file, json.dumps(found))

    write()
    try:
        with connect(device) as process:
            found["links"] = [asdict(link) for link in measure_links(process)]
    except UserError as error:
        found["error"] = str(error)
    except (RuntimeError, OSError) as error:
        found["error"] = f"ranks cannot exchange messages: {' '.join(str(error).split())[:300]}"
    write()
    return 0


if __name__ == "__main__":
    leave(measure_as_rank(Path(sys.argv[1]), cast(Literal["auto", "cpu", "cuda"], sys.argv[2])))
