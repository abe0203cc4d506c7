"""A role's model in one layout: flat parameters, and what can be computed with them without training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realrl.algorithms.method import InferenceMethod, Metrics, ModelOutput
from realrl.config.shape import Head, ModelShape
from realrl.data.batch import Batch, Ragged
from realrl.data.partition import micro_batches
from realrl.engine.flat import FlatBuffer
from realrl.engine.group import Group
from realrl.layout.tensors import model_tensors
from realrl.model.packing import Packing
from realrl.model.transformer import Transformer


class Model:
    """Parameters of a role as this rank holds them, bound to a transformer."""

    def __init__(
        self,
        shape: ModelShape,
        head: Head,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        temperature: float = 1.0,
    ) -> None:
        """`group` are the data-parallel ranks; `temperature` divides logits before log-probabilities."""
        self.shape, self.head, self.group = shape, head, group
        self.device, self.temperature = device, temperature
        self.parameters = FlatBuffer(model_tensors(shape, head), dtype, device, multiple_of=group.size)
        self.transformer = Transformer(shape, head, self.parameters.fused)

    def output(self, rows: Ragged, *, entropy: bool = False) -> ModelOutput:
        """Run the model on packed token rows, on its device; differentiable where gradients are on."""
        tokens = rows.values
        packing = Packing.of(rows.lengths, self.device)
        hidden = self.transformer(tokens, packing)
        if self.head == "scalar":
            return ModelOutput(rows.lengths, values=self.transformer.values(hidden))
        logprobs, entropies = self.transformer.logprobs(
            hidden, tokens, packing, temperature=self.temperature, entropy=entropy
        )
        return ModelOutput(rows.lengths, logprobs=logprobs, entropy=entropies)

    @torch.no_grad()
    def infer(self, batch: Batch, method: InferenceMethod, budget: int) -> tuple[Batch, Metrics]:
        """Run an inference call on this rank's items, at most `budget` tokens at a time.

        Returns the batch with the call's outputs among its fields, and figures added up over the group.
        """
        collected: dict[str, list[Tensor | None]] = {}
        for positions in micro_batches(item_tokens(batch, method.sequences(batch)), budget):
            part = batch.select(positions).to(self.device)
            outputs = method.outputs(part, self.output(method.sequences(part)))
            for key, field in outputs.items():
                rows = collected.setdefault(key, [None] * len(batch))
                for position, row in zip(positions, field.to(torch.device("cpu")).rows(), strict=True):
                    rows[position] = row
        fields = {key: Ragged.of([r for r in rows if r is not None]) for key, rows in collected.items()}
        batch = batch.with_fields(**fields)
        metrics = method.metrics(batch)
        reduce_metrics(metrics, self.group, self.device)
        return batch, metrics


def item_tokens(batch: Batch, rows: Ragged) -> Sequence[int]:
    """Tokens per item, where every item has the same number of consecutive rows."""
    per_item = len(rows) // len(batch)
    return [sum(rows.lengths[i : i + per_item]) for i in range(0, len(rows), per_item)]


def reduce_metrics(metrics: Metrics, group: Group, device: torch.device) -> None:
    """Add figures up over a group, in place. Every rank must have the same names in the same order."""
    if group.size == 1 or not (metrics.means or metrics.maxima):
        return
    sums = [part for pair in metrics.means.values() for part in pair]
    if sums:
        total = group.sum(torch.stack([s.to(device) for s in sums]))
        metrics.means = {name: (total[2 * i], total[2 * i + 1]) for i, name in enumerate(metrics.means)}
    if metrics.maxima:
        highest = group.max(torch.stack([m.to(device) for m in metrics.maxima.values()]))
        metrics.maxima = dict(zip(metrics.maxima, highest.unbind(), strict=True))
