"""Look for problems on a machine, or on all nodes, that would stop a run or slow it down.

Importing this module does not import torch.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from realrl.config.errors import UserError
from realrl.config.paths import local_path
from realrl.huggingface.directory import check_directories
from realrl.plan.cluster import Cluster
from realrl.plan.presets import SEARCH
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import find_gpu_kind
from realrl.recipe.experiment import Experiment
from realrl.runtime.doctor.links import Measured, judge_links, measure_locally
from realrl.runtime.doctor.machine import (
    Finding,
    Said,
    check_disk,
    check_gpus,
    check_limits,
    check_versions,
    compare_nodes,
    describe_node,
    list_gpus,
    run_checks,
)
from realrl.runtime.output.tracker_threads import check_trackers
from realrl.runtime.prepare.cluster import named_cluster, written_cluster
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.fit.check import check_fit
from realrl.runtime.prepare.gpu import Gpu, Here, try_kernels
from realrl.runtime.prepare.job import Job, make_job
from realrl.runtime.processes.environment import ABANDONED
from realrl.runtime.processes.network import NUMBERS, NodePlace, find_node_place

if TYPE_CHECKING:
    from realrl.runtime.processes.process import Process

SECONDS, RANK_SECONDS = 10.0, 40.0
"""Maximum seconds for the checks of a machine, and for its ranks to connect and measure."""
_RANKS_WITHOUT_RECIPE = 2
"""Number of processes that exchange messages on a machine without GPUs, if there is no recipe."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What to examine: devices, a run directory, and a recipe if the user names one."""

    cluster: Cluster
    ranks: int
    """Number of processes on this machine."""
    device: Literal["auto", "cpu", "cuda"]
    run_dir: Path
    experiment: Experiment | None
    job: Job | None
    """The recipe with its plan and memory. None without a recipe or plan, or if the recipe has a mistake."""
    spec: ClusterSpec | None
    """The planner's figures for the devices; None if the user does not name their kind."""
    gpus: Sequence[Mapping[str, str]]
    """GPUs of this machine that may be used, as `list_gpus` returns them."""
    driver_error: str
    recipe_error: str


def find_subject(
    experiment: Experiment | None, cluster: str | None, run_dir: str | None, *, launched: NodePlace | None
) -> Subject:
    """Determine what to examine. Raises UserError for an invalid cluster.

    `launched`: the node of this process; None if no launcher has started the process.
    """
    device = "auto" if experiment is None else experiment.device
    text = cluster or ("auto" if experiment is None else experiment.cluster)
    written = written_cluster(text)
    found = written if launched is None else launched.match(None if launched.even else written)
    gpus: list[dict[str, str]] = []
    job, driver_error, recipe_error = None, "", ""
    try:
        gpus = [] if device == "cpu" else list_gpus()
    except UserError as error:
        driver_error = str(error)
    if found is None:
        found = Cluster(1, len(gpus) or (1 if experiment is not None else _RANKS_WITHOUT_RECIPE))
    if experiment is not None and cluster is not None:
        experiment = experiment.model_copy(update={"cluster": cluster})
    if experiment is not None and experiment.plan != SEARCH:
        try:
            job = make_job(experiment, found)
        except UserError as error:
            recipe_error = str(error)
    return Subject(
        cluster=found,
        ranks=found.largest_node if launched is None else len(launched.ranks),
        device=device,
        run_dir=local_path(run_dir or (experiment.run_dir if experiment is not None else ".")),
        experiment=experiment,
        job=job,
        spec=named_cluster(text),
        gpus=gpus,
        driver_error=driver_error,
        recipe_error=recipe_error,
    )


