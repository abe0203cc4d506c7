"""Settings of trackers: where metrics go besides metrics.jsonl."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.secrets.redaction import has_credentials


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
