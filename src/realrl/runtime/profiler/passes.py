"""Inference and training: what the parts of one micro-batch take."""

from collections.abc import Mapping
from statistics import median

from realrl.algorithms.method import InferenceMethod, Metrics, TrainMethod
from realrl.algorithms.ppo.actor import ActorTrain
from realrl.algorithms.ppo.critic import CriticTrain
from realrl.algorithms.ppo.inference import CriticInference, RefInference
from realrl.config.algorithms import PPOConfig
from realrl.config.model import OptimizerConfig
from realrl.data.batch import Batch
from realrl.engine.model import Model
from realrl.engine.train import Trainer
from realrl.planner.profile import LayerKind
from realrl.runtime.profiler.clock import Clock, Moment
from realrl.runtime.profiler.records import records
from realrl.runtime.profiler.watch import Watch

PPO = PPOConfig(early_stop_ratio=None)


class Passes:
    """The calls of a model, with the methods of PPO: log-probabilities and the policy loss with its entropy, or
    values and the value loss."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self._model, self._clock = model, clock
        self._watch = Watch(model, clock)
        self._trainer = _Trainer(model, clock)
        scalar = model.head == "scalar"
        self._inference: InferenceMethod = CriticInference() if scalar else RefInference()
        self._training: TrainMethod = CriticTrain(PPO) if scalar else ActorTrain(PPO)

    def measure(self, tokens: int, context: int) -> Mapping[LayerKind, float]:
        """Seconds of the parts of a micro-batch of `tokens // context` sequences of `context` tokens each."""
        batch = records(tokens // context, context, self._model.shape.vocab_size, self._model.device)
        enter, forward, head = self._infer(batch)
        all_enter, both, all_head, embedding = self._train(batch)
        heads: tuple[LayerKind, LayerKind] = ("head", "head_backward")
        if self._model.head == "scalar":
            heads = ("scalar", "scalar_backward")
        return {
            "enter": enter,
            "enter_backward": all_enter - enter + embedding,
            "forward": forward,
            "backward": both - forward,
            heads[0]: head,
            heads[1]: all_head - head,
        }

    def _infer(self, batch: Batch) -> tuple[float, float, float]:
        """Seconds before the layers, of a layer, and after them."""
        clock, tokens = self._clock, len(batch["sequences"].values)
        self._watch.clear()
        begin = clock.now()
        self._model.infer(batch, self._inference, tokens)
        end = clock.now()
        ((*marks,),) = self._watch.passes
        before, *layers, after = clock.between(begin, *marks, end)
        return before + first_extra(layers), typical(layers), after

    def _train(self, batch: Batch) -> tuple[float, float, float, float]:
        """Seconds before and after, of a layer and of the head, forward and backward, and of the embedding
        backward."""
        clock, trainer, tokens = self._clock, self._trainer, len(batch["sequences"].values)
        self._watch.clear()
        begin = clock.now()
        trainer.one_pass(batch, self._training, tokens)
        end = clock.now()
        trainer.optimizer.discard()
        ((*marks,),), back = self._watch.passes, self._watch.backward
        before, *forward, head = clock.between(begin, *marks, back[0])
        *backward, embedding, after = clock.between(*back, trainer.ended, end)
        extra = first_extra(forward)
        return before + after + extra, typical(forward) + typical(backward), head, embedding


class _Trainer(Trainer):
    """A trainer that only computes gradients, of one micro-batch at a time."""

    def __init__(self, model: Model, clock: Clock) -> None:
        super().__init__(model, OptimizerConfig())
        self._clock = clock
        # With nobody to add them up with, gradients would be copied away while the backward pass is timed.
        self._early = None
        self.ended: Moment = 0.0
        """When the last backward pass had ended."""

    def one_pass(self, batch: Batch, method: TrainMethod, budget: int) -> Metrics:
        """Add up the gradients of a batch."""
        return self._gradients(batch, method, budget, False)

    def _backward(self, done: object) -> None:
        super()._backward(done)  # type: ignore[arg-type]
        self.ended = self._clock.now()


def typical(layers: list[float]) -> float:
    """A layer among others. The first one also prepares what all of them use."""
    return median(layers[1:] or layers)


def first_extra(layers: list[float]) -> float:
    """What the first layer takes more than others."""
    return max(0.0, layers[0] - typical(layers))


def prepare(sequences: int, answer: int, clock: Clock) -> float:
    """Seconds of what `actor.train` and `critic.train` do before the first mini-batch, on average."""
    batch = records(sequences, 2 * answer, 2, clock.device)
    methods = ActorTrain(PPO), CriticTrain(PPO)
    begin = clock.now()
    for method in methods:
        method.prepare(batch, lambda tensor: tensor)
    (seconds,) = clock.between(begin, clock.now())
    return seconds / len(methods)
