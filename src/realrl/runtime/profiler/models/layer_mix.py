"""Average layer of a model, from measured layers with a sliding window and without."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from realrl.families.shape import ModelShape


@dataclass(frozen=True)
class LayerMix:
    """Layers of a model that is measured, of which the first also prepares what all of them use."""

    windowed: tuple[bool, ...]
    """Whether each has a sliding window."""
    share: float
    """Share of layers with a window in the model that it stands for."""

    @classmethod
    def of(cls, measured: ModelShape, share: float | None = None) -> "LayerMix":
        """Describe a measured model; `share` is its own by default."""
        windowed = tuple(layer in measured.windowed_layers for layer in range(measured.layers))
        return cls(windowed, find_window_share(measured) if share is None else share)

    def average(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer where the first does what all of them do."""
        return self._average(seconds, self.windowed)

    def typical(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer; `seconds` are those of each in turn, or of the first ones."""
        return self._average(seconds[1:] or seconds, self.windowed[1:] if seconds[1:] else self.windowed)

    def typical_backward(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer backward; `seconds` begin with the last layer."""
        kinds = self.windowed[::-1]
        return self._average(seconds[1:] or seconds, kinds[1:] if seconds[1:] else kinds)

    def first_extra(self, seconds: Sequence[float]) -> float:
        """Compute the extra seconds of the first layer, over others of its kind."""
        others = [*zip(seconds, self.windowed, strict=False)][1:]
        alike = [each for each, windowed in others if windowed == self.windowed[0]]
        return seconds[0] - (mean(alike) if alike else self.typical(seconds))

    def _average(self, seconds: Sequence[float], kinds: Sequence[bool]) -> float:
        windowed, full = (
            [each for each, kind in zip(seconds, kinds, strict=False) if kind == wanted]
            for wanted in (True, False)
        )
        if not windowed or not full:
            return mean(seconds)
        return self.share * mean(windowed) + (1 - self.share) * mean(full)


def find_window_share(shape: ModelShape) -> float:
    """Find the share of layers that have a sliding window."""
    return len(shape.windowed_layers) / shape.layers
