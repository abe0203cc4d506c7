"""`realrl launch`: commands, scripts and manifests that start a recipe on several nodes."""

import re
import sys
from typing import Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe
from realrl.config.errors import UserError

launchers = typer.Typer(
    help="Write what starts a recipe on several nodes: torchrun commands, a Slurm script, a Kubernetes manifest.",
    no_args_is_help=True,
)

_Out = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File to write; default: standard output.", show_default=False),
]
_Name = Annotated[
    str | None, typer.Option(help="Name of the job; default: made from run_dir.", show_default=False)
]
_Cpus = Annotated[
    int | None,
    typer.Option(
        "--cpus", min=1, help="CPU cores per process; default: 8 with a GPU, 1 without.", show_default=False
    ),
]
_Restarts = Annotated[
    int, typer.Option("--max-restarts", min=0, help="Number of restarts by torchrun after failures.")
]
_Directory = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Working directory on all nodes; default: this one.", show_default=False
    ),
]
_Port = Annotated[int, typer.Option(min=1024, max=65535, help="Port of the first node for the rendezvous.")]


@launchers.command()
def torchrun(
    recipe: Recipe,
    overrides: Overrides = None,
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a node for the other nodes. Repeat it for each node, the first node first.",
            show_default=False,
        ),
    ] = None,
    port: _Port = 29500,
    name: _Name = None,
    cpus: _Cpus = None,
    max_restarts: _Restarts = 3,
    directory: _Directory = None,
    out: _Out = None,
) -> None:
    """Print the command to run on each node."""
    from realrl.cli.launch.job import fill_template, make_job

    job = make_job("torchrun", recipe, overrides or [], name, cpus, max_restarts, directory)
    addresses = address or [f"NODE{node}" for node in range(job.nodes)]
    if len(addresses) != job.nodes:
        raise UserError(f"--address was given {len(addresses)} times, but the recipe has {job.nodes} nodes")
    if len(set(job.devices)) > 1 and address and sorted(address) != address:
        raise UserError(
            "--address: torchrun numbers nodes in the order of their addresses as text, and these nodes differ in"
            f" size; name cluster and addresses in that order: {', '.join(sorted(address))}"
        )
    for given in addresses:
        _check(r"[\w.:-]+", "--address", given, "a host name or an IP address")
    # An IPv6 address needs brackets before a port.
    first = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    _write(fill_template("torchrun.sh.jinja", job=job, addresses=addresses, first=first, port=port), out)


@launchers.command()
def slurm(
    recipe: Recipe,
    overrides: Overrides = None,
    time: Annotated[
        str,
        typer.Option(metavar="TIME", help="Time limit of the job as sbatch takes it, such as 1-12:00:00."),
    ] = "24:00:00",
    partition: Annotated[
        str | None, typer.Option(help="Partition of the cluster.", show_default=False)
    ] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.", show_default=False)] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.", show_default=False)] = None,
    gpu_type: Annotated[
        str | None,
        typer.Option(help="Kind of GPU in the cluster's own words, such as h100.", show_default=False),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="Another option of sbatch, such as --constraint=ib. May be repeated.",
            show_default=False,
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE",
            help="A shell line that sets up the environment, such as 'module load cuda'. May be repeated.",
            show_default=False,
        ),
    ] = None,
    early: Annotated[
        int,
        typer.Option(
            min=60, max=65535, help="Seconds before the time limit at which the run saves and ends."
        ),
    ] = 600,
    name: _Name = None,
    cpus: _Cpus = None,
    max_restarts: _Restarts = 3,
    directory: _Directory = None,
    out: _Out = None,
) -> None:
    """Write a script for sbatch. At its time limit, the job returns to the queue, and later resumes the run."""
    from realrl.cli.launch.job import fill_template, make_job

    job = make_job("slurm", recipe, overrides or [], name, cpus, max_restarts, directory)
    pattern = r"\d+|\d+(:\d+){1,2}|\d+-\d+(:\d+){0,2}"
    _check(pattern, "--time", time, "a time as sbatch takes it, such as 1-12:00:00")
    if gpu_type is not None:
        _check(r"[\w.-]+", "--gpu-type", gpu_type, "the name of a kind of GPU")
        if not job.gpus:
            raise UserError(f"--gpu-type {gpu_type}: the recipe computes on CPUs")
    given = {"partition": partition, "account": account, "qos": qos}
    options = [f"--{option}={value}" for option, value in given.items() if value is not None]
    options += sbatch or []
    for option in options:
        accepted = "an option of sbatch, such as --constraint=ib"
        _check(r"--?[a-zA-Z][\w-]*([= ]\S+)?", "--sbatch", option, accepted)
    text = fill_template(
        "slurm.sh.jinja",
        job=job,
        file=out or "FILE",
        time=time,
        options=options,
        gpu_type=gpu_type,
        early=early,
        setup=setup or [],
    )
    _write(text, out)


@launchers.command()
def kubernetes(
    recipe: Recipe,
    overrides: Overrides = None,
    image: Annotated[
        str, typer.Option(help="Container image with realrl installed.", show_default=False)
    ] = "REGISTRY/realrl:latest",
    claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim (ReadWriteMany) of a file system that all pods share.")
    ] = "shared",
    directory: Annotated[
        str, typer.Option(metavar="DIR", help="Mount point of the claim, and working directory of the pods.")
    ] = "/shared",
    namespace: Annotated[str, typer.Option(help="Namespace of the job.")] = "default",
    gpu_resource: Annotated[str, typer.Option(help="Resource name of GPUs.")] = "nvidia.com/gpu",
    memory: Annotated[str, typer.Option(help="Memory of a pod.")] = "64Gi",
    shm: Annotated[str, typer.Option(help="Shared memory of a pod, a part of its memory.")] = "16Gi",
    grace: Annotated[
        int, typer.Option(min=30, help="Seconds for a step and a checkpoint when a pod must leave its node.")
    ] = 600,
    port: _Port = 29500,
    name: _Name = None,
    cpus: _Cpus = None,
    max_restarts: _Restarts = 3,
    out: _Out = None,
) -> None:
    """Write a manifest of a PyTorchJob for the Kubeflow training operator (v1)."""
    from realrl.cli.launch.job import fill_template, make_job

    job = make_job("kubernetes", recipe, overrides or [], name, cpus, max_restarts, directory)
    for option, value in (("--namespace", namespace), ("--claim", claim)):
        _check(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", option, value, "a Kubernetes name")
    for option, value in (("--memory", memory), ("--shm", shm)):
        _check(r"\d+(\.\d+)?([kMGTPE]i?)?", option, value, "an amount as Kubernetes takes it, such as 64Gi")
    _check(r"/\S*", "--directory", directory, "an absolute path")
    text = fill_template(
        "pytorchjob.yaml.jinja",
        job=job,
        file=out or "FILE",
        image=image,
        claim=claim,
        namespace=namespace,
        gpu_resource=gpu_resource,
        memory=memory,
        shm=shm,
        grace=grace,
        port=port,
    )
    _write(text, out)


def _check(pattern: str, option: str, value: str, accepted: str) -> None:
    from realrl.config.explain import shorten

    if not re.fullmatch(pattern, value):
        raise UserError(f"{option} {shorten(value)}: it must be {accepted}")


def _write(text: str, out: str | None) -> None:
    from realrl.config.files import check_file, write_whole
    from realrl.config.paths import local_path

    if out is None:
        sys.stdout.write(text)
        return
    path = local_path(out)
    check_file(f"--out {out}", path)
    write_whole(path, text)
    typer.echo(f"wrote {path}", err=True)
