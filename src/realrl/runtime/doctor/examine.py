"""Examination of a machine, or of all nodes of a run, for what would stop a run or slow it down. No torch."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.paths import local_path
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import find_gpu_kind
from realrl.recipe.experiment import Experiment
from realrl.runtime.doctor.finding import Examination, Finding, ok, problem, run_checks, warning
from realrl.runtime.doctor.gpus import (
    DriverGpu,
    ask_driver,
    check_build_tools,
    check_driver,
    check_torch_gpus,
    choose_visible,
    parse_gpus,
)
from realrl.runtime.doctor.links import judge_clocks, judge_links
from realrl.runtime.doctor.local_measurement import RankFigures, measure_locally
from realrl.runtime.doctor.machine import Host, check_cores, check_limits, check_memory, check_shared_memory
from realrl.runtime.doctor.network import check_host_name, check_hub, check_interfaces, check_ports
from realrl.runtime.doctor.recipe_needs import (
    RecipeNeeds,
    check_recipe,
    find_needs,
    list_hub_names,
    try_functions,
)
from realrl.runtime.doctor.storage import check_storage
from realrl.runtime.doctor.variables import check_variables
from realrl.runtime.doctor.versions import check_versions
from realrl.runtime.prepare.cluster import named_cluster, written_cluster
from realrl.runtime.prepare.gpu import Gpu, Here
from realrl.runtime.processes.network import NUMBERS, NodePlace, find_node_place

SECONDS, RANK_SECONDS = 10.0, 40.0
"""Most seconds for the checks of a machine, and for its ranks to meet and measure."""
_WITHOUT_RECIPE = 2
"""Processes that exchange messages on a machine without GPUs, where no recipe says how many there are."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of an examination: devices, and the recipe and the directory of a run where they are given."""

    cluster: Cluster
    ranks: int
    """Processes on this machine."""
    device: str
    run_dir: Path
    experiment: Experiment | None
    needs: RecipeNeeds
    spec: ClusterSpec | None
    """The planner's figures of the devices, where the user names their kind."""
    gpus: int
    """GPUs of this machine that may be used."""
    listed_gpus: int
    """GPUs of this machine, with those that CUDA_VISIBLE_DEVICES hides."""
    launched: bool
    """Whether a launcher has started this process as one of several."""


def find_subject(
    experiment: Experiment | None, cluster: str | None, run_dir: str | None, *, launched: NodePlace | None
) -> Subject:
    """Find out what to examine; `launched`: the node of this process among those that a launcher has started.

    UserError for a wrong cluster.
    """
    device = "auto" if experiment is None else experiment.device
    text = cluster or ("auto" if experiment is None else experiment.cluster)
    written = written_cluster(text)
    found = written if launched is None else launched.match(None if launched.even else written)
    listed = [] if device == "cpu" else list_gpus()
    gpus = len(choose_visible(listed, os.environ))
    if found is None:
        found = Cluster(1, gpus or (1 if experiment is not None else _WITHOUT_RECIPE))
    if cluster is not None and experiment is not None:
        experiment = experiment.model_copy(update={"cluster": cluster})
    directory = run_dir or (experiment.run_dir if experiment is not None else ".")
    return Subject(
        cluster=found,
        ranks=found.largest_node if launched is None else len(launched.ranks),
        device=device,
        run_dir=local_path(directory),
        experiment=experiment,
        needs=RecipeNeeds(None) if experiment is None else find_needs(experiment, found),
        spec=named_cluster(text),
        gpus=gpus,
        listed_gpus=len(listed),
        launched=launched is not None,
    )


