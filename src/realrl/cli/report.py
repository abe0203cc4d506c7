"""`realrl report`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from realrl.cli.reporting.runs import FinishedRun, Sample
    from realrl.cli.reporting.summary import ReportedMetric

_SHOWN_SAMPLES = 3


def report(
    run_dirs: Annotated[list[str], typer.Argument(help="Directories of finished runs.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory for report.json and report.png.")],
) -> None:
    """Summarize finished runs: a table and samples here, metrics in report.json, curves in report.png."""
    from importlib.util import find_spec

    from realrl.cli.reporting.runs import read_runs
    from realrl.cli.reporting.summary import list_metrics, summarize
    from realrl.config.errors import RunError, UserError
    from realrl.config.files import check_directory, check_file, reason_of, write_whole
    from realrl.config.paths import local_path

    if find_spec("matplotlib") is None:
        raise UserError("the curves of a report need matplotlib: pip install 'realrl[demo]'")
    from realrl.cli.reporting.picture import draw_picture

    runs = read_runs(run_dirs)
    folder = local_path(out)
    check_directory(f"--out {out}", folder)
    numbers = folder / "report.json"
    picture = folder / "report.png"
    for file in (numbers, picture):
        check_file(str(file), file)
    metrics = list_metrics(runs)
    try:
        write_whole(numbers, json.dumps(summarize(runs, metrics), indent=2) + "\n")
        draw_picture(runs, picture)
    except OSError as error:
        raise RunError(f"--out {out} cannot be written: {reason_of(error)}") from error
    _print_report(runs, metrics)
    typer.echo(f"metrics: {numbers}   curves: {picture}")


def _print_report(runs: "dict[str, FinishedRun]", metrics: "list[ReportedMetric]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Metrics", title_justify="left", show_header=False)
    for metric in metrics:
        table.add_row(metric.label, "not finite" if metric.value is None else f"{metric.value:.4g}")
    seconds = {name: run.seconds for name, run in runs.items()}
    for name, taken in (seconds | {"total": sum(seconds.values())}).items():
        table.add_row(f"wall time, {name}", f"{taken:.0f} s")
    console.print(table)
    for run in runs.values():
        if len(run.samples) > 1:
            console.print(_sample_table(run.samples[0], run.samples[-1]))


def _sample_table(before: "tuple[Sample, ...]", after: "tuple[Sample, ...]") -> Any:
    """Make a table with the first and the last completion of each prompt side by side."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Samples", title_justify="left", show_lines=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, ratio=1)
    pairs = [(old, new) for old, new in zip(before, after, strict=False) if old.prompt == new.prompt]
    for old, new in pairs[:_SHOWN_SAMPLES]:
        # Text, not str: rich would read brackets in completions as markup.
        table.add_row(Text(old.prompt), _completion(old, Text), _completion(new, Text))
    return table


def _completion(sample: "Sample", text: Any) -> Any:
    labels = "  ".join(f"{name} {value:+.2f}" for name, value in sample.numbers.items() if value is not None)
    return text.assemble(sample.completion.strip(), ("\n" + labels, "dim") if labels else "")
