"""`realrl replay`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, launch_ranks, resolve_recipe

if TYPE_CHECKING:
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.replay.replay import Replayed


def replay(
    run: Annotated[str, typer.Argument(help="The directory of a run.", show_default=False)],
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step to run again. Without it, list the recorded steps.")
    ] = None,
    plan: Annotated[
        str, typer.Option(help="Preset or plan file, as in a recipe. A plan file also says the cluster.")
    ] = "symmetric",
    cluster: Annotated[str | None, typer.Option(help="Devices to run on; by default 1x1.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or auto; by default as in the run.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest deviation of numbers x, relative to 1 + |x|; by default 1e-5 in float32, else 0.02.",
            show_default=False,
        ),
    ] = None,
    call: Annotated[
        str | None, typer.Option(help="Open the debugger in this call, such as actor.train.")
    ] = None,
    item: Annotated[
        int | None, typer.Option(min=0, help="The item that the debugger opens with; needs --call.")
    ] = None,
) -> None:
    """Run a recorded step of a run again, on any devices, and name the first quantity that differs.

    It starts from the checkpoint before the step. Each call gets the inputs that it had in the run, and its
    parameters, outputs and metrics are compared with the record. Nothing in the run's directory changes. The exit
    status is 1 if something differs. The section debug.record of a recipe says which steps are recorded. See
    docs/replay.md.
    """
    from realrl.config.errors import UserError
    from realrl.recipe.load import load_experiment
    from realrl.runtime.processes.environment import set_library_defaults, under_launcher
    from realrl.runtime.replay.replay import Stop, replay_step

    set_library_defaults()
    if (call is None) != (item is None):
        raise UserError(
            "--call and --item belong together: they name a call, and an item of the step's batch"
        )
    stop = None if call is None or item is None else Stop(call, item)
    if under_launcher():
        experiment = load_experiment(run, overrides or [])
    else:
        experiment = _read_run(
            run, overrides, plan=plan, cluster=cluster, device=device, debugs=stop is not None
        )
        if step is None:
            _list_records(Path(experiment.run_dir))
            return
        _check(experiment, step)
        given = ["--step", str(step), *([] if tolerance is None else ["--tolerance", str(tolerance)])]
        if stop is None:
            launch_ranks(experiment, ["replay", *given])
    assert step is not None, "ranks get a step"
    replayed = replay_step(
        experiment, step, lambda text: typer.echo(text, err=True), tolerance=tolerance, stop=stop
    )
    if replayed is not None:
        for line in _describe(replayed):
            typer.echo(line)
        if replayed.first is not None:
            raise typer.Exit(1)


def _read_run(
    run: str,
    overrides: Sequence[str] | None,
    *,
    plan: str,
    cluster: str | None,
    device: str | None,
    debugs: bool,
) -> "Experiment":
    """Read the recipe of a run, for other devices. `debugs`: whether a debugger opens."""
    import json

    from realrl.config.errors import UserError
    from realrl.config.paths import local_path
    from realrl.plan.plan import Plan
    from realrl.plan.presets import PRESETS, SEARCH
    from realrl.recipe.load import load_experiment, parse_experiment
    from realrl.runtime.replay.replay import without_time_limits

    if not local_path(run).is_dir():
        raise UserError(f"{run} is not the directory of a run")
    if plan == SEARCH:
        raise UserError(f"--plan {SEARCH}: it plans for speed; name a preset or a plan file")
    config, started = resolve_recipe(run, [])
    if cluster is None and plan not in PRESETS:
        cluster = str(Plan.load(plan, load_experiment(config, started).graph).cluster)
    # A step whose optimizer steps are skipped has to end, so that it can be compared.
    started += ["resume=changed", "training.max_skipped=1000000000"]
    changes = [*started, f"plan={json.dumps(plan)}", f"cluster={cluster or '1x1'}"]
    if device is not None:
        changes.append(f"device={device}")
    if device == "cpu":
        changes.append("kernels=[]")
    if debugs:
        # Every item is a micro-batch of its own, so that the debugger sees one item.
        changes.append("micro_batch_tokens=1")
    experiment = load_experiment(config, [*changes, *(overrides or [])])
    if debugs:
        return parse_experiment(without_time_limits(experiment.model_dump(mode="json")))
    return experiment


def _check(experiment: "Experiment", step: int) -> None:
    """Find mistakes before any process starts."""
    from realrl.runtime.records.step_record import read_record
    from realrl.runtime.replay.replay import check_checkpoint

    run_dir = Path(experiment.run_dir)
    check_checkpoint(run_dir, read_record(run_dir, step))


def _list_records(run_dir: Path) -> None:
    """Print the recorded steps of a run."""
    from realrl.checkpoint.saved import list_records
    from realrl.runtime.records.step_record import describe_records, read_record

    if not list_records(run_dir):
        typer.echo(describe_records(run_dir))
    for step, found in list_records(run_dir).items():
        start = f"checkpoint {found.checkpoint}" if found.checkpoint else "the run's first weights"
        typer.echo(f"step {step}, from {start}: {read_record(run_dir, step).reason}")


def _describe(replayed: "Replayed") -> Iterator[str]:
    """Write the comparison, one line per call."""
    record = replayed.record
    yield f"step {record.header.step}, recorded because {record.reason}"
    yield f"recorded on {record.header.plan}"
    yield f"replayed on {replayed.plan}"
    if record.missing:
        ranks = ", ".join(map(str, record.missing))
        yield f"note: rank {ranks} wrote no part of the record, so some quantities are not compared"
    for call in replayed.calls:
        if not call.problems:
            yield f"ok       {call.call}: {call.agreed or 'nothing recorded'}"
        for problem in call.problems:
            yield f"DIFFERS  {call.call}: {problem}"
    first = replayed.first
    if first is None:
        yield f"the step gives the recorded results, within {replayed.tolerance:g}"
    else:
        yield f"first difference: {first.call}: {first.problems[0]}"
        yield f"likely reason: {first.reason}"
