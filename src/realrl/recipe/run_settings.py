"""Settings of checkpoints, of the launcher that supervises a run, and of trackers."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.redaction import has_credentials

Resume = Literal["auto", "changed", "never"]


class CheckpointConfig(Settings):
    """Checkpoints from which a run resumes, in RUN_DIR/checkpoints.

    A checkpoint is also written after the last step, and when a signal stops the run (SIGTERM, Ctrl-C).
    """

    last: bool = True
    """Write a checkpoint and the trained models after the last step. false is for runs that only measure the speed
    of steps."""

    every: PositiveInt | None = None
    """Number of training steps between checkpoints. null writes no checkpoints by steps."""
    minutes: float | None = Field(default=15.0, gt=0, le=1e5)
    """Minutes between checkpoints. null writes no checkpoints by time."""
    keep: PositiveInt = 2
    """Number of latest checkpoints to keep. An old checkpoint is deleted only after its successor is complete."""
    keep_best: NonNegativeInt = 0
    """Number of additional checkpoints to keep, namely the checkpoints with the best values of `evaluation.best`.
    If an evaluation is among the best, a checkpoint is written."""
    export: bool = False
    """Also write the trained models into each checkpoint as Hugging Face directories, one per role, such as
    step-000100/actor. `realrl export RUN_DIR` can write them later."""
    asynchronous: bool = True
    """Write checkpoints while training continues. Training waits only if parameters are about to change before they
    are saved. false stops training until the checkpoint is complete."""


class LaunchConfig(Settings):
    """How a run is started, watched and restarted."""

    by: Literal["local", "ray"] = "local"
    """What starts a process for each device: `local` on this machine, or `ray` on the nodes of a running Ray
    cluster. This setting has no effect under torchrun."""

    freeze_seconds: float = Field(default=30.0, ge=2, le=86_400)
    """Seconds without a heartbeat after which a process counts as frozen, and the run fails. A process sends a
    heartbeat every second while it computes or waits; a process that waits for a core is not frozen."""
    stall_minutes: float | None = Field(default=30.0, gt=0, le=100_000)
    """Minutes without progress on any rank after which a run counts as stuck, and fails. Progress means that an
    instruction ended, a token was generated, a micro-batch was computed, or a function returned. The limit is four
    times higher while the run starts, loads models, or ends. null for no limit."""
    max_restarts: int = Field(default=3, ge=0, le=1_000_000)
    """Maximum number of consecutive restarts from the last checkpoint without progress. Some failures end the run
    without a restart: a user's mistake, a full disk, diverged training, an interruption, or an exception before the
    first step. Under torchrun, use its `--max-restarts` instead."""
    shrink: bool = True
    """Whether to continue with fewer devices, and with a plan for them, if some devices are lost for good."""
    tries: PositiveInt = 2
    """Number of consecutive times that the process of a device may die, without progress of the run in between.
    Then the device is given up."""
    min_devices: PositiveInt = 1
    """Minimum number of devices to continue with."""
    grace_seconds: float = Field(default=600.0, ge=0, le=1_000_000)
    """Maximum seconds after SIGTERM or Ctrl-C to finish the step and write a checkpoint. A second signal ends the
    run at once. 0 always ends the run at once, without a checkpoint. Schedulers often allow less time before they
    kill a run."""


class WandbConfig(Settings):
    """Weights & Biases. The key comes from `wandb login` or the environment variable WANDB_API_KEY."""

    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes into RUN_DIR/wandb, for `wandb sync`; `disabled` does nothing; null uses WANDB_MODE, or
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
    """Address of the server or database; null uses MLFLOW_TRACKING_URI, or MLflow's default."""
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
    """Trackers that receive metrics, notes and the recipe, in addition to RUN_DIR/metrics.jsonl.

    No tracker can stop or delay a run.
    """

    tensorboard: bool | None = None
    """Write RUN_DIR/tensorboard. null writes it if TensorBoard is installed."""
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    patience: NonNegativeFloat = Field(default=30.0, le=3600)
    """Maximum seconds that a run waits for its trackers when it ends."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        tags = self.wandb.tags if self.wandb is not None else []
        long = next((tag for tag in tags if len(tag) > 64), None)
        if long is not None:
            raise ValueError(f"wandb.tags: {long[:20]}... has {len(long)} characters; 64 are the most")
        return self
