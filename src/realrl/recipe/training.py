"""Settings of the training loop: its length, and reactions to spikes and skipped steps."""

from pydantic import Field, PositiveInt

from realrl.config.base import Settings


class SpikeConfig(Settings):
    """Spikes of a metric. After a spike, training goes back to a checkpoint and skips the records since then."""

    metric: str
    """Metric of training steps, `call/name` as in metrics.jsonl, such as `actor.train/loss`."""
    factor: float = Field(default=3.0, gt=1, le=1e6)
    """A value is a spike if its distance above the median of earlier values exceeds this multiple of their median
    distance."""
    window: int = Field(default=32, ge=4, le=10**5)
    """Number of earlier values; detection begins with half of them."""
    back: PositiveInt = 1
    """Minimum steps to go back before the spike, to the latest checkpoint that is old enough."""
    most: PositiveInt = 3
    """Maximum number of times in a run; the next spike ends it."""


class TrainingConfig(Settings):
    """Length of training, and reactions to spikes and skipped steps."""

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the training data. Every step has `data.batch` records: the last step takes additional records of
    the next epoch, with a note."""
    steps: int | None = Field(default=None, gt=0, le=10**9)
    """Number of training steps; takes precedence over `epochs`."""
    spike: SpikeConfig | None = None
    """Go back after a metric rises far above its usual values; null for never."""
    max_skipped: PositiveInt = 10
    """Maximum consecutive optimizer steps of a call with a gradient that is not finite; they are skipped. The same
    number of consecutive training steps with any skipped step also stops the run. A run also ends with an error if
    its last training step skipped all of them, or every training step skipped some."""
