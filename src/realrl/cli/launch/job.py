"""Jobs on several nodes: the facts that torchrun commands, Slurm scripts and Kubernetes manifests share."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from realrl.config.errors import UserError
from realrl.config.explain import shorten
from realrl.plan.cluster import Cluster
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.cluster import named_cluster, written_cluster

PATIENCE = 300
"""Seconds for which torchrun on a node waits for the first node, long enough to survive a network failure."""
CPUS_PER_GPU = 8
"""Default CPU cores of a process that computes on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job that runs a recipe on several nodes."""

    recipe: str
    arguments: tuple[str, ...]
    """Arguments of `python -m realrl`."""
    command: str
    """Command line that wrote the script or manifest, for a comment in it."""
    name: str
    devices: tuple[int, ...]
    """Number of devices of each node. Only torchrun accepts different numbers."""
    gpus: bool
    cpus: int
    """CPU cores for the process of each device."""
    restarts: int
    directory: str
    """Working directory on every node."""
    grace: int
    """Seconds after SIGTERM in which a run can finish its step and write a checkpoint, from the recipe."""
    patience: int = PATIENCE

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.devices)

    @property
    def per_node(self) -> int:
        """Devices of a node, if all nodes have the same number."""
        return self.devices[0]


def make_job(
    kind: str,
    recipe: str,
    overrides: Sequence[str],
    name: str | None,
    cpus: int | None,
    restarts: int,
    directory: str | None,
) -> Job:
    """Read a recipe and make its job. `kind` is the command: torchrun, slurm or kubernetes.

    Raises UserError for a mistake in the recipe, or if the recipe does not set the number of nodes and devices.
    """
    experiment = load_experiment(recipe, overrides)
    if not experiment.spec.trains:
        raise UserError(
            f"algorithm={experiment.algorithm} trains no model; only training runs on several nodes"
        )
    if experiment.resume == "never":
        raise UserError(
            "resume=never: a restarted job could not resume its run; set resume=auto, or choose a new run_dir"
        )
    # Under torchrun and Slurm, a restarted process knows that it must not delete the run. A new pod does not know.
    if experiment.overwrite and kind == "kubernetes":
        raise UserError(
            "overwrite=true: a restarted pod would delete the run; set overwrite=false and choose a new run_dir"
        )
    cluster, gpus = _find_devices(experiment, one_kind=kind != "torchrun")
    if name is None:
        words = re.sub(r"[^a-z0-9]+", "-", experiment.run_dir.lower()).strip("-")
        # The last parts of a path distinguish runs.
        name = f"realrl-{words[-40:].strip('-')}".rstrip("-")
    elif not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name):
        raise UserError(
            f"--name {shorten(name)}: it must have at most 50 lower-case letters, digits and hyphens, start with a"
            " letter, and not end with a hyphen"
        )
    return Job(
        recipe=recipe,
        arguments=("train", recipe, *overrides),
        command=shlex.join(["realrl", "launch", kind, recipe, *overrides]),
        name=name,
        devices=tuple(len(cluster.ranks(node)) for node in range(cluster.nodes)),
        gpus=gpus,
        cpus=cpus if cpus is not None else CPUS_PER_GPU if gpus else 1,
        restarts=restarts,
        directory=directory or str(Path.cwd()),
        grace=math.ceil(experiment.launch.grace_seconds),
    )


def _find_devices(experiment: Experiment, *, one_kind: bool) -> tuple[Cluster, bool]:
    """Find the nodes and devices that a recipe names, and whether they are GPUs. Raises UserError.

    `one_kind`: whether all nodes must have the same kind and number of devices.
    """
    cluster = written_cluster(experiment.cluster)
    if cluster is None:
        raise UserError(
            "cluster=auto does not say how many nodes the job has; set cluster, for example to 2x8 (nodes x devices"
            " per node) or h100:2x8"
        )
    named = named_cluster(experiment.cluster)
    is_cpu = {} if named is None else {group.device.name: group.device.cpu for group in named.groups}
    if len(is_cpu) > 1 and (one_kind or len(set(is_cpu.values())) > 1):
        raise UserError(
            f"cluster={experiment.cluster} has nodes of different kinds ({', '.join(is_cpu)}); a job needs nodes of"
            " one kind"
        )
    if one_kind and not cluster.even:
        raise UserError(
            f"cluster={experiment.cluster} has nodes of different sizes; a job needs nodes of one size. `realrl"
            " launch torchrun` writes a command for each node"
        )
    cpu = set(is_cpu.values()) == {True}
    if is_cpu and experiment.device != "auto" and (experiment.device == "cpu") != cpu:
        raise UserError(
            f"cluster={experiment.cluster} names {', '.join(is_cpu)}, but device={experiment.device}; set"
            " device=auto"
        )
    return cluster, not cpu and experiment.device != "cpu"


def fill_template(name: str, **values: Any) -> str:
    """Fill a template of this package."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    # These texts are shell and YAML, not HTML: each value goes through one of the filters below.
    environment = Environment(
        loader=PackageLoader("realrl.cli.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "sh": shlex.quote,
        "json": json.dumps,
        # Kubernetes would replace $(NAME) with a variable.
        "kubernetes": lambda text: text.replace("$(", "$$("),
        # A comment must stay on one line.
        "line": lambda text: " ".join(text.split()),
    }
    return environment
