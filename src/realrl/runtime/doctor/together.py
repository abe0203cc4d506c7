"""Examination of all nodes by ranks that torchrun has started."""

import os
import threading
import time
from pathlib import Path
from typing import Any, Literal, cast

from realrl.runtime.doctor.examine import RANK_SECONDS, Subject, examine_node, judge_ranks, name_node
from realrl.runtime.doctor.finding import Finding, ok, problem
from realrl.runtime.doctor.local_measurement import RankFigures
from realrl.runtime.doctor.ranks import describe_torch, measure_ranks
from realrl.runtime.processes.environment import ABANDONED
from realrl.runtime.processes.process import Process, connect

_SEEN = 5.0
"""Seconds until a node sees a file that another one has written."""


def examine_together(subject: Subject) -> list[Finding]:
    """Examine every node by its first rank, and what is between them by all; rank 0 has all findings.

    Where ranks do not meet in time, each has those of its own node. A thread may then be left behind.
    """
    own = name_node(examine_node(subject)) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    found: list[list[Finding]] = []
    failures: list[str] = []

    def meet() -> None:
        try:
            with connect(cast(Literal["auto", "cpu", "cuda"], subject.device)) as process:
                found.append(_examine_meeting(subject, process, own))
        except Exception as error:
            failures.append(" ".join(str(error).split())[:300])

    thread = threading.Thread(target=meet, name=f"{ABANDONED}-meeting", daemon=True)
    thread.start()
    thread.join(RANK_SECONDS)
    if found:
        return found[0]
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    reason = failures[0] if failures else f"not all have come within {RANK_SECONDS:g} s"
    text = f"{os.environ['WORLD_SIZE']} ranks do not meet at {where} ({reason}); check address, port and firewall"
    return [*own, problem("links", text)]


def _examine_meeting(subject: Subject, process: Process, own: list[Finding]) -> list[Finding]:
    nodes: list[list[Finding]] = process.gather(own)
    torch = describe_torch()
    peers, group = measure_ranks(process)
    findings = [finding for part in nodes for finding in part]
    if process.world > 1 and subject.cluster.nodes > 1:
        findings += _check_shared(subject.run_dir, process)
    if process.rank == 0:
        findings += judge_ranks(subject, RankFigures(torch=torch, peers=tuple(peers), group=group))
    everyone: list[list[Any]] = process.gather([finding.to_json() for finding in findings])
    return [Finding(**one) for one in everyone[0]]


def _check_shared(run_dir: Path, process: Process) -> list[Finding]:
    """Check that all nodes see what the first one writes where the run will; all ranks call this together."""
    nearest = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    name = f".realrl-doctor-{os.getpid()}" if process.rank == 0 else ""
    file = Path(process.gather(str(nearest / name))[0])
    try:
        if process.rank == 0:
            file.touch()
        process.gather(None)
        seen = _appears(file)
        everyone = process.gather((seen, os.uname().nodename))
    except OSError:
        return []  # said by the check of the directory itself
    finally:
        if process.rank == 0:
            file.unlink(missing_ok=True)
    blind = sorted({host for seen, host in everyone if not seen})
    if blind:
        text = (
            f"{run_dir} is not one directory on all nodes: {', '.join(blind)} do not see what rank 0 writes; choose"
            " one on a file system that they share"
        )
        return [problem("run directory", text)]
    return [ok("run directory", "all nodes see the same directory")]


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + _SEEN
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
