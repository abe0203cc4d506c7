"""`realrl plan --calibrate`: correct a profile with the measurements of a run."""

from typing import TYPE_CHECKING

import typer

from realrl.config.errors import UserError
from realrl.config.files import check_file, reason_of
from realrl.config.paths import local_path

if TYPE_CHECKING:
    from realrl.planner.profile.profile import Profile
    from realrl.planner.report.comparison import Comparison

DEFAULT = "profile.json"
"""Default path of the profile that `realrl profile` writes."""


def calibrate_file(run_dir: str, path: str | None) -> str:
    """Correct the profile in a file with the measurements of a run, and return the path of the file.

    Prints the changes on stderr. If the file does not exist, a new profile corrects the data-sheet figures.
    """
    from realrl.planner.profile.profile import Profile
    from realrl.planner.report.calibrate import calibrate_profile
    from realrl.planner.report.comparison import Comparison

    file = local_path(path or DEFAULT)
    check_file(f"profile {file}", file)
    run = Comparison.load(run_dir)
    before = Profile.load(file) if file.exists() else None
    after = calibrate_profile(before, run)
    try:
        after.save(file)
    except OSError as error:
        raise UserError(f"profile {file} cannot be written: {reason_of(error)}") from None
    _print(run, before, after)
    typer.echo(f"profile: {file}", err=True)
    return str(file)


def _print(run: "Comparison", before: "Profile | None", after: "Profile") -> None:
    from rich.console import Console

    from realrl.cli.page.text import format_degrees, format_flags
    from realrl.cli.planning.tables import make_table
    from realrl.plan.axes import degrees_title
    from realrl.plan.placement import Placement
    from realrl.planner.cost.cost_model import CostModel

    assert run.spec is not None, "a run on unknown devices cannot calibrate"
    table = make_table("call", "devices", degrees_title(), "", "predicted before>", "from now on>", "steps>")
    models = [CostModel(run.spec, profile) for profile in (before, after)]
    for of in run.calls:
        place = Placement.parse(of.placement)
        stored = None if of.call.role is None else run.models[of.call.role]
        costs = [model.call(of.call, stored, place, run.workload) for model in models]
        old, new = (f"{cost.seconds:.4g} s" if cost.terms else "not measured" for cost in costs)
        degrees = format_degrees(place, function=of.call.is_function)
        cells = (of.call.name, str(place.mesh), degrees, format_flags(place))
        table.add_row(*cells, old, new, str(of.seconds.steps))
    Console(stderr=True, highlight=False).print(table)
