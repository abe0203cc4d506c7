"""Settings of checkpoints, of the launcher that supervises a run, and of trackers."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.redaction import has_credentials

Resume = Literal["auto", "changed", "never"]


class CheckpointConfig(Settings):
    """Checkpoints from which a run resumes, in RUN_DIR/checkpoints.

    A checkpoint is also written after the last step, and when the run is stopped (SIGTERM, Ctrl-C).
    """

    last: bool = True
    """Write a checkpoint and the trained models after the last step. false is for runs that only measure steps."""

    every: PositiveInt | None = None
    """Training steps between checkpoints; null for none at fixed steps."""
    minutes: float | None = Field(default=15.0, gt=0, le=1e5)
    """Minutes between checkpoints; null for none by time."""
    keep: PositiveInt = 2
    """Number of latest checkpoints to keep. An older one is deleted only after its successor is complete."""
    keep_best: NonNegativeInt = 0
    """Number of additional checkpoints to keep, those with the best `evaluation.best`. An evaluation among the best
    writes a checkpoint."""
    export: bool = False
    """Also write the trained models into each checkpoint as Hugging Face directories, by role: step-000100/actor.
    `realrl export RUN_DIR` makes them later."""
    asynchronous: bool = True
    """Write while training continues. Training waits only if parameters are about to change before they are
    written. false stops training until everything is written."""


class LaunchConfig(Settings):
    """How a run is started, watched and restarted."""

    by: Literal["local", "ray"] = "local"
    """What starts a process for each device: `local` on this machine, or `ray` on the nodes of a running Ray
    cluster. It has no effect under torchrun."""

    freeze_seconds: float = Field(default=30.0, ge=2, le=86_400)
    """Seconds without a heartbeat after which a process counts as frozen, and the run fails. A process sends a
    heartbeat every second while it computes or waits; a process that waits for a core is not frozen."""
    stall_minutes: float | None = Field(default=30.0, gt=0, le=100_000)
    """Minutes without progress on any rank after which a run counts as stuck, and fails: no instruction ended, no
    token was generated, no micro-batch computed, no function returned. The limit is four times higher while the run
    starts, loads models, and ends. null for no limit."""
    max_restarts: int = Field(default=3, ge=0, le=1_000_000)
    """Maximum consecutive restarts from the last checkpoint without progress. The run ends at once after a user's
    mistake, a full disk, diverged learning, an interruption, or an exception before the first step. torchrun has
    `--max-restarts` for this."""
    shrink: bool = True
    """Whether to continue with fewer devices, and a plan for them, if some are lost for good."""
    tries: PositiveInt = 2
    """Consecutive deaths of a device's process without progress of the run after which the device is given up."""
    min_devices: PositiveInt = 1
    """Minimum number of devices to continue with."""
    grace_seconds: float = Field(default=600.0, ge=0, le=1_000_000)
    """Maximum seconds after SIGTERM or Ctrl-C to finish the step and write a checkpoint; a second signal ends the
    run at once. 0 ends it at once, without a checkpoint. Schedulers often allow less before they kill."""


class WandbConfig(Settings):
    """Weights & Biases. The key comes from `wandb login` or the environment variable WANDB_API_KEY."""

    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes into RUN_DIR/wandb, for `wandb sync`; `disabled` does nothing; null takes WANDB_MODE, or
    online."""
    project: str = "realrl"
    """Project of the run."""
    entity: str | None = None
    """User or team of the project; null for your own."""
    name: str | None = None
    """Name of the run; null for the name of its directory."""
    group: str | None = None
    """Group of runs that belong together."""
    tags: list[str] = Field(default=[])
    """Tags of the run."""


class MlflowConfig(Settings):
    """MLflow. User and password come from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    tracking_uri: str | None = None
    """Address of the server or database; null takes MLFLOW_TRACKING_URI, or MLflow's default."""
    experiment: str = "realrl"
    """Experiment of the run; it is created if necessary."""
    run_name: str | None = None
    """Name of the run; null for the name of its directory."""
    tags: dict[str, str] = Field(default={})
    """Tags of the run."""

    @field_validator("tracking_uri")
    @classmethod
    def _no_secrets(cls, value: str | None) -> str | None:
        if value is not None and has_credentials(value):
            raise ValueError(
                "it contains a password or key, which would be written to the run directory; leave it null and set"
                " the environment variable MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and _PASSWORD"
            )
        return value


class TrackersConfig(Settings):
    """Trackers that receive metrics, notes and the recipe, in addition to RUN_DIR/metrics.jsonl. None can stop or
    delay a run."""

    tensorboard: bool | None = None
    """Write RUN_DIR/tensorboard; null writes it if TensorBoard is installed."""
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    patience: NonNegativeFloat = Field(default=30.0, le=3600)
    """Seconds that the end of a run waits for its trackers."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        tags = self.wandb.tags if self.wandb is not None else []
        long = next((tag for tag in tags if len(tag) > 64), None)
        if long is not None:
            raise ValueError(f"wandb.tags: {long[:20]}... has {len(long)} characters; 64 are the most")
        return self
