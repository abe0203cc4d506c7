"""Settings of the training loop: its length, and what happens after spikes and skipped steps."""

from pydantic import Field, PositiveInt

from realrl.config.base import Settings


class SpikeConfig(Settings):
    """Detects spikes of a metric.

    After a spike, training goes back to a checkpoint and skips the records since then.
    """

    metric: str
    """Name of a metric of training steps: `call/name` as in metrics.jsonl, such as `actor.train/loss`."""
    factor: float = Field(default=3.0, gt=1, le=1e6)
    """Limit for spikes. A value is a spike if its distance above the median of earlier values exceeds the usual
    distance by this factor. The usual distance is the median distance of earlier values from their median."""
    window: int = Field(default=32, ge=4, le=10**5)
    """Number of earlier values that are used. Detection begins when half of them exist."""
    back: PositiveInt = 1
    """Minimum number of steps to go back from the spike. Training continues from the latest checkpoint that is old
    enough."""
    most: PositiveInt = 3
    """Maximum number of times that a run goes back. The next spike ends the run."""


class TrainingConfig(Settings):
    """Length of training, and what happens after spikes and skipped steps."""

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the training data. Every step has `data.batch` records. If the last step lacks records, it takes
    them from the next epoch, and a note says so."""
    steps: int | None = Field(default=None, gt=0, le=10**9)
    """Number of training steps. It takes precedence over `epochs`."""
    spike: SpikeConfig | None = None
    """Go back after a metric rises far above its usual values; null for never."""
    max_skipped: PositiveInt = 10
    """Maximum number of consecutive optimizer steps that a call may skip. An optimizer step is skipped if its
    gradient is not finite. The run also stops after as many consecutive training steps that each skipped an
    optimizer step. A run ends with an error if its last training step skipped all optimizer steps, or if every
    training step skipped an optimizer step."""


class AsynchronyConfig(Settings):
    """Sampling that runs ahead of training, on devices of its own, so that neither waits for the other."""

    staleness: int = Field(default=0, ge=0, le=8)
    """Number of steps by which sampling runs ahead of training. The samples of a step then come from weights that
    are this many optimizer steps of training older, and the algorithm must correct for it. 0 samples each batch
    with the latest weights. With 2 or more, reward functions run between sampling and training, in a step of their
    own. See docs/asynchrony.md."""
