"""`realrl profile`."""

from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, resolve_recipe

if TYPE_CHECKING:
    from realrl.plan.cluster import Cluster
    from realrl.runtime.profiler.request import Request

ProfileRecipe = Annotated[
    str | None,
    typer.Argument(
        help="A recipe or the directory of a run, whose models and sizes are measured.", show_default=False
    ),
]


def profile(
    recipe: ProfileRecipe = None,
    overrides: Overrides = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Also measure this model, for example llama-2-7b; may be repeated."
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="float32 or bfloat16; default: the recipe's. May be repeated."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:1xN",
            help="Devices to measure, such as cpu:1x2 or h100:1x8, or a YAML file; default: the recipe's.",
        ),
    ] = None,
    out: Annotated[
        str,
        typer.Option(metavar="FILE", help="File to write; sizes that it already has are not measured again."),
    ] = "profile.json",
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure only a few sizes, in less than a minute.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure again what the file already has.")] = False,
) -> None:
    """Measure this machine for `realrl plan`: layers, generation, the optimizer and communication.

    It takes some minutes. On CPUs, one process per device measures at the same time, because processes that share a
    machine slow each other down. See docs/planning.md.
    """
    from realrl.recipe.load import load_experiment
    from realrl.runtime.processes.environment import is_writer, set_library_defaults, under_launcher
    from realrl.runtime.profiler.request import make_request

    set_library_defaults()
    experiment = load_experiment(*resolve_recipe(recipe, overrides)) if recipe is not None else None
    request = make_request(
        experiment,
        shapes=shape or [],
        dtypes=dtype or [],
        cluster=cluster,
        out=out,
        quick=quick,
        again=again,
    )
    if not under_launcher():
        here = _processes(request, None if experiment is None or cluster is not None else experiment.cluster)
        if here.size > 1:
            from realrl.recipe.run_settings import LaunchConfig
            from realrl.runtime.launcher.launch import Start, check_local, launch, report_outcome
            from realrl.runtime.launcher.local import LocalRanks

            check_local(here)
            options = [
                ("--shape", shape),
                ("--dtype", dtype),
                ("--cluster", cluster and [cluster]),
                ("--out", [out]),
            ]
            arguments = ["profile", *([recipe] if recipe else []), *(overrides or [])]
            arguments += [
                word for name, values in options for value in values or [] for word in (name, value)
            ]
            arguments += ["--quick"] * quick + ["--again"] * again
            raise typer.Exit(report_outcome(launch(Start(here, arguments), LaunchConfig(), LocalRanks)))
    from realrl.cli.progress.profiling import ProfileProgress
    from realrl.runtime.profiler.driver import profile as run

    with ProfileProgress() as progress:
        run(request, progress if is_writer() else None)


def _processes(request: "Request", counted: str | None) -> "Cluster":
    """Count the processes to start on this machine: one per device, at most one per GPU.

    `counted`: the recipe's cluster, if `--cluster` was not given.
    """
    from realrl.config.errors import UserError
    from realrl.plan.cluster import Cluster
    from realrl.runtime.processes.process import resolve_cluster, use_cuda

    group = request.group
    if group is None:
        return resolve_cluster(counted or "auto", request.device)
    if group.device.cpu:
        return Cluster(group.nodes, group.devices_per_node)
    if not use_cuda("auto"):
        raise UserError(
            f"cluster {group} has GPUs, but torch finds none here; measure CPU processes with --cluster cpu:1x2"
        )
    return Cluster(1, min(resolve_cluster("auto", "auto").size, group.devices_per_node))
