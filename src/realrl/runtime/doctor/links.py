"""Measure links between local processes, and compare links with the planner's figures. Does not import torch."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.runtime.doctor.machine import Said
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, STORE_VARIABLE

_MOST_RANKS = 16
"""Maximum number of processes to start. If that many processes can exchange messages, more can too."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A measured link between ranks."""

    name: str
    between_nodes: bool
    bytes_per_s: float
    """Speed of a large message. For NCCL, the speed at which each GPU sends in a large all-reduce."""
    round_trip: float = 0.0
    """Seconds that a small message takes to another rank and back."""
    nccl: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of the ranks."""

    torch: Mapping[str, Any] | None = None
    """Result of `describe_torch`; None if no process could load torch."""
    links: Sequence[Link] = ()
    error: str = ""
    """Reason why measurements are missing; empty if all are present."""


def measure_locally(ranks: int, device: str, seconds: float) -> Measured:
    """Start a process for each rank, at most 16, and wait at most `seconds` for their measurements."""
    ranks = min(ranks, _MOST_RANKS)
    with tempfile.TemporaryDirectory(prefix="realrl-doctor-") as scratch:
        file, log = Path(scratch) / "found.json", Path(scratch) / "log"
        command = [sys.executable, "-m", "realrl.runtime.doctor.ranks", str(file), device]
        environment = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            STORE_VARIABLE: str(Path(scratch) / "store"),
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        deadline, late = time.monotonic() + seconds, False
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("ab") as out:
                for rank in range(ranks):
                    own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(
                        subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                    )
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    error = found.get("error", "")
    if not error and (late or not found):
        step = "exchange messages" if found else "load torch"
        reason = f" within {seconds:g} s" if late else f": {words[-1] if words else 'they gave no reason'}"
        error = f"{ranks} processes did not {step}{reason}"
    links = [Link(**link) for link in found.get("links", ())]
    return Measured(torch=found.get("torch"), links=links, error=error)


def judge_links(measured: Measured, spec: ClusterSpec | None) -> Said:
    """Compare measured links with the links that predictions assume. `spec` is None for an unknown device kind."""
    if measured.error:
        # Virtual machines and PCIe switches sometimes lose messages between GPUs.
        gpus = measured.torch is not None and measured.torch["devices"]
        advice = "; try NCCL_P2P_DISABLE=1, and NCCL_DEBUG=INFO says more" if gpus else ""
        yield "problem", measured.error + advice
    # Predictions for GPUs do not use gloo's links.
    used = [link for link in measured.links if link.nccl] or measured.links
    for between in (False, True):
        links = [link for link in used if link.between_nodes == between]
        if not links:
            continue
        slowest = min(links, key=lambda link: link.bytes_per_s)
        text = f"{slowest.name}: {slowest.bytes_per_s / 1e9:.3g} GB/s"
        if slowest.round_trip:
            text += f", {slowest.round_trip * 1e3:.3g} ms there and back"
        if spec is None or spec.groups[0].device.cpu == slowest.nccl:
            yield "ok", text
            continue
        if between:
            assumed = min(group.node_bytes_per_s / group.devices_per_node for group in spec.groups)
        else:
            assumed = min(group.device.link_bytes_per_s for group in spec.groups)
        text += f"; plans are predicted with {assumed / 1e9:.3g} GB/s"
        # Allow for a factor of 4, because a short measurement is rough.
        if slowest.bytes_per_s < assumed / 4:
            advice = "check the links, or measure them with `realrl profile` and name its file in profile"
            yield "warning", f"{text}; {advice}"
        else:
            yield "ok", text
