"""Picture of the curves of runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.cli.reporting.runs import FinishedRun
from realrl.config.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_COLUMNS = 4


def draw_picture(runs: Mapping[str, FinishedRun], path: Path) -> None:
    """Write a PNG with one panel per curve."""
    with whole_file(path) as partial:
        make_figure(runs).savefig(partial, format="png", dpi=120)


def make_figure(runs: Mapping[str, FinishedRun]) -> "Figure":
    """Draw one panel per curve: a line for training, dots for evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (run, metric, label)
        for run in runs.values()
        for metric, label in run.algorithm.curves.items()
        if run.series("train", metric)[0] or run.series("eval", metric)[0]
    ]
    columns = max(1, min(len(panels), _MOST_COLUMNS))
    rows = max(1, -(-len(panels) // columns))
    picture = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    FigureCanvasAgg(picture)
    for number, (run, metric, label) in enumerate(panels, 1):
        _draw_panel(picture.add_subplot(rows, columns, number), run, metric, label)
    return picture


def _draw_panel(axes: Any, run: FinishedRun, metric: str, label: str) -> None:
    trained = run.series("train", metric)
    evaluated = run.series("eval", metric)
    if trained[0]:
        axes.plot(*trained, color="#7a9cc6", linewidth=1.2, label="training")
    if evaluated[0]:
        axes.plot(*evaluated, color="#c0392b", linewidth=1, marker="o", markersize=4, label="evaluation")
    axes.set_title(f"{run.algorithm.name}: {label}", fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
