"""Measured times of inference and training: the parts of one micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from realrl.algorithms.base.method import InferenceMethod, Metrics, TrainMethod
from realrl.algorithms.policy_loss import RefInference
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_loss import ActorTrain, CriticInference, CriticTrain
from realrl.data.batch import Batch, Ragged
from realrl.engine.model import Model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import Head, ModelShape
from realrl.planner.profile.profile import LayerKind
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.profiler.points import Clock, Moment


@dataclass(frozen=True)
class LayerMix:
    """Layers of a measured model; the first also prepares data for all of them."""

    windowed: tuple[bool, ...]
    """Whether each layer has a sliding window."""
    share: float
    """Share of layers with a window in the model for which it stands."""

    @classmethod
    def of(cls, measured: ModelShape, share: float | None = None) -> "LayerMix":
        """Describe a measured model; `share` is its own by default."""
        windowed = tuple(layer in measured.windowed_layers for layer in range(measured.layers))
        return cls(windowed, find_window_share(measured) if share is None else share)

    def average(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer, if the first layer is like the others."""
        return self._average(seconds, self.windowed)

    def typical(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer; `seconds` has all layers in order, or the first ones."""
        return self._average(seconds[1:] or seconds, self.windowed[1:] if seconds[1:] else self.windowed)

    def typical_backward(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer backward; `seconds` begin with the last layer."""
        kinds = self.windowed[::-1]
        return self._average(seconds[1:] or seconds, kinds[1:] if seconds[1:] else kinds)

    def first_extra(self, seconds: Sequence[float]) -> float:
        """Compute the extra seconds of the first layer over other layers of its kind."""
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


def make_records(lengths: Sequence[int], vocabulary: int, device: torch.device) -> Batch:
    """Make a batch like in the calls of a PPO step, with sequences of these lengths.

    The first half of a sequence is the prompt; a single token is both.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocabulary, (sum(lengths),), generator=generator)
    sequences = Ragged(drawn, tuple(lengths))
    prompts = [max(1, length // 2) for length in lengths]
    zeros = Ragged(torch.zeros(sum(lengths)), sequences.lengths)
    once = Ragged.scalars(torch.ones(len(lengths)))
    fields = {
        "prompts": Ragged.of([row[:n] for row, n in zip(sequences.rows(), prompts, strict=True)]),
        "sequences": sequences,
        "prompt_length": Ragged.scalars(torch.tensor(prompts)),
        "finished": once,
        "score": once,
        **dict.fromkeys(("logprobs", "ref_logprobs", "values", "advantages", "returns"), zeros),
    }
    return Batch(tuple(range(len(lengths))), fields).to(device)


class LayerTimer:
    """Records when a model's layers begin and end in every pass."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self._clock = clock
        self.passes: list[list[Moment]] = []
        """Moments of each forward pass: the start of the first layer, and the end of every layer."""
        self.backward: list[Moment] = []
        """Moments at which gradients are ready: of each layer's output, last layer first, then of the input."""
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


PPO = PPOConfig()


class Passes:
    """Measures calls of a model with the methods of PPO.

    These are log-probabilities and the policy loss with its entropy, or values and the value loss.
    """

    def __init__(self, model: Model, clock: Clock, window_share: float | None = None) -> None:
        """`window_share`: share of windowed layers in the model for which this one stands; None for its own."""
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
        trainer.train(
            batch, self._training, whole, TrainOptions(max_tokens=len(batch["sequences"].values)), lr=1e-6
        )
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
    """Trainer that records the moments of gradient computation."""

    def __init__(self, model: Model, clock: Clock) -> None:
        super().__init__(model, OptimizerConfig())
        self._clock = clock
        self.begun: Moment = 0.0
        self.left: Moment = 0.0
        """End of the last backward pass."""
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
    """Measure the seconds of PPO's preparation of experience, averaged over its two train calls.

    `AlgorithmSpec.experience_calls` lists the calls that prepare experience in this way.
    """
    batch = make_records([2 * answer] * sequences, 2, clock.device)
    methods = ActorTrain(PPO), CriticTrain(PPO)
    begin = clock.now()
    for method in methods:
        method.prepare(batch, lambda tensor: tensor)
    (seconds,) = clock.between(begin, clock.now())
    return seconds / len(methods)
