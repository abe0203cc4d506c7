"""Examination of all nodes by ranks that torchrun has started."""

import os
import socket
import threading
from typing import Any, Literal, cast

from realrl.config.errors import UserError
from realrl.runtime.doctor.examine import RANK_SECONDS, Subject, examine_node, judge_ranks, name_node
from realrl.runtime.doctor.finding import Finding, ok, problem
from realrl.runtime.doctor.local_measurement import RankFigures
from realrl.runtime.doctor.ranks import describe_torch, measure_ranks
from realrl.runtime.doctor.versions import compare_nodes, list_versions
from realrl.runtime.output.shared_directory import check_shared
from realrl.runtime.processes.environment import ABANDONED
from realrl.runtime.processes.process import Process, connect


def examine_together(subject: Subject) -> list[Finding]:
    """Examine every node by its first rank, and what is between them by all; rank 0 has all findings.

    Where ranks do not meet in time, each has those of its own node. A thread may then be left behind.
    """
    own = name_node(examine_node(subject)) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    found: list[list[Finding]] = []
    failures: list[str] = []
    met = threading.Event()

    def meet() -> None:
        try:
            with connect(cast(Literal["auto", "cpu", "cuda"], subject.device)) as process:
                met.set()
                found.append(_examine_meeting(subject, process, own))
        except Exception as error:
            failures.append(" ".join(str(error).split())[:300])

    thread = threading.Thread(target=meet, name=f"{ABANDONED}-meeting", daemon=True)
    thread.start()
    thread.join(RANK_SECONDS)
    if found:
        return found[0]
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if met.is_set():
        reason = failures[0] if failures else f"not within {RANK_SECONDS:g} s"
        text = (
            f"ranks have met at {where}, but cannot exchange messages ({reason}); check that the MTU is the same on"
            " the whole way, and that firewalls allow all ports between nodes; of GPUs, NCCL_DEBUG=INFO tells more"
        )
    else:
        reason = failures[0] if failures else f"not all have come within {RANK_SECONDS:g} s"
        text = (
            f"{os.environ['WORLD_SIZE']} ranks do not meet at {where} ({reason}); check the address, and that"
            " firewalls allow this and all other ports between nodes"
        )
    return [*own, problem("links", text)]


def _examine_meeting(subject: Subject, process: Process, own: list[Finding]) -> list[Finding]:
    nodes: list[list[Finding]] = process.gather(own)
    torch = describe_torch()
    installed = process.gather(list_versions() | {"host": socket.gethostname(), **torch})
    peers, group = measure_ranks(process)
    findings = [finding for part in nodes for finding in part]
    if process.world > 1 and subject.cluster.nodes > 1:
        findings += _check_run_directory(subject, process)
    if process.rank == 0:
        findings += compare_nodes([installed[rank] for rank in subject.cluster.bounds[:-1]])
        findings += judge_ranks(subject, RankFigures(torch=torch, peers=tuple(peers), group=group))
    everyone: list[list[Any]] = process.gather([finding.to_json() for finding in findings])
    return [Finding(**one) for one in everyone[0]]


def _check_run_directory(subject: Subject, process: Process) -> list[Finding]:
    try:
        check_shared(subject.run_dir, process, subject.cluster)
    except UserError as error:
        return [problem("run directory", str(error))]
    return [ok("run directory", "all nodes see the same directory")]