def find_launched(environment: Mapping[str, str]) -> NodePlace | None:
    """Find the node of this process among the nodes that a launcher has started; None without a launcher.

    Raises UserError if a variable that counts or numbers ranks has no valid number.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    numbers = {name: environment[name] for name in NUMBERS if name in environment}
    wrong = any(not text.isdecimal() for text in numbers.values())
    if wrong or not int(numbers.get("LOCAL_WORLD_SIZE", 1)) or not int(numbers["WORLD_SIZE"]):
        given = ", ".join(f"{name}={text}" for name, text in numbers.items())
        raise UserError(
            f"{given}: a launcher does not set these so; unset them, or start the command with torchrun"
        )
    return find_node_place(environment)


def examine_locally(subject: Subject) -> list[Finding]:
    """Examine this machine. This starts local processes, which measure links like the ranks of a run."""
    measured = Measured()

    def measure() -> None:
        nonlocal measured
        measured = measure_locally(subject.ranks, subject.device, RANK_SECONDS)

    findings = run_checks([*_list_checks(subject), ("links", measure)], RANK_SECONDS + SECONDS)
    if subject.cluster.nodes > 1:
        text = f"this is one of {subject.cluster.nodes} nodes; start the command with torchrun to examine all"
        findings.append(Finding("links", "ok", text))
    return findings + judge_ranks(subject, measured)


def _list_checks(subject: Subject) -> list[tuple[str, Callable[[], Said]]]:
    """List the checks of this machine that need no other process."""
    need = count_checkpoint_bytes(subject.job)
    gpus = min(len(subject.gpus), subject.ranks)
    return [
        ("versions", check_versions),
        ("GPUs", lambda: check_gpus(subject.gpus, subject.driver_error)),
        ("limits", lambda: check_limits(subject.ranks, subject.cluster.size, gpus)),
        ("disk", lambda: check_disk(subject.run_dir, need)),
    ]


def count_checkpoint_bytes(job: Job | None) -> int | None:
    """Compute the size of a checkpoint in bytes; None if the sizes of a model are unknown."""
    if job is None or job.unknown:
        return None
    total = 0
    for stored in job.models.stored.values():
        # Two moments and, if parameters have lower precision, a master copy, all in float32.
        states = 2 + (stored.element_bytes < 4)
        for parameters in stored.sets.values():
            if parameters.trainable:
                numbers = sum(tensor.numel for tensor in parameters.tensors)
                total += numbers * (stored.element_bytes + 4 * states)
    return total


def judge_ranks(subject: Subject, measured: Measured) -> list[Finding]:
    """Judge the measurements of the ranks, and check the recipe against the devices of the ranks."""
    here = _find_here(subject, measured.torch)
    spec = subject.spec or _guess_spec(subject.cluster, here)
    torch, experiment = measured.torch, subject.experiment
    checks: list[tuple[str, Callable[[], Said | None]]] = [("links", lambda: judge_links(measured, spec))]
    if torch is not None:
        checks.append(("torch", lambda: check_torch(torch, subject)))
    if experiment is not None:
        checks += [
            ("recipe", lambda: check_directories(experiment)),
            ("recipe", lambda: check_trackers(experiment)),
            ("recipe", lambda: _check_fit(experiment, subject, here)),
            ("functions", lambda: _try_functions(experiment)),
        ]
    return run_checks(checks, RANK_SECONDS)


def check_torch(torch: Mapping[str, Any], subject: Subject) -> Said:
    """Compare the GPUs that torch finds with the GPUs that the driver lists, and with the number of local ranks.

    `torch` is the result of `describe_torch`.
    """
    name, listed, seen = f"torch {torch['torch']}", len(subject.gpus), len(torch["devices"])
    if subject.device == "cpu" or not (seen or listed or subject.device == "cuda"):
        yield "ok", f"{name} computes on CPUs"
    elif not (seen or listed):
        yield "problem", "device=cuda, but there is no GPU; use device=cpu"
    elif not seen:
        reason = torch["error"] or f"it is built for CUDA {torch['cuda']}"
        advice = "update the driver, or install a torch build for the CUDA that `nvidia-smi` shows"
        yield "problem", f"the driver lists {listed} GPUs, and {name} can use none ({reason}); {advice}"
    elif seen < subject.ranks:
        text = f"{subject.ranks} processes need as many GPUs, and torch finds {seen}"
        yield "problem", f"{text}; make --cluster smaller"
    else:
        gpu = torch["devices"][0][0]
        yield "ok", f"{name}, CUDA {torch['cuda']}, NCCL {torch['nccl']}; {seen} x {gpu}"


def _find_here(subject: Subject, torch: Mapping[str, Any] | None) -> Here | None:
    """Find the kind of device that ranks compute on; None if no rank could report it."""
    if subject.device == "cpu":
        return "cpu"
    if torch is None:
        return None
    return Gpu(*min(torch["devices"], key=lambda gpu: gpu[1])) if torch["devices"] else "cpu"


def _guess_spec(cluster: Cluster, here: Here | None) -> ClusterSpec | None:
    """Find the planner's figures for the devices of the ranks; None for GPUs of an unknown kind."""
    kind = find_gpu_kind(here.name) if isinstance(here, Gpu) else None
    name = "cpu" if here == "cpu" else None if kind is None else kind.name
    try:
        return None if name is None else ClusterSpec.parse(f"{name}:{cluster}")
    except UserError:
        return None


