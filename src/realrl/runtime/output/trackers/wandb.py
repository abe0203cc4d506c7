"""Weights & Biases."""

import uuid
from collections.abc import Mapping
from typing import Any

from realrl.config.secrets.redaction import redact_settings
from realrl.recipe.sections.trackers import WandbConfig
from realrl.runtime.output.trackers.tracker import TrackedRun

NAME = "wandb"
STEP = "step"
"""Metric that the others are drawn over. W&B's own steps only rise, so that steps done again would be lost."""


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None
        self._notes: list[str] = []

    def open(self, run: TrackedRun) -> None:
        """Begin a run, or go on with that of an earlier process."""
        import wandb

        config = self._config
        name = run.load_id(NAME)
        if name is None:
            name = uuid.uuid4().hex[:12]
            run.save_id(NAME, name)
        # Of the command line, the screen, the sources and git nothing is sent: there may be secrets in them.
        # Silence also keeps it from asking for a key.
        settings = wandb.Settings(
            console="off", disable_git=True, save_code=False, silent=True, x_disable_meta=True
        )
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            group=config.group,
            tags=redact_settings(config.tags),
            mode=config.mode,
            id=name,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self._notes = list(run.notes)  # a further one replaces them all

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a row of metrics."""
        self._run.log({STEP: step, **metrics})

    def note(self, text: str) -> None:
        """Add a line to the notes of the run."""
        self._notes.append(text)
        self._run.notes = "\n".join(self._notes)

    def close(self, *, done: bool) -> None:
        """Wait until everything is sent."""
        self._run.finish(exit_code=0 if done else 1)
