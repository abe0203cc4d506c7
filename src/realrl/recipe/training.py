"""Settings of the training loop: its length, and what happens after spikes and skipped steps."""

from typing import Self

from pydantic import Field, PositiveInt, model_validator

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
    """Maximum number of consecutive optimizer steps that a call may skip. An optimizer step is skipped if
    its loss or gradient is not finite. The run also stops after as many consecutive training steps that each
    skipped an optimizer step. A run ends with an error if its last training step skipped all optimizer steps,
    or if every training step skipped an optimizer step."""


class AsynchronyConfig(Settings):
    """Training while other answers are sampled: those of later batches, or the others of the same batch."""

    staleness: int = Field(default=0, ge=0, le=8)
    """Age of the oldest tokens of a batch when it is trained on: the number of training steps since the weights
    that sampled them. 0 samples each batch with the latest weights. With 2 or more, unless `partial`, reward
    functions run between sampling and training, in a step of their own. See docs/asynchrony.md."""
    partial: bool = False
    """Spread the answers of a batch over several steps, with an equal part of generation.max_new_tokens in each. An
    answer that has not ended goes on in the next step, with newer weights and beside the answers of the next batch.
    A long answer then delays no step."""
    overlap: bool = True
    """Train while the next batch is sampled. false trains after sampling, usually on the same devices; only
    `partial` is then asynchronous."""
    portions: int = Field(default=1, ge=1, le=64)
    """Hand on the answers of a step in this many portions, in the order in which they end. Rewards, inference and
    training work on a portion while the other answers go on, on other devices; the optimizer step follows when the
    last portion has been trained on. All tokens come from the latest weights. Above 1, `staleness` must be 0."""

    @property
    def ahead(self) -> int:
        """Number of steps by which sampling of a batch ends before training."""
        if not self.partial:
            return self.staleness
        return min(self.staleness, 1) if self.overlap else 0

    @property
    def span(self) -> int:
        """Number of steps over which sampling of a batch is spread."""
        return self.staleness - self.ahead + 1

    @property
    def active(self) -> bool:
        """Whether calls of a step overlap with sampling of the same step, or of another step."""
        return self.staleness > 0 or self.portions > 1

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.partial and self.span == 1:
            least = 2 if self.overlap else 1
            also = ", or overlap=false" if self.staleness else ""
            raise ValueError(
                f"partial=true with staleness={self.staleness} has one step for each answer; set staleness to"
                f" {least} or more{also}"
            )
        if self.portions > 1 and self.staleness:
            raise ValueError(
                f"portions={self.portions} with staleness={self.staleness}: training on earlier batches already"
                " overlaps with sampling; set portions=1, or staleness=0"
            )
        if not self.overlap and not self.partial:
            raise ValueError(
                "overlap=false without partial=true is synchronous; leave it out, with staleness=0"
            )
        return self