def _check_fit(experiment: Experiment, subject: Subject, here: Here | None) -> Said:
    """Check, like `realrl train`, that a recipe fits the devices.

    `here`: the device that ranks compute on; None if it is unknown.
    """
    if subject.recipe_error:
        yield "problem", subject.recipe_error
    job = subject.job
    if here is not None:
        check_kind(experiment, subject.cluster, here)
        if here != "cpu":
            try_kernels(experiment.kernels)
    if job is not None and not job.unknown:
        check_fit(job, here)
    if job is not None or experiment.plan == SEARCH:
        unknown = "" if job is None else ", ".join(job.unknown)
        later = f"; the hub tells the sizes of {unknown} when it starts" if unknown else ""
        later += "; its plan is searched for when it starts" if job is None else ""
        text = f"{experiment.algorithm} on cluster {subject.cluster} is expected to fit{later}"
        yield "ok", text


def _try_functions(experiment: Experiment) -> Said:
    """Load the functions of a recipe, and try its verifiers, as a run does before its start."""
    # This import needs torch, which the other checks must not import.
    from realrl.runtime.prepare.inputs import check_functions

    names = check_functions(experiment)
    if names:
        yield "ok", f"{', '.join(names)} {'work' if len(names) > 1 else 'works'}"


def examine_together(subject: Subject) -> list[Finding]:
    """Examine every node on its first rank, and links on all ranks. Every rank returns all findings.

    If the ranks do not connect in time, each rank returns the findings of its own node. The thread that connects
    may then keep waiting.
    """
    from realrl.runtime.processes.process import connect

    own: list[Finding] = []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        host = socket.gethostname()
        own = [replace(finding, node=host) for finding in run_checks(_list_checks(subject), SECONDS)]
    found: list[list[Finding]] = []
    failures: list[str] = []
    met = threading.Event()

    def meet() -> None:
        try:
            with connect(subject.device) as process:
                met.set()
                found.append(_examine_meeting(subject, process, own))
        except Exception as error:
            failures.append(" ".join(str(error).split())[:300])

    thread = threading.Thread(target=meet, name=f"{ABANDONED}-meeting", daemon=True)
    thread.start()
    thread.join(RANK_SECONDS)
    if found:
        return found[0]
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    reason = failures[0] if failures else f"not within {RANK_SECONDS:g} s"
    what = "exchange messages, after they have met" if met.is_set() else "meet"
    text = f"{os.environ['WORLD_SIZE']} ranks do not {what} at {place} ({reason})"
    advice = "check the address, that firewalls allow all ports between nodes, and that their MTU is the same"
    return [*own, Finding("links", "problem", f"{text}; {advice}")]


def _examine_meeting(subject: Subject, process: "Process", own: list[Finding]) -> list[Finding]:
    from realrl.runtime.doctor.ranks import describe_torch, measure_links
    from realrl.runtime.output.shared_directory import check_shared

    findings: list[Finding] = [finding for node in process.gather(own) for finding in node]
    torch = describe_torch()
    nodes = dict(process.gather((socket.gethostname(), describe_node(torch))))
    links = measure_links(process)
    if subject.cluster.nodes > 1:
        try:
            check_shared(subject.run_dir, process, subject.cluster)
            findings.append(Finding("disk", "ok", "all nodes see the same run_dir"))
        except UserError as error:
            findings.append(Finding("disk", "problem", str(error)))
    if process.rank == 0:
        findings += run_checks([("versions", lambda: compare_nodes(nodes))], SECONDS)
        findings += judge_ranks(subject, Measured(torch=torch, links=links))
    everyone: list[list[Finding]] = process.gather(findings)
    return everyone[0]