def find_launched(environment: Mapping[str, str]) -> NodePlace | None:
    """Find the node among those of a launcher; None where there is none, or nobody knows where ranks meet.

    UserError for variables that are no numbers.
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


def list_gpus() -> list[DriverGpu]:
    """List the GPUs that the driver lists; none where it cannot be asked."""
    try:
        return parse_gpus(ask_driver() or "")
    except (OSError, ValueError, LookupError, subprocess.SubprocessError):
        return []


def examine_node(subject: Subject) -> list[Finding]:
    """Run the checks of this machine that need no other process."""
    return run_checks(list(_list_checks(subject)), SECONDS)


def examine_locally(subject: Subject) -> list[Finding]:
    """Examine this machine, with processes of its own that measure as the ranks of a run would."""
    ranks = subject.ranks
    figures: list[RankFigures] = []

    def measure() -> Iterator[Finding]:
        figures.append(measure_locally(ranks, subject.device, RANK_SECONDS))
        return iter(())

    # Side by side with what is only read.
    findings = run_checks([*_list_checks(subject), ("links", measure)], RANK_SECONDS + SECONDS)
    findings += judge_ranks(subject, figures[0] if figures else RankFigures(torch=None))
    if subject.cluster.nodes > 1:
        nodes = subject.cluster.nodes
        text = f"this is one of {nodes} nodes; start the command with torchrun on all to examine them"
        findings.append(ok("links", text))
    return findings


def judge_ranks(subject: Subject, figures: RankFigures) -> list[Finding]:
    """Judge what ranks have measured, and the recipe by the devices they have."""
    ranks, gpus = subject.ranks, subject.gpus
    here = find_here(subject, figures)
    torch = [] if figures.torch is None else [figures.torch]
    spec = subject.spec or _guess_spec(subject.cluster, here)
    checks: list[tuple[str, Examination]] = [
        ("torch", lambda: check_torch_gpus(torch, ranks=ranks, gpus=gpus, device=subject.device)),
        ("links", lambda: _judge_failure(subject, figures)),
        ("links", lambda: judge_links(figures.peers, figures.group, spec)),
        ("clocks", lambda: judge_clocks(figures.peers)),
    ]
    experiment = subject.experiment
    if experiment is not None:
        checks.append(("recipe", lambda: check_recipe(experiment, subject.cluster, subject.needs, here)))
        checks.append(("functions", lambda: try_functions(experiment)))
    return run_checks(checks, RANK_SECONDS)


def _judge_failure(subject: Subject, figures: RankFigures) -> Iterator[Finding]:
    """Say why nothing was measured."""
    if figures.loading:
        yield warning(
            "links",
            f"{figures.loading} processes were still loading torch after {RANK_SECONDS:g} s, and nothing was"
            " measured; try again, and install it on a faster file system if that stays so",
        )
    if figures.error:
        # Virtual machines and PCIe switches may let messages between GPUs vanish.
        advice = "; try NCCL_P2P_DISABLE=1, NCCL_DEBUG=INFO tells more" if subject.gpus > 1 else ""
        yield problem("links", figures.error + advice)


def find_here(subject: Subject, figures: RankFigures) -> Here | None:
    """Find what ranks compute with; None where none of them could say it."""
    if subject.device == "cpu":
        return "cpu"
    if figures.torch is None:
        return None
    devices = figures.torch["devices"]
    return Gpu(*min(devices, key=lambda one: one[1])) if devices else "cpu"


def name_node(findings: Sequence[Finding]) -> list[Finding]:
    """Write the name of this machine into findings about it."""
    host = socket.gethostname()
    return [replace(finding, node=host) for finding in findings]


def _list_checks(subject: Subject) -> Iterator[tuple[str, Examination]]:
    host, environment = Host(), os.environ
    ranks, world = subject.ranks, subject.cluster.size
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    names = None if subject.experiment is None else list_hub_names(subject.experiment)
    meets = subject.launched or {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys()
    yield "versions", check_versions
    if subject.device != "cpu":
        yield "GPUs", check_driver
        yield "GPUs", lambda: check_build_tools(subject.gpus, environment)
    yield "cores", lambda: check_cores(ranks, host, threads=environment.get("OMP_NUM_THREADS"))
    yield "memory", lambda: check_memory(ranks, host)
    yield "shared memory", lambda: check_shared_memory(min(subject.gpus, ranks), host)
    yield "limits", lambda: check_limits(ranks, world, host)
    yield (
        "environment",
        lambda: check_variables(
            environment, ranks=ranks, cores=cores, gpus=subject.listed_gpus, launched=meets
        ),
    )
    yield "run directory", lambda: check_storage(subject.run_dir, subject.needs.checkpoint_bytes)
    yield "network", lambda: check_host_name(subject.cluster.nodes)
    yield "network", lambda: check_interfaces(environment)
    yield "ports", lambda: check_ports(environment, launched=subject.launched)
    yield "hub", lambda: check_hub(environment, names)


def _guess_spec(cluster: Cluster, here: Here | None) -> ClusterSpec | None:
    """Find the planner's figures of the devices that ranks have; None for GPUs of an unknown kind."""
    kind = find_gpu_kind(here.name) if isinstance(here, Gpu) else None
    name = "cpu" if here == "cpu" else None if kind is None else kind.name
    try:
        return None if name is None else ClusterSpec.parse(f"{name}:{cluster}")
    except UserError:
        return None
