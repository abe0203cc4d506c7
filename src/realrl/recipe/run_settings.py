"""Settings of checkpoints, from which a run is resumed."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.redaction import has_credentials

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


class WandbConfig(Settings):
    """Weights & Biases. Its key is what `wandb login` has kept, or the environment variable WANDB_API_KEY."""

    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes into RUN_DIR/wandb, for `wandb sync`; `disabled` does nothing; null is what WANDB_MODE says,
    else online."""
    project: str = "realrl"
    """Project of the run."""
    entity: str | None = None
    """User or team that the project belongs to; null for your own."""
    name: str | None = None
    """Name of the run; null for that of its directory."""
    group: str | None = None
    """Group of runs that belong together."""
    tags: list[str] = Field(default=[])
    """Tags of the run."""


class MlflowConfig(Settings):
    """MLflow. Users and passwords are those of MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    tracking_uri: str | None = None
    """Address of the server or database; null is what MLFLOW_TRACKING_URI says, else MLflow's own default."""
    experiment: str = "realrl"
    """Experiment of the run, which is made where there is none."""
    run_name: str | None = None
    """Name of the run; null for that of its directory."""
    tags: dict[str, str] = Field(default={})
    """Tags of the run."""

    @field_validator("tracking_uri")
    @classmethod
    def _no_secrets(cls, value: str | None) -> str | None:
        if value is not None and has_credentials(value):
            raise ValueError(
                "it has a password or key in it, which would be written to the run directory; leave it null and set"
                " the environment variable MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and _PASSWORD"
            )
        return value


class TrackersConfig(Settings):
    """Places for metrics, notes and the recipe besides RUN_DIR/metrics.jsonl. None can stop or delay a run."""

    tensorboard: bool | None = None
    """Write RUN_DIR/tensorboard; null where TensorBoard is installed."""
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    patience: NonNegativeFloat = Field(default=30.0, le=3600)
    """Seconds that the end of a run waits for trackers that are not done yet."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        tags = self.wandb.tags if self.wandb is not None else []
        long = next((tag for tag in tags if len(tag) > 64), None)
        if long is not None:
            raise ValueError(f"wandb.tags: {long[:20]}... has {len(long)} characters; 64 are the most")
        return self
