"""Settings of checkpoints, from which a run is resumed."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from realrl.config.base import Settings

Resume = Literal["auto", "changed", "never"]


class CheckpointConfig(Settings):
    """Checkpoints of all that a run continues from, in RUN_DIR/checkpoints.

    One is also written after the last step, and when the run is told to end (SIGTERM, Ctrl-C).
    """

    last: bool = True
    """Write one, and the trained models, after the last step. false is for runs that only measure steps."""

    every: PositiveInt | None = None
    """Write one after every so many training steps; null for none at fixed steps."""
    minutes: float | None = Field(default=15.0, gt=0, le=1e5)
    """Write one when the last one is so many minutes old; null for none by time."""
    keep: PositiveInt = 2
    """Keep the last so many. An older one is deleted only after its successor has been written whole."""
    keep_best: NonNegativeInt = 0
    """Keep, besides those, so many with the best `evaluation.best`; one is written after each evaluation that is
    among them."""
    export: bool = False
    """Write the trained models into each as Hugging Face directories, too, by role: step-000100/actor. At any time
    `realrl export RUN_DIR` makes them."""
    asynchronous: bool = True
    """Write while training goes on, which waits only where parameters are about to change and have not been copied
    yet. false stops training until all is written."""
