"""Progress on the terminal: of a training run, and of the measurements of `realrl profile`."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from realrl.cli.costs import compares, costs_note, costs_table
from realrl.cli.monitoring.metrics import describe_speed, read_speed
from realrl.config.files import write_whole
from realrl.runtime.evaluation.answers import PROMPTS
from realrl.runtime.observer import Wishes
from realrl.runtime.output.untaught import find_untaught
from realrl.runtime.processes.environment import PROGRESS_VARIABLE

if TYPE_CHECKING:
    from realrl.planner.report.comparison import Comparison
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.observer import MetricsRecord

_WORDS = {"finished": "ended by themselves"}
"""Words on the terminal for metrics that are shares of the answers."""
_QUIET_SECONDS = 10.0
"""Minimum seconds between training lines without a terminal, so that a log stays readable."""


def find_notebook() -> Callable[[str], None] | None:
    """Find how this process shows progress in the notebook that has started its run; None without a notebook."""
    file = os.environ.get(PROGRESS_VARIABLE)
    if file is None:
        return None

    def show(line: str) -> None:
        # A full disk must not end the run.
        with suppress(OSError):
            write_whole(Path(file), line)

    return show


class _Display:
    """Bars on a terminal, and plain lines in a log file."""

    _bars: Bars

    def __init__(self, *, plain: bool = False) -> None:
        """`plain`: write lines even if the environment asks for colours, as it does in notebooks."""
        forced = False if plain else None
        self._console = Console(
            stderr=True,
            highlight=False,
            markup=False,
            emoji=False,
            force_terminal=forced,
            force_jupyter=forced,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._print(f"note: {text}")

    def _start(self) -> None:
        if self._console.is_terminal and not self._bars.live.is_started:
            self._bars.start()

    def _stop(self) -> None:
        """Remove the bars. Without a check for running bars, rich would print an empty line."""
        if self._bars.live.is_started:
            self._bars.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


class ProfileProgress(_Display):
    """Progress of a measurement: a bar for each part, or a line in a log file."""

    def __init__(self) -> None:
        super().__init__()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )

    def begin(self, what: str, points: int) -> None:
        """Show the next bar."""
        self._start()
        self._task = self._bars.add_task(what, total=points)
        if not self._console.is_terminal:
            self._print(f"{what}: {points} points")

    def done(self) -> None:
        """Advance the bar."""
        self._bars.advance(self._task)

    def end(self, file: str, seconds: float) -> None:
        """Print the path of the profile."""
        self._print(f"measured in {seconds:.0f} s; see {file}")


class Progress(_Display):
    """Progress of a run: one bar, and a line per evaluation. A log file gets a line every few seconds."""

    wishes = Wishes()

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """`show` shows a line for each step in place of the line before, instead of a bar."""
        super().__init__(plain=show is not None)
        self._show = show
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            # A narrow terminal cuts only the metrics.
            TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True, ratio=1)),
            console=self._console,
            expand=True,
        )
        self._headlines: tuple[str, ...] = ()
        self._steps = 0
        self._spoken = 0.0
        self._last: MetricsRecord | None = None

    def begin(self, experiment: "Experiment", steps: int) -> None:
        """Show the bar."""
        self._headlines, self._steps = experiment.spec.headlines, steps
        self._task = self._bars.add_task(experiment.spec.name, total=steps, metrics="")
        if self._show is not None:
            self._show(f"{experiment.spec.name}: step 0/{steps}")
        self._start()

    def record(self, record: "MetricsRecord") -> None:
        """Advance the bar, or print an evaluation."""
        text = self._describe(record)
        if record.kind == "eval":
            self._print(f"step {record.step}/{self._steps} evaluation: {text}")
            return
        self._last = record
        self._bars.update(self._task, completed=record.step, metrics=text)
        line = f"step {record.step}/{self._steps} {record.seconds:.2f} s: {text}"
        if self._show is not None:
            self._show(line)
        elif not self._console.is_terminal and time.monotonic() - self._spoken > _QUIET_SECONDS:
            self._spoken = time.monotonic()
            self._print(line)

    def costs(self, comparison: "Comparison") -> None:
        """Print the table of measured and predicted costs."""
        self._stop()
        self._console.print(costs_table(comparison))
        self._print(costs_note(comparison))
        if self._last is not None and not compares(comparison):
            self._print(f"last step: {self._describe(self._last, losses=True)}")

    def end(self, run_dir: str, seconds: float) -> None:
        """Remove the bar and print the run's directory."""
        self._stop()
        self._print(f"done in {seconds:.0f} s; results in {run_dir}")

    def _describe(self, record: "MetricsRecord", *, losses: bool = False) -> str:
        """Describe the headline metrics of a record. With `losses`, also describe the loss of every train call."""
        others = [
            name
            for name in record.metrics
            if name not in self._headlines and ("/" not in name or (losses and _last_part(name) == "loss"))
        ]
        shown = [*(name for name in self._headlines if name in record.metrics), *others]
        uses = Counter(_last_part(name) for name in shown)
        labels = {name: name if uses[_last_part(name)] > 1 else _last_part(name) for name in shown}
        metrics = [_describe_metric(labels[name], name, record.metrics) for name in shown]
        untaught = [f"nothing learnt: {reason}" for reason in set(find_untaught(record.metrics).values())]
        return "  ".join([*untaught, *metrics, *describe_speed(read_speed(record.metrics))])


def _describe_metric(label: str, name: str, metrics: Mapping[str, float]) -> str:
    value, words = metrics[name], _WORDS.get(_last_part(label))
    if words is None:
        prompts = metrics.get(f"{name}/{PROMPTS}")
        return f"{label} {value:.4g}" + ("" if prompts is None else f" ({prompts:.0f} prompts)")
    return f"{label.removesuffix(_last_part(label))}{words} {100 * value:.3g} %"


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]
