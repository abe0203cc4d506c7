"""Times of inference and training: the parts of one micro-batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from realrl.algorithms.base.method import InferenceMethod, Metrics, TrainMethod
from realrl.algorithms.policy_methods import RefInference
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_methods import ActorTrain, CriticInference, CriticTrain
from realrl.data.batch import Batch
from realrl.engine.model import Model
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import Head
from realrl.planner.profile.profile import LayerKind
from realrl.recipe.model import OptimizerConfig
from realrl.runtime.profiler.models.layer_mix import LayerMix
from realrl.runtime.profiler.points.clock import Clock, Moment
from realrl.runtime.profiler.points.layer_timer import LayerTimer
from realrl.runtime.profiler.points.records import make_records

PPO = PPOConfig()


class Passes:
    """Calls of a model, measured with the methods of PPO.

    Log-probabilities and the policy loss with its entropy, or values and the value loss.
    """

    def __init__(self, model: Model, clock: Clock, window_share: float | None = None) -> None:
        """`window_share`: share of layers with a window in the model that this one stands for; None for its own."""
        self._model = model
        self._clock = clock
        self._layers = LayerMix.of(model.shape, window_share)
        self._layer_timer = LayerTimer(model, clock)
        self._trainer = _Trainer(model, clock)
        scalar = model.head == "scalar"
        self._inference: InferenceMethod = CriticInference(PPO) if scalar else RefInference()
        self._training: TrainMethod = _CriticGradients(PPO) if scalar else _ActorGradients(PPO)

    def measure(self, lengths: Sequence[int]) -> dict[str, float]:
        """Measure the seconds of the parts of a micro-batch, without gradients and with them.

        `lengths`: tokens of each sequence.
        """
        batch = make_records(lengths, self._model.shape.vocab_size, self._model.device)
        return self._infer(batch) | self._train(batch)

    def _infer(self, batch: Batch) -> dict[str, float]:
        """Measure inference: before the layers, one layer, and after them."""
        clock = self._clock
        tokens = len(batch["sequences"].values)
        self._layer_timer.clear()
        begin = clock.now()
        self._model.infer(batch, self._inference, tokens)
        end = clock.now()
        ((*marks,),) = self._layer_timer.passes
        before, *layers, after = clock.between(begin, *marks, end)
        extra = self._layers.first_extra(layers)
        return {"embed": before + extra, "layer": self._layers.typical(layers), "head": after}

    def _train(self, batch: Batch) -> dict[str, float]:
        """Measure training: before and after, a layer and the head both ways, and the embedding backward."""
        clock = self._clock
        trainer = self._trainer
        self._layer_timer.clear()
        whole = [list(range(len(batch)))]
        trainer.train(batch, self._training, whole, lr=1e-6, max_tokens=len(batch["sequences"].values))
        ((*marks,),), back = self._layer_timer.passes, self._layer_timer.backward
        before, *forward, head = clock.between(trainer.begun, *marks, back[0])
        *backward, embedding, after = clock.between(*back, trainer.left, trainer.ended)
        return {
            "trained embed": before + self._layers.first_extra(forward) + embedding + after,
            "trained layer": self._layers.typical(forward) + self._layers.typical_backward(backward),
            "trained head": head,
        }


def convert_parts(seconds: Mapping[str, float], head: Head) -> dict[LayerKind, float]:
    """Convert the results of `measure` to entries of a profile: inference, and what training adds."""
    heads: tuple[LayerKind, LayerKind] = ("head", "head_backward")
    if head == "scalar":
        heads = ("scalar", "scalar_backward")
    kinds: Mapping[str, tuple[LayerKind, LayerKind]] = {
        "embed": ("embed", "embed_backward"),
        "layer": ("forward", "backward"),
        "head": heads,
    }
    found: dict[LayerKind, float] = {}
    for part, (plain, added) in kinds.items():
        found |= {plain: seconds[part], added: seconds[f"trained {part}"] - seconds[part]}
    return found


class _Trainer(Trainer):
    """Trainer that records when it computes gradients."""

    def __init__(self, model: Model, clock: Clock) -> None:
        super().__init__(model, OptimizerConfig())
        self._clock = clock
        self.begun: Moment = 0.0
        self.left: Moment = 0.0
        """Moment at which the last backward pass had ended."""
        self.ended: Moment = 0.0

    def _accumulate_gradients(self, *args: Any, **options: Any) -> tuple[Metrics, bool]:
        self.begun = self._clock.now()
        result = super()._accumulate_gradients(*args, **options)
        self.ended = self._clock.now()
        return result

    def _backward(self, *args: Any) -> None:
        super()._backward(*args)
        self.left = self._clock.now()


class _ActorGradients(ActorTrain):
    """Training of the actor without an update."""

    def stop(self, metrics: dict[str, float]) -> bool:
        """Stop always, after the base class has seen the metrics."""
        super().stop(metrics)
        return True


class _CriticGradients(CriticTrain):
    """Training of the critic without an update."""

    def stop(self, metrics: dict[str, float]) -> bool:
        """Stop always."""
        return True


def measure_preparation(sequences: int, answer: int, clock: Clock) -> float:
    """Measure the seconds of making experience as PPO does, the average of its two train calls.

    Algorithms say which of their calls do the like (`AlgorithmSpec.experience_calls`).
    """
    batch = make_records([2 * answer] * sequences, 2, clock.device)
    methods = ActorTrain(PPO), CriticTrain(PPO)
    begin = clock.now()
    for method in methods:
        method.prepare(batch, lambda tensor: tensor)
    (seconds,) = clock.between(begin, clock.now())
    return seconds / len(methods)
