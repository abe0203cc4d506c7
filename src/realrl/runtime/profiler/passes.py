"""Measure the times of inference and training: the parts of one micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from realrl.algorithms.base.method import InferenceMethod, Metrics, TrainMethod
from realrl.algorithms.clipped_policy_loss import RefInference
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
    """The layers of a measured model. The first layer also prepares data for all layers."""

    windowed: tuple[bool, ...]
    """Whether each layer has a sliding window."""
    share: float
    """Share of layers with a window in the complete model that the measured model represents."""

    @classmethod
    def of(cls, measured: ModelShape, share: float | None = None) -> "LayerMix":
        """Describe a measured model. `share` is by default the share of the measured model itself."""
        windowed = tuple(layer in measured.windowed_layers for layer in range(measured.layers))
        return cls(windowed, find_window_share(measured) if share is None else share)

    def average(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer. The first layer must not take extra time."""
        return self._average(seconds, self.windowed)

    def typical(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer other than the first.

        `seconds` has all layers in order, or the first ones.
        """
        return self._average(seconds[1:] or seconds, self.windowed[1:] if seconds[1:] else self.windowed)

    def typical_backward(self, seconds: Sequence[float]) -> float:
        """Compute the seconds of an average layer's backward pass. `seconds` begins with the last layer."""
        kinds = self.windowed[::-1]
        return self._average(seconds[1:] or seconds, kinds[1:] if seconds[1:] else kinds)

    def first_extra(self, seconds: Sequence[float]) -> float:
        """Compute how many seconds longer the first layer takes than other layers of its kind."""
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
    """Return the share of layers that have a sliding window."""
    return len(shape.windowed_layers) / shape.layers


def make_records(lengths: Sequence[int], vocabulary: int, device: torch.device) -> Batch:
    """Create a batch like those in the calls of a PPO step, with sequences of these lengths.

    The first half of a sequence is the prompt. A single token is both prompt and answer.
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
        """Moments at which gradients are ready, from that of the last layer's output to that of the first layer's
        input."""
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

    A language model computes log-probabilities, and the policy loss with its entropy. A model with a scalar head
    computes values, and the value loss.
    """

    def __init__(self, model: Model, clock: Clock, window_share: float | None = None) -> None:
        """`window_share`: share of windowed layers in the complete model that this model represents; None for its
        own share."""
        self._model = model
        self._clock = clock
        self._layers = LayerMix.of(model.shape, window_share)
        self._layer_timer = LayerTimer(model, clock)
        self._trainer = _Trainer(model, clock)
        scalar = model.head == "scalar"
        self._inference: InferenceMethod = CriticInference(PPO) if scalar else RefInference()
        self._training: TrainMethod = _CriticGradients(PPO) if scalar else _ActorGradients(PPO)

    def measure(self, lengths: Sequence[int]) -> dict[str, float]:
        """Measure the seconds of the parts of a micro-batch, without gradients and with gradients.

        `lengths`: number of tokens in each sequence.
        """
        batch = make_records(lengths, self._model.shape.vocab_size, self._model.device)
        return self._infer(batch) | self._train(batch)

    def _infer(self, batch: Batch) -> dict[str, float]:
        """Measure inference: the time before the layers, of one layer, and after the layers."""
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
        """Measure training: a layer forward and backward, the head forward and backward, and everything before and
        after."""
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
    """Convert the results of `measure` to entries of a profile: times of inference, and the times that training
    adds."""
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
    """Trainer that records when the computation of gradients begins and ends."""

    def __init__(self, model: Model, clock: Clock) -> None:
        super().__init__(model, OptimizerConfig())
        self._clock = clock
        self.begun: Moment = 0.0
        self.left: Moment = 0.0
        """Moment at which the last backward pass ended."""
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
        """Always stop, after the base class has seen the metrics."""
        super().stop(metrics)
        return True


class _CriticGradients(CriticTrain):
    """Training of the critic without an update."""

    def stop(self, metrics: dict[str, float]) -> bool:
        """Always stop."""
        return True


def measure_preparation(sequences: int, answer: int, clock: Clock) -> float:
    """Measure the seconds in which PPO prepares experience, averaged over its two train calls.

    `AlgorithmSpec.experience_calls` lists the calls that prepare experience in this way.
    """
    batch = make_records([2 * answer] * sequences, 2, clock.device)
    methods = ActorTrain(PPO), CriticTrain(PPO)
    begin = clock.now()
    for method in methods:
        method.prepare(batch, lambda tensor: tensor)
    (seconds,) = clock.between(begin, clock.now())
    return seconds / len(methods)
