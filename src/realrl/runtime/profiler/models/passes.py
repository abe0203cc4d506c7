"""Inference and training: what the parts of one micro-batch take."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from realrl.algorithms.method import InferenceMethod, Metrics, TrainMethod
from realrl.algorithms.ppo.actor import ActorTrain
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.critic import CriticTrain
from realrl.algorithms.ppo.inference import CriticInference, RefInference
from realrl.data.batch import Batch
from realrl.engine.model import Model
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import Head
from realrl.planner.profile.profile import LayerKind
from realrl.recipe.model import OptimizerConfig
from realrl.runtime.profiler.points.clock import Clock, Moment
from realrl.runtime.profiler.points.records import records
from realrl.runtime.profiler.points.watch import Watch

PPO = PPOConfig()

ALIKE, UNLIKE = (72, 72, 72, 72), (120, 80, 56, 32)
"""Lengths of sequences that attention computes in one group, and in a group for each."""


class Passes:
    """The calls of a model, with the methods of PPO: log-probabilities and the policy loss with its entropy, or
    values and the value loss."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self._model, self._clock = model, clock
        self._watch = Watch(model, clock)
        self._trainer = _Trainer(model, clock)
        scalar = model.head == "scalar"
        self._inference: InferenceMethod = CriticInference(PPO) if scalar else RefInference()
        self._training: TrainMethod = _CriticGradients(PPO) if scalar else _ActorGradients(PPO)

    def measure(self, lengths: Sequence[int]) -> dict[str, float]:
        """Seconds of the parts of a micro-batch of sequences of so many tokens each, once without gradients and
        once with them."""
        batch = records(lengths, self._model.shape.vocab_size, self._model.device)
        return self._infer(batch) | self._train(batch)

    def measure_buckets(self) -> dict[str, float]:
        """The same of sequences of one length, and of such that have unlike ones."""
        return {
            f"{name} {part}": seconds
            for name, lengths in (("alike", ALIKE), ("unlike", UNLIKE))
            for part, seconds in self.measure(lengths).items()
        }

    def _infer(self, batch: Batch) -> dict[str, float]:
        """Before the layers, of a layer, and after them."""
        clock, tokens = self._clock, len(batch["sequences"].values)
        self._watch.clear()
        begin = clock.now()
        self._model.infer(batch, self._inference, tokens)
        end = clock.now()
        ((*marks,),) = self._watch.passes
        before, *layers, after = clock.between(begin, *marks, end)
        return {"enter": before + first_extra(layers), "layer": typical(layers), "head": after}

    def _train(self, batch: Batch) -> dict[str, float]:
        """Before and after, of a layer and of the head, forward and backward, and of the embedding backward."""
        clock, trainer = self._clock, self._trainer
        self._watch.clear()
        whole = [list(range(len(batch)))]
        trainer.train(batch, self._training, whole, lr=1e-6, budget=len(batch["sequences"].values))
        ((*marks,),), back = self._watch.passes, self._watch.backward
        before, *forward, head = clock.between(trainer.begun, *marks, back[0])
        *backward, embedding, after = clock.between(*back, trainer.left, trainer.ended)
        return {
            "trained enter": before + first_extra(forward) + embedding + after,
            "trained layer": typical(forward) + typical(backward),
            "trained head": head,
        }


def parts(seconds: Mapping[str, float], head: Head) -> dict[LayerKind, float]:
    """What `measure` has found, as a profile holds it: what training adds to inference."""
    heads: tuple[LayerKind, LayerKind] = ("head", "head_backward")
    if head == "scalar":
        heads = ("scalar", "scalar_backward")
    kinds: Mapping[str, tuple[LayerKind, LayerKind]] = {
        "enter": ("enter", "enter_backward"),
        "layer": ("forward", "backward"),
        "head": heads,
    }
    found: dict[LayerKind, float] = {}
    for part, (plain, added) in kinds.items():
        found |= {plain: seconds[part], added: seconds[f"trained {part}"] - seconds[part]}
    return found


def bucket_parts(seconds: Mapping[str, float]) -> dict[LayerKind, float]:
    """What `measure_buckets` has found: what each length more adds."""
    kinds: Mapping[str, LayerKind] = {"enter": "bucket_enter", "layer": "bucket"}

    def added(part: str) -> float:
        return (seconds[f"unlike {part}"] - seconds[f"alike {part}"]) / (len(UNLIKE) - 1)

    found = {kind: added(part) for part, kind in kinds.items()}
    return found | {"bucket_backward": added("trained layer") - added("layer")}


class _Trainer(Trainer):
    """A trainer that notes when it computes gradients."""

    def __init__(self, model: Model, clock: Clock) -> None:
        super().__init__(model, OptimizerConfig())
        self._clock = clock
        # With nobody to add them up with, gradients would be copied away while the backward pass is timed.
        self._early = None
        self.begun: Moment = 0.0
        self.left: Moment = 0.0
        """When the last backward pass had ended."""
        self.ended: Moment = 0.0

    def _gradients(self, *args: Any, **options: Any) -> Metrics:
        self.begun = self._clock.now()
        figures = super()._gradients(*args, **options)
        self.ended = self._clock.now()
        return figures

    def _backward(self, *args: Any) -> None:
        super()._backward(*args)
        self.left = self._clock.now()


class _ActorGradients(ActorTrain):
    """Without an update."""

    def stop(self, figures: dict[str, float]) -> bool:
        """Always."""
        super().stop(figures)
        return True


class _CriticGradients(CriticTrain):
    """Without an update."""

    def stop(self, figures: dict[str, float]) -> bool:
        """Always."""
        return True


def typical(layers: list[float]) -> float:
    """A layer among others. The first one also prepares what all of them use."""
    return median(layers[1:] or layers)


def first_extra(layers: list[float]) -> float:
    """What the first layer takes more than others."""
    return layers[0] - typical(layers)


def prepare(sequences: int, answer: int, clock: Clock) -> float:
    """Seconds of what `actor.train` and `critic.train` do before the first mini-batch, on average."""
    batch = records([2 * answer] * sequences, 2, clock.device)
    methods = ActorTrain(PPO), CriticTrain(PPO)
    begin = clock.now()
    for method in methods:
        method.prepare(batch, lambda tensor: tensor)
    (seconds,) = clock.between(begin, clock.now())
    return seconds / len(methods)
