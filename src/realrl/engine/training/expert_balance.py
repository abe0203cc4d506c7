"""Balance of a mixture's experts in train calls: its loss and its metrics."""

import torch
from torch import Tensor

from realrl.algorithms.base.method import Metrics
from realrl.engine.model import Model
from realrl.families.shape import Mixture
from realrl.model.packing import Packing
from realrl.model.routing import BalancedRouting, ExpertCounts, Routing


class ExpertBalance:
    """Loss and metrics for the balance of a model's experts in train calls.

    Each sequence has a balance loss in each layer with experts (see `BalancedRouting`). The loss of an optimizer
    step is `coefficient` times the mean of this balance loss over the sequences of the mini-batch and these layers.
    So it does not depend on micro-batches or parallelism.
    """

    def __init__(self, model: Model, mixture: Mixture, coefficient: float) -> None:
        self._model, self._mixture, self._coefficient = model, mixture, coefficient
        shape, own = model.shape, model.shard.layers
        self._layers = [place for place, layer in enumerate(own) if shape.mixture_of(layer) is not None]
        """Layers of the stage that have experts."""
        self.begin_call()

    def begin_call(self) -> None:
        model = self._model
        self._counts = ExpertCounts(len(model.transformer.layers), self._mixture.experts, model.device)
        self._sequences = 0

    def route(self, inner: Routing, packing: Packing, sequences: Tensor, virtual: int = 0) -> Routing:
        """Wrap the routing `inner` of a micro-batch, so that it also counts and balances experts. The result serves
        the forward pass through a virtual stage and its recomputation.

        `sequences` is the number of sequences of the mini-batch on all data-parallel ranks.
        """
        group = None if packing.share is None else packing.share.group
        if virtual == 0 and (group is None or group.index == 0):
            self._sequences += len(packing.lengths)
        coefficient = None
        if self._coefficient:
            # Every TP rank computes the whole gradient, and these gradients are summed later. So each gradient is
            # divided by tp.
            shape = self._model.shape
            terms = (shape.layers - len(shape.dense_layers)) * self._model.shard.tp
            coefficient = self._coefficient / (terms * sequences)
        if packing.share is not None:
            rows = packing.share.rows
        else:
            rows = packing.rows if packing.common is None else packing.common.parts
        return BalancedRouting(
            inner,
            self._counts,
            rows=rows,
            members=None if packing.common is None else packing.common.members,
            lengths=packing.starts.diff(),
            coefficient=coefficient,
            group=group,
        )

    def end_call(self) -> Metrics:
        """Compute the metrics of the call, equal on all ranks; all ranks call it together.

        router_loss: mean of the balance losses. router_busiest: the number of tokens of a layer's busiest expert,
        divided by the mean over its experts. router_idle: share of a layer's experts that no token chose. The last
        two are means over layers, for the choices of the whole call.
        """
        device, groups = self._model.device, self._model.groups
        counts = self._counts
        sequences = torch.full((1,), float(self._sequences), dtype=torch.float64, device=device)
        summed = groups.copies.sum(torch.cat((counts.chosen.double().flatten(), counts.losses, sequences)))
        everything = summed[: counts.chosen.numel()].view_as(counts.chosen)
        chosen = everything[self._layers]
        of_stage = [
            summed[everything.numel() : -1].sum(),
            (chosen.amax(1) / chosen.mean(1)).sum(),
            (chosen == 0).double().mean(1).sum(),
            torch.full_like(summed[0], len(self._layers)),
        ]
        loss, busiest, idle, total = groups.pipeline.sum(torch.stack(of_stage))
        metrics = Metrics()
        metrics.mean("router_loss", loss, total * summed[-1])
        metrics.mean("router_busiest", busiest, total)
        metrics.mean("router_idle", idle, total)
        return metrics
