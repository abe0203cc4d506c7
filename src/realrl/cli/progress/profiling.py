"""Progress display of a measurement."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProfileProgress:
    """Progress of a measurement: a bar for each part; in a log file, a line."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=self._console)

    def __enter__(self) -> "ProfileProgress":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(f"note: {text}", soft_wrap=True)

    def begin(self, what: str, points: int) -> None:
        """Show the next bar."""
        if self._console.is_terminal:
            self._task = self._bars.add_task(what, total=points)
        else:
            self._console.print(f"{what}: {points} points", soft_wrap=True)

    def done(self) -> None:
        """Advance the bar."""
        if self._console.is_terminal:
            self._bars.advance(self._task)

    def end(self, file: str, seconds: float) -> None:
        """Print where the profile is."""
        self._console.print(f"measured in {seconds:.0f} s; see {file}", soft_wrap=True)
