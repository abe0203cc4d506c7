"""Training: gradients over micro-batches, stages and ranks, one optimizer step per mini-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from realrl.algorithms.method import Metrics, TrainMethod
from realrl.data.batch import Batch
from realrl.engine.flat import FlatBuffer
from realrl.engine.model import Model, item_tokens, reduce_metrics
from realrl.engine.offload import Offloadable
from realrl.engine.pipeline.schedule import one_forward_one_backward
from realrl.engine.training.early_reduce import EarlyReduce
from realrl.engine.training.gradients import complete_gradients, needs_completion, owned
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.engine.training.skipped_steps import SkippedSteps, first_not_finite
from realrl.model.packing import Packing
from realrl.recipe.model import OptimizerConfig


class Trainer:
    """Gradients and optimizer state of the parameter set of a model that training updates.

    The others are frozen: they have neither, and no gradient is computed for them, or passed back to pipeline
    stages before the first one that has something to train.
    """

    def __init__(self, model: Model, config: OptimizerConfig, *, max_skipped: int | None = None) -> None:
        """`max_skipped`: see `SkippedSteps`."""
        self.model = model
        self._skipped = SkippedSteps(max_skipped)
        names = [name for name, updated in model.part.sets.items() if updated]
        assert len(names) == 1, f"a trainer updates one parameter set, not {', '.join(names) or 'none'}"
        (self.parameter_set,) = names
        trained = model.sets[self.parameter_set]
        parameters, parallel = trained.buffer, model.parallel
        first = min(stage for stages in trained.layout.stages for stage in stages)
        self._learns = model.shard.pp_index >= first
        """Whether this pipeline stage, or one before it, has something to train."""
        self._passes_back = model.shard.pp_index > first
        """Whether one before it has."""
        multiple = parallel.data.size * parameters.buckets
        self.gradients = FlatBuffer(parameters.tensors, torch.float32, model.device, multiple_of=multiple)
        for name, parameter in model.transformer.named_parameters():
            parameter.requires_grad_(model.transformer.sources[name][0] in parameters)
            if not parameter.requires_grad:
                continue
            if parameter.dtype != torch.float32:
                parameter.grad_dtype = torch.float32
            parameter.grad = self.gradients.fused(*model.transformer.sources[name])
        self.optimizer = ShardedAdamW(
            parameters,
            self.gradients,
            config,
            parallel.data,
            everyone=parallel.everyone,
            owned={tensor.name: owned(model, tensor) for tensor in parameters.tensors},
        )
        self._early = (
            None if needs_completion(model, trained) else EarlyReduce(model, self.gradients, self.optimizer)
        )
        self.memory = Offloadable(self.optimizer.kept, [self.gradients.data, *self.optimizer.scratch])
        """Memory that training needs besides the parameters."""

    def train(
        self,
        batch: Batch,
        method: TrainMethod,
        minibatches: Sequence[Sequence[int]],
        *,
        lr: float,
        budget: int,
        recompute: bool = False,
        turn: Callable[[], None] = lambda: None,
        call: str = "train",
    ) -> Metrics:
        """Run a train call on this rank's items.

        `minibatches` are positions in `batch`, as many and in the same order on every rank of the group.
        `budget` is the most tokens of a micro-batch; with `recompute` only inputs of layers are kept of it.
        `turn` is called after each of its passes. `call` is its name, for errors.
        Losses are sums divided by their global weight, so neither micro-batches nor any parallelism change
        them. An optimizer step whose gradient is not finite is skipped. Returns figures added up over data-parallel
        ranks: the method's own, `grad_norm` (mean over the steps that were not skipped), `skipped_steps` (their
        number), `skipped_for/QUANTITY` (by what was not finite first) and `learning_rate`.

        Raises SkippedStepsError, on every rank, when too many steps in a row were skipped.
        """
        model, data = self.model, self.model.parallel.data
        batch, metrics = method.prepare(batch.to(model.device), data.sum)
        reduce_metrics(metrics, data, model.device)
        steps = [positions for _ in range(method.epochs) for positions in minibatches]
        self._skipped.begin(call)
        for positions in steps:
            minibatch = batch.select(positions)
            figures = self._gradients(minibatch, method, budget, recompute, turn)
            metrics.update(figures)
            if method.stop(figures.result()):
                self.optimizer.discard()
                break
            complete_gradients(model, self.gradients)
            norm = self.optimizer.step(lr, head_scale=method.head_scale)
            if isfinite(norm):
                self._skipped.applied()
                metrics.mean("grad_norm", torch.tensor(norm), 1)
            else:
                quantity = first_not_finite(model, minibatch, figures, self.gradients)
                self.optimizer.discard()
                self._skipped.skipped(quantity, self._kept(minibatch))
        for name, count in self._skipped.end().items():
            metrics.mean(name, torch.tensor(float(count)), 1)
        metrics.mean("learning_rate", torch.tensor(lr), 1)
        metrics.update(method.finish())
        return metrics

    def check_learning(self) -> None:
        """Check that the last training step was applied; SkippedStepsError, see `SkippedSteps.check`."""
        self._skipped.check()

    def _kept(self, minibatch: Batch) -> Batch | None:
        """A mini-batch as it is kept; None where another rank has the same, as tensor ranks and stages do."""
        first = self.model.parallel.tensor.index == 0 and self.model.shard.last
        return minibatch.to(torch.device("cpu")) if first else None

    def _gradients(
        self, batch: Batch, method: TrainMethod, budget: int, recompute: bool, turn: Callable[[], None]
    ) -> Metrics:
        """Accumulate the gradient of one mini-batch; its metrics over data-parallel ranks, on every stage."""
        model = self.model
        weight = torch.tensor(float(method.weight(batch)), device=model.device)
        weight = model.parallel.data.sum(weight)
        weight = torch.where(weight > 0, weight, 1.0)  # losses of nothing add up to 0
        costs = item_tokens(batch, method.sequences(batch))
        parts = model.split(costs, budget)
        tokens = [sum(costs[i] for i in positions) for positions in parts]
        received = model.received(tokens)
        stage, stages = model.parallel.pipeline.index, model.parallel.pipeline.size
        gradients = model.received_gradients(tokens) if self._learns else None
        figures = Metrics()
        passes: dict[int, _Pass] = {}
        actions = one_forward_one_backward(stages, len(parts))[stage]
        for action in actions:
            if action is actions[-1] and self._early is not None:
                self._early.arm()
            if action.kind == "F":
                part = batch.select(parts[action.micro_batch])
                done = self._forward(part, method, next(received), weight, figures, recompute)
                if self._learns:
                    passes[action.micro_batch] = done
                del done  # what a stage without a backward pass has sent is of no use here
            elif gradients is not None:
                self._backward(passes.pop(action.micro_batch), next(gradients))
            turn()
        model.pipeline.finish()
        reduce_metrics(figures, model.parallel.data, model.device)
        return model.pipeline.figures_from_last(figures)

    def _forward(
        self,
        part: Batch,
        method: TrainMethod,
        received: Tensor | None,
        weight: Tensor,
        figures: Metrics,
        recompute: bool,
    ) -> "_Pass":
        model = self.model
        rows = method.sequences(part)
        packing = Packing.of(rows.lengths, model.device)
        if received is not None:
            received.requires_grad_(self._passes_back)
        hidden = model.forward(rows, packing, received, recompute=recompute)
        if not model.shard.last:
            model.pipeline.send(hidden)
            return _Pass(received, hidden)
        output = model.output(hidden, rows, packing, entropy=method.entropy)
        loss, part_figures = method.loss(part, output)
        figures.update(part_figures)
        return _Pass(received, loss / weight)

    def _backward(self, done: "_Pass", gradient: Tensor | None) -> None:
        done.result.backward(gradient)
        if self._passes_back:
            assert done.received is not None and done.received.grad is not None, (
                "every stage depends on the one before it"
            )
            self.model.pipeline.send_gradient(done.received.grad)


@dataclass(frozen=True, eq=False)
class _Pass:
    """Micro-batch between its forward and its backward pass: its input, and its output or loss."""

    received: Tensor | None
    result: Tensor
