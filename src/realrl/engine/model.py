"""Model of a role in one layout: flat parameters, and computation without training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from realrl.algorithms.method import InferenceMethod, Metrics, ModelOutput
from realrl.data.batch import Batch, Ragged
from realrl.data.partition import even_micro_batches, micro_batches
from realrl.engine.local_set import LocalSet, Parameters
from realrl.engine.parallel import Parallel
from realrl.engine.pipeline.messages import Pipeline, one_ahead
from realrl.families.shape import Head, ModelShape
from realrl.layout.layout import Layout, build_layout
from realrl.layout.sets import WHOLE, TrainablePart, build_parameter_sets
from realrl.layout.shard import Shard
from realrl.model.group import Group, alone
from realrl.model.packing import Packing
from realrl.model.transformer import Transformer
from realrl.plan.placement import Mesh, Placement, Strategy


class Model:
    """Parameters of a role as this rank holds them, bound to its shard of the transformer."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        parallel: Parallel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        temperature: float = 1.0,
        part: TrainablePart = WHOLE,
    ) -> None:
        """`rank` is global, `layout` that of the whole model, `parallel` its groups under the layout's placement;
        `temperature` divides logits before log-probabilities; `part` says which parameter sets there are."""
        self.layout, self.rank, self.parallel = layout, rank, parallel
        self.shape, self.head = layout.shape, layout.head
        self.dtype, self.device, self.temperature = dtype, device, temperature
        self.part = part
        self.sequence = layout.placement.strategy.sequence_parallel
        self.shard = Shard.of(layout.shape, layout.head, layout.placement, rank)
        sets = build_parameter_sets(layout.shape, layout.head, part, trained=True)
        self.sets = {
            name: LocalSet(replace(layout, subset=of.tensors), rank, dtype, device)
            for name, of in sets.items()
        }
        """By name, in storage order."""
        self.parameters = Parameters({name: of.buffer for name, of in self.sets.items()})
        self.transformer = Transformer(self.shard, self.parameters.fused, parallel.tensor)
        self.pipeline = Pipeline(
            parallel.pipeline,
            parallel.backward,
            hidden_size=self.shape.hidden_size,
            dtype=dtype,
            device=device,
        )

    @property
    def resident(self) -> bool:
        """Whether all parameters are in device memory: neither freed nor offloaded."""
        return all(of.resident for of in self.sets.values())

    def forward(
        self, rows: Ragged, packing: Packing, received: Tensor | None, *, recompute: bool = False
    ) -> Tensor:
        """Compute this stage's hidden states of packed token rows.

        `received` are the hidden states of the stage before, if any.

        With `recompute` the backward pass computes layers again, of which only the inputs are kept.
        """
        x = rows.values if received is None else received
        return self.transformer(x, packing, sequence=self.sequence, recompute=recompute)

    def output(self, hidden: Tensor, rows: Ragged, packing: Packing, *, entropy: bool = False) -> ModelOutput:
        """Compute the outputs of the last stage from the hidden states of the rows."""
        if self.head == "scalar":
            values = self.transformer.values(hidden, packing, sequence=self.sequence)
            return ModelOutput(rows.lengths, values=values)
        logprobs, entropies = self.transformer.logprobs(
            hidden,
            rows.values,
            packing,
            temperature=self.temperature,
            entropy=entropy,
            sequence=self.sequence,
        )
        return ModelOutput(rows.lengths, logprobs=logprobs, entropy=entropies)

    def hidden_rows(self, tokens: int) -> int:
        """Count the rows of hidden states that stages exchange for a number of tokens."""
        return -(-tokens // self.shard.tp) if self.sequence else tokens

    def received(self, tokens: Sequence[int]) -> Iterator[Tensor | None]:
        """Receive hidden states of the stage before, per micro-batch; None on the first stage."""
        if self.pipeline.first:
            return repeat(None, len(tokens))
        return one_ahead(self.pipeline.expect, map(self.hidden_rows, tokens))

    def received_gradients(self, tokens: Sequence[int]) -> Iterator[Tensor | None]:
        """Receive the gradients of the hidden states sent to the next stage; None on the last stage."""
        if self.pipeline.last:
            return repeat(None, len(tokens))
        return one_ahead(self.pipeline.expect_gradient, map(self.hidden_rows, tokens))

    def split(self, costs: Sequence[int], budget: int, *, per_stage: int = 2) -> list[list[int]]:
        """Split items into micro-batches of at most `budget` tokens.

        There are enough of them to keep a pipeline busy: about `per_stage` for each of its stages.
        """
        stages = self.parallel.pipeline.size
        if stages == 1:
            return micro_batches(costs, budget)
        return even_micro_batches(costs, budget, stages=stages, per_stage=per_stage)

    @torch.no_grad()
    def infer(
        self,
        batch: Batch,
        method: InferenceMethod,
        budget: int,
        turn: Callable[[], None] = lambda: None,
    ) -> tuple[Batch, Metrics]:
        """Run an inference call on this rank's items, at most `budget` tokens at a time; `turn` is called after
        each micro-batch.

        On the last stage, returns the batch with the call's outputs among its fields, and figures added up
        over data-parallel ranks; on the others the batch as it was, and no figures.
        """
        collected: dict[str, list[Tensor | None]] = {}
        costs = item_tokens(batch, method.sequences(batch))
        parts = self.split(costs, budget)
        received = self.received([sum(costs[i] for i in positions) for positions in parts])
        for positions in parts:
            part = batch.select(positions).to(self.device)
            outputs = self._infer_part(part, method, received)
            for key, field in outputs.items():
                slots = collected.setdefault(key, [None] * len(batch))
                for position, row in zip(positions, field.to(torch.device("cpu")).rows(), strict=True):
                    slots[position] = row
            turn()
        self.pipeline.finish()
        if not self.shard.last:
            return batch, Metrics()
        fields = {key: Ragged.of([r for r in rows if r is not None]) for key, rows in collected.items()}
        batch = batch.with_fields(**fields)
        metrics = method.metrics(batch)
        reduce_metrics(metrics, self.parallel.data, self.device)
        return batch, metrics

    def _infer_part(
        self, part: Batch, method: InferenceMethod, received: Iterator[Tensor | None]
    ) -> dict[str, Ragged]:
        """Run a micro-batch of an inference call; its outputs on the last stage, none on the others."""
        rows = method.sequences(part)
        packing = Packing.of(rows.lengths, self.device)
        hidden = self.forward(rows, packing, next(received))
        if self.shard.last:
            return method.outputs(part, self.output(hidden, rows, packing))
        self.pipeline.send(hidden)
        return {}


def whole_model(
    shape: ModelShape, head: Head, *, dtype: torch.dtype, device: torch.device, temperature: float = 1.0
) -> Model:
    """Make a model that lies whole on one rank, outside any run."""
    placement = Placement(Mesh(0, 1), Strategy(1))
    one = alone()
    parallel = Parallel(one, one, one, one, one, None)
    whole = build_layout(shape, head, placement)
    return Model(whole, 0, parallel, dtype=dtype, device=device, temperature=temperature)


def item_tokens(batch: Batch, rows: Ragged) -> Sequence[int]:
    """Count the tokens per item, where every item has the same number of consecutive rows."""
    per_item = len(rows) // len(batch)
    return [sum(rows.lengths[i : i + per_item]) for i in range(0, len(rows), per_item)]


def reduce_metrics(metrics: Metrics, group: Group, device: torch.device) -> None:
    """All-reduce metrics over a group, in place. Every rank must have the same names in the same order."""
    if group.size == 1 or not (metrics.means or metrics.maxima):
        return
    sums = [part for pair in metrics.means.values() for part in pair]
    if sums:
        total = group.sum(torch.stack([s.to(device) for s in sums]))
        metrics.means = {name: (total[2 * i], total[2 * i + 1]) for i, name in enumerate(metrics.means)}
    if metrics.maxima:
        highest = group.max(torch.stack([m.to(device) for m in metrics.maxima.values()]))
        metrics.maxima = dict(zip(metrics.maxima, highest.unbind(), strict=True))
