"""Layer timer: when a model's layers begin and end while calls run."""

from typing import Any

from torch import Tensor

from realrl.engine.model import Model
from realrl.runtime.profiler.points.clock import Clock, Moment


class LayerTimer:
    """Recorder of every pass through the layers of a model."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self._clock = clock
        self.passes: list[list[Moment]] = []
        """Moments of each forward pass: the start of the first layer, and the end of every layer."""
        self.backward: list[Moment] = []
        """Moments at which gradients are known: of each layer's output, last layer first, then of the input."""
        layers = model.transformer.layers
        layers[0].register_forward_pre_hook(self._begin)
        for layer in layers:
            layer.register_forward_hook(self._end)

    def clear(self) -> None:
        """Forget all passes."""
        self.passes.clear()
        self.backward.clear()

    def _begin(self, _: Any, inputs: tuple[Tensor, ...]) -> None:
        self._follow(inputs[0])
        self.passes.append([self._clock.now()])

    def _end(self, _: Any, __: Any, output: Tensor) -> None:
        self.passes[-1].append(self._clock.now())
        self._follow(output)

    def _follow(self, hidden: Tensor) -> None:
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.backward.append(self._clock.now()))
