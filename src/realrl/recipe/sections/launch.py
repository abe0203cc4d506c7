"""Settings of the supervision of a run: failures, restarts, and the end by SIGTERM or Ctrl-C."""

from typing import Literal

from pydantic import Field, PositiveInt

from realrl.config.base import Settings


class LaunchConfig(Settings):
    """Launcher of a run, limits and restarts for runs whose processes fail."""

    by: Literal["local", "ray"] = "local"
    """What starts a process for each device: `local` on this machine; `ray` on the nodes of a Ray cluster,
    which has to run already. It says nothing under torchrun, in whatever way that was started."""

    freeze_seconds: float = Field(default=30.0, ge=2, le=86_400)
    """Seconds without a sign of life after which a process is taken to be frozen, and the run fails. A process that
    computes or waits gives one every second; one that merely waits for a core is not frozen."""
    stall_minutes: float | None = Field(default=30.0, gt=0, le=100_000)
    """Minutes without progress on any rank after which a run is taken to be stuck, and fails: no instruction ended,
    no token was generated, no micro-batch computed, no function returned. Four times as many while it starts, loads
    models, and ends. null for never."""
    max_restarts: int = Field(default=3, ge=0, le=1_000_000)
    """How often in a row the launcher starts a failed run again from its last checkpoint without its getting
    further than before. Three, so that a run outlives what passes, and gives up on what does not. A mistake in what
    you gave, a full disk, diverged learning or an interruption ends the run, and so does an exception before its
    first step. Under torchrun, `--max-restarts` says it."""
    shrink: bool = True
    """Whether to go on with fewer devices, and a plan made for them, where some are gone for good."""
    tries: PositiveInt = 2
    """How often in a row a device's process must die, before the run gets further than ever, for the device to be
    given up."""
    min_devices: PositiveInt = 1
    """Fewest devices to go on with."""
    grace_seconds: float = Field(default=600.0, ge=0, le=1_000_000)
    """Most seconds after SIGTERM or Ctrl-C for the step under way and a checkpoint; a second one ends the run at
    once. 0 ends it at once, without a checkpoint. Schedulers often give less before they kill."""
