"""Job of several nodes: what the texts for torchrun, Slurm and Kubernetes have in common."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realrl.plan.cluster import Cluster
    from realrl.planner.cluster.cluster_spec import ClusterSpec
    from realrl.recipe.experiment import Experiment

PATIENCE = 300
"""Seconds that torchrun on one node waits for an answer of the first one: longer than a network is gone."""
CPUS_BESIDE_A_GPU = 8
"""CPU cores of a process that computes on a GPU, unless the user says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job that runs a recipe on several nodes."""

    recipe: str
    arguments: tuple[str, ...]
    """Arguments of `python -m realrl`."""
    command: str
    """Command line that has made the text."""
    name: str
    devices: tuple[int, ...]
    """Number of devices of each node; the same for all, but for torchrun."""
    gpus: bool
    cpus: int
    """CPU cores for the process of each device."""
    restarts: int
    directory: str
    """Directory that the command is run in, on every node."""
    grace: int
    """Seconds after SIGTERM for a step and a checkpoint, by the recipe."""
    patience: int = PATIENCE

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.devices)

    @property
    def per_node(self) -> int:
        """Devices of a node where all have as many."""
        return self.devices[0]


def make_job(
    kind: str,
    recipe: str,
    overrides: Sequence[str],
    *,
    name: str | None,
    cpus: int | None,
    restarts: int,
    directory: str | None,
    overwrites: bool = True,
) -> Job:
    """Read a recipe and make its job; `kind` is the command, for the record.

    `overwrites` tells whether processes know, when they are started again, that they may not delete the run that
    they are to continue, although the recipe says `overwrite`. UserError for a mistake in the recipe, and where it
    does not say how many nodes and devices there are.
    """
    from realrl.config.errors import UserError
    from realrl.recipe.load import load_experiment

    experiment = load_experiment(recipe, overrides)
    if not experiment.spec.trains:
        raise UserError(
            f"algorithm={experiment.algorithm} trains nothing; only training runs on several nodes"
        )
    if experiment.resume == "never":
        raise UserError(
            "resume=never: a job that is started again could not go on; set resume=auto, or choose a new run_dir"
        )
    if experiment.overwrite and not overwrites:
        raise UserError(
            "overwrite=true: a pod that is started again would delete the run; set overwrite=false and choose a new"
            " run_dir"
        )
    cluster, gpus = _find_devices(experiment, one_kind=kind != "torchrun")
    return Job(
        recipe=recipe,
        arguments=("train", recipe, *overrides),
        command=shlex.join(["realrl", "launch", kind, recipe, *overrides]),
        name=check_job_name(name) if name is not None else _make_name(experiment.run_dir),
        devices=tuple(len(cluster.ranks(node)) for node in range(cluster.nodes)),
        gpus=gpus,
        cpus=cpus if cpus is not None else CPUS_BESIDE_A_GPU if gpus else 1,
        restarts=restarts,
        directory=directory or str(Path.cwd()),
        grace=math.ceil(experiment.launch.grace_seconds),
    )


def check_job_name(name: str) -> str:
    """Check a name for Slurm and Kubernetes alike, and return it; else UserError."""
    from realrl.config.errors import UserError
    from realrl.config.explain import shorten

    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name):
        raise UserError(
            f"--name {shorten(name)}: it must have at most 50 lower-case letters, digits and hyphens, a letter"
            " first and no hyphen last"
        )
    return name


def _find_devices(experiment: "Experiment", *, one_kind: bool) -> "tuple[Cluster, bool]":
    """Find the nodes and devices that a recipe names, and whether these are GPUs; UserError where it does not.

    `one_kind` asks for nodes that are all alike.
    """
    from realrl.config.errors import UserError
    from realrl.runtime.prepare.cluster import named_cluster, written_cluster

    cluster = written_cluster(experiment.cluster)
    if cluster is None:
        raise UserError(
            "cluster=auto does not say how many nodes the job has; set cluster, for example to 2x8 (nodes x devices"
            " of each), or h100:2x8"
        )
    kinds = _list_kinds(named_cluster(experiment.cluster))
    if len(kinds) > 1 and (one_kind or len(set(kinds.values())) > 1):
        raise UserError(
            f"cluster={experiment.cluster} has nodes of different kinds ({', '.join(kinds)}); a job asks for nodes"
            " of one kind"
        )
    if one_kind and not cluster.even:
        raise UserError(
            f"cluster={experiment.cluster} has nodes of different size; a job asks for nodes of one size, `realrl"
            " launch torchrun` writes the command of each node"
        )
    cpu = set(kinds.values()) == {True}
    if kinds and experiment.device != "auto" and (experiment.device == "cpu") != cpu:
        raise UserError(
            f"cluster={experiment.cluster} names {', '.join(kinds)}, but device={experiment.device}; set"
            " device=auto"
        )
    return cluster, not cpu and experiment.device != "cpu"


def _list_kinds(named: "ClusterSpec | None") -> dict[str, bool]:
    """List the kinds of devices that a recipe names, and whether each is a CPU."""
    return {} if named is None else {group.device.name: group.device.cpu for group in named.groups}


def _make_name(run_dir: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", run_dir.lower()).strip("-")
    # The last parts of a path tell runs apart.
    return f"realrl-{words[-40:].strip('-')}".rstrip("-")
