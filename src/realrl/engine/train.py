"""Training: gradients over micro-batches and data-parallel ranks, one optimizer step per mini-batch."""

from collections.abc import Sequence

import torch

from realrl.algorithms.method import Metrics, TrainMethod
from realrl.config.model import OptimizerConfig
from realrl.data.batch import Batch
from realrl.data.partition import micro_batches
from realrl.engine.flat import FlatBuffer
from realrl.engine.model import Model, item_tokens, reduce_metrics
from realrl.engine.optimizer import ShardedAdamW


class Trainer:
    """Gradients and optimizer state of a model."""

    def __init__(self, model: Model, config: OptimizerConfig) -> None:
        self.model = model
        parameters = model.parameters
        self.gradients = FlatBuffer(
            parameters.tensors, torch.float32, model.device, multiple_of=model.group.size
        )
        for name, parameter in model.transformer.named_parameters():
            parameter.requires_grad_(True)
            if parameter.dtype != torch.float32:
                parameter.grad_dtype = torch.float32
            parameter.grad = self.gradients.fused(*model.transformer.sources[name])
        self.optimizer = ShardedAdamW(parameters, self.gradients, config, model.group)

    def train(
        self,
        batch: Batch,
        method: TrainMethod,
        minibatches: Sequence[Sequence[int]],
        *,
        lr: float,
        budget: int,
    ) -> Metrics:
        """Run a train call on this rank's items.

        `minibatches` are positions in `batch`, as many and in the same order on every rank of the group.
        Losses are sums divided by their global weight, so neither micro-batches nor data parallelism change
        them. Returns figures added up over the group.
        """
        group, device = self.model.group, self.model.device
        batch, metrics = method.prepare(batch.to(device), group.sum)
        reduce_metrics(metrics, group, device)
        steps = [positions for _ in range(method.epochs) for positions in minibatches]
        for positions in steps:
            figures = self._gradients(batch.select(positions), method, budget)
            reduce_metrics(figures, group, device)
            metrics.update(figures)
            if method.stop(figures.result()):
                self.optimizer.discard()
                break
            metrics.mean("grad_norm", torch.tensor(self.optimizer.step(lr)), 1)
        metrics.mean("learning_rate", torch.tensor(lr), 1)
        metrics.update(method.finish())
        return metrics

    def _gradients(self, batch: Batch, method: TrainMethod, budget: int) -> Metrics:
        """Accumulate the gradient of one mini-batch; figures of this rank only."""
        group = self.model.group
        weight = group.sum(torch.tensor(float(method.weight(batch)), device=self.model.device)).item()
        figures = Metrics()
        for positions in micro_batches(item_tokens(batch, method.sequences(batch)), budget):
            part = batch.select(positions)
            output = self.model.output(method.sequences(part), entropy=method.entropy)
            loss, part_figures = method.loss(part, output)
            (loss / max(weight, 1.0)).backward()
            figures.update(part_figures)
        return figures
