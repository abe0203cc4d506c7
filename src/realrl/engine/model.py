"""One rank's part of a role's model: its flat parameters, its inference calls, and methods that training also
uses."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from realrl.algorithms.base.method import InferenceMethod, Metrics, ModelOutput
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Candidates, Replay, can_share_prompts
from realrl.engine.buffers import LocalSet, Parameters
from realrl.engine.dtypes import find_set_dtype
from realrl.engine.host_items import HostItems, list_experts
from realrl.engine.messages import Outputs, gather_outputs
from realrl.engine.micro_batches import MicroBatch, split_items
from realrl.engine.parallel_groups import ParallelGroups
from realrl.engine.pass_counts import PassCounts
from realrl.engine.pass_messages import OrderedMessages, PassMessages, PrefetchedMessages
from realrl.engine.pass_schedule import Action, make_schedule
from realrl.engine.pipeline import Pipeline
from realrl.engine.reduced_metrics import reduce_metrics
from realrl.engine.sharding import GatheredParameters, ShardedPasses
from realrl.families.shape import Head, ModelShape
from realrl.families.sizes import estimate_attention_cost
from realrl.layout.layout import Layout, build_layout
from realrl.layout.sets import BASE, WHOLE, TrainablePart, build_parameter_sets
from realrl.layout.shard import Shard
from realrl.model.arithmetic.ops import PLAIN, Products
from realrl.model.packing import Packing
from realrl.model.routing import LIKELIEST, Routing
from realrl.model.transformer import Transformer
from realrl.plan.placement import Mesh, Placement, Strategy


class Model:
    """This rank's parameters of a role, and the shard of the transformer that computes with them."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        groups: ParallelGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
        temperature: float = 1.0,
        part: TrainablePart = WHOLE,
        base: LocalSet | None = None,
        products: Products = PLAIN,
    ) -> None:
        """`rank` is global, `layout` describes the whole model, `groups` are the rank's groups under the layout's
        placement. `temperature` divides logits before log-probabilities. `part` determines which parameter sets
        exist and are trained. `base` is the parameter set `base` (the frozen weights) of another role's model, if
        this model shares it. The layouts of both models must be equal, but `base` may have more tensors."""
        self.layout = layout
        self.rank = rank
        self.groups = groups
        self.shape = layout.shape
        self.head = layout.head
        self.dtype = dtype
        self.device = device
        self.temperature = temperature
        self.part = part
        self.sequence_parallel = layout.placement.strategy.sequence_parallel
        self.shard = Shard.of(layout.shape, layout.head, layout.placement, rank)
        sets = build_parameter_sets(layout.shape, layout.head, part, trained=True)
        self.sets = {
            name: base
            if base is not None and name == BASE
            else LocalSet(replace(layout, subset=of.tensors), rank, find_set_dtype(name, dtype), device)
            for name, of in sets.items()
        }
        """Parameter sets by name, in storage order."""
        self.parameters = Parameters({name: of.buffer for name, of in self.sets.items()})
        """The parameters that this rank stores."""
        self.gathered: GatheredParameters | None = None
        """Parameters that this rank gathers section by section to compute with them; None without ZeRO-3."""
        if layout.placement.strategy.shards_parameters:
            self.gathered = GatheredParameters(self.sets, self.shard, rank, groups)
        weights = self.parameters.fused if self.gathered is None else self.gathered.fused
        self.transformer = Transformer(
            self.shard,
            weights,
            groups.tensor,
            products,
            expert_group=groups.experts,
            sequence_parallel=self.sequence_parallel,
        )
        self.passes: ShardedPasses | None = None
        """Hooks that gather parameters during passes; None without ZeRO-3."""
        if self.gathered is not None:
            self.passes = self.transformer.hooks = self.make_passes()
        self.counts = PassCounts(device)
        """Counts of the work that this rank does in a call."""
        self.pipeline = Pipeline(
            groups.pipeline,
            groups.reverse_pipeline,
            hidden_size=self.shape.hidden_size,
            dtype=dtype,
            device=device,
        )

    def make_passes(self) -> ShardedPasses:
        """Make the hooks that passes call under ZeRO-3, which shards parameters and gradients, or under ZeRO-2,
        which shards only gradients."""
        tied = self.transformer.ties_embeddings
        return ShardedPasses(self.shard, self.gathered, tied=tied)

    @property
    def passes_are_joint(self) -> bool:
        """Whether forward passes have collectives of ranks with different micro-batches: under ZeRO-3, and if such
        ranks divide the experts."""
        strategy = self.layout.placement.strategy
        return strategy.shards_parameters or strategy.spreads_experts

    @property
    def decodes_together(self) -> bool:
        """Whether generation takes its turns together with other data-parallel ranks, because they divide the
        experts."""
        return self.layout.placement.strategy.decodes_together

    @property
    def aligns_passes(self) -> bool:
        """Whether all ranks with the same parameters need the same number of passes in their schedules: if passes
        are joint, and if context-parallel ranks have virtual stages. The order of the passes of these ranks depends
        on their number, and they must reach the micro-batches that they divide in the same order."""
        return self.passes_are_joint or (self.shard.vpp > 1 and self.groups.context.size > 1)

    def agree_on_passes(self, count: int) -> int:
        """Return the largest `count` of all ranks with the same parameters. All of these ranks then take part in
        this number of passes, some of them in idle passes."""
        found = torch.tensor(float(count), device=self.device)
        return int(self.groups.copies.max(found))

    @torch.no_grad()
    def initialise_magnitudes(self) -> None:
        """Set DoRA's magnitudes to the norms of the adapted rows; all ranks call it together."""
        for layer in range(len(self.shard.layers)):
            if self.gathered is not None:
                self.gathered.gather(layer)
            self.transformer.initialise_magnitudes(layer)
            if self.gathered is not None:
                self.gathered.store(layer)
                self.gathered.free(layer)

    @property
    def resident(self) -> bool:
        """Whether all parameters are in device memory, neither freed nor offloaded."""
        return all(of.resident for of in self.sets.values())

    def pack(self, rows: Ragged, micro_batch: MicroBatch) -> Packing:
        """Pack the token rows of a micro-batch for the passes of this rank."""
        block = self.groups.blocks[len(micro_batch.ranks)]
        return Packing.of(rows.lengths, self.device, group=block, prefixes=micro_batch.prefixes)

    def forward(
        self,
        rows: Ragged,
        packing: Packing,
        received: Tensor | None,
        *,
        recompute: bool = False,
        routing: Routing = LIKELIEST,
        virtual: int = 0,
    ) -> Tensor:
        """Compute the hidden states of packed token rows after a virtual stage.

        `received` are the hidden states of the previous stage, if there is one. With `recompute`, only the inputs
        of layers are kept, and the backward pass recomputes the layers. `routing` chooses the experts of mixtures.
        """
        x = rows.values if received is None else received
        hidden: Tensor = self.transformer(x, packing, recompute=recompute, routing=routing, virtual=virtual)
        if self.groups.context.size == 1 and virtual == 0:
            self.counts.padded_tokens += packing.spans.padded_tokens
        return hidden

    def compute_output(
        self,
        hidden: Tensor,
        rows: Ragged,
        packing: Packing,
        *,
        entropy: bool = False,
        candidates: Tensor | None = None,
        likeliest: int = 0,
    ) -> ModelOutput:
        """Compute the outputs of the last stage from the hidden states of the rows.

        Log-probabilities are also computed for `candidates` [T, k], or, if `likeliest` is not 0, for this number of
        the likeliest tokens at each position.
        """
        if self.head == "scalar":
            values = self.transformer.compute_values(hidden, packing)
            return ModelOutput(rows.lengths, values=values)
        if likeliest:
            logprobs, candidates, best = self.transformer.find_likeliest(
                hidden, rows.values, packing, count=likeliest, temperature=self.temperature
            )
            return ModelOutput(
                rows.lengths, logprobs=logprobs, candidates=candidates, candidate_logprobs=best
            )
        logprobs, entropies, others = self.transformer.compute_logprobs(
            hidden, rows.values, packing, temperature=self.temperature, entropy=entropy, candidates=candidates
        )
        return ModelOutput(
            rows.lengths,
            logprobs=logprobs,
            entropy=entropies,
            candidates=candidates,
            candidate_logprobs=others,
        )

    def run_idle(self, virtual: int = 0, *, recompute: bool = False, requires_grad: bool = False) -> Tensor:
        """Take part in the collectives of a forward pass of other ranks: run a pass over two tokens that count
        nowhere, through a virtual stage.

        `requires_grad`: whether the stage before has something to train. Returns the output of the stage, whose
        backward pass with zeros takes part in the collectives of a backward pass. It reaches the same parameters as
        any other pass.
        """
        rows = Ragged.of([torch.zeros(2, dtype=torch.int64)]).to(self.device)
        packing, x = Packing.of(rows.lengths, self.device), rows.values
        if not self.shard.begins(virtual):
            shape = self.count_hidden_rows(2), self.shape.hidden_size
            x = torch.zeros(shape, dtype=self.dtype, device=self.device, requires_grad=requires_grad)
        hidden: Tensor = self.transformer(x, packing, recompute=recompute, virtual=virtual)
        if not self.shard.ends(virtual):
            return hidden
        output = self.compute_output(hidden, rows, packing)
        found = output.values if self.head == "scalar" else output.logprobs
        assert found is not None, "every head has an output"
        return found

    def count_hidden_rows(self, tokens: int) -> int:
        """Count the rows of hidden states that a rank exchanges with the next stage for a micro-batch of which it
        computes `tokens` tokens."""
        return -(-tokens // self.shard.tp) if self.sequence_parallel else tokens

    def plan_passes(
        self, parts: Sequence[MicroBatch], count: int, *, first: int | None = None, splits: bool = False
    ) -> tuple[Sequence[Action], PassMessages]:
        """Return the passes of this stage in order, and what carries the messages between them.

        `parts`: the micro-batches of this rank. `count`: number of micro-batches in the schedule. Those after
        `parts` have no messages, and their actions are skipped (`PassMessages.skip`). `first`: for training, the
        place of the first virtual stage with something to train (`Shard.find_first_place`). `splits`: whether
        backward passes leave out the gradients of weights.
        """
        shard, train = self.shard, first is not None
        rows = [self.count_hidden_rows(micro_batch.own_tokens) for micro_batch in parts]
        schedule = make_schedule(shard.pp, count, shard.vpp, backward=train, splits=splits, first=first or 0)
        actions = schedule.actions[shard.pp_index]
        if shard.vpp == 1 and not splits:
            gradients = first is not None and shard.pp_index >= first
            return actions, PrefetchedMessages(self.pipeline, rows, gradients=gradients)
        return actions, OrderedMessages(self.pipeline, schedule.messages, rows)

    def split_items(
        self, items: HostItems, max_tokens: int, candidates: Candidates | None
    ) -> list[MicroBatch]:
        """Split the items of a call into micro-batches of this rank and of its context-parallel peers. For the
        arguments, see `micro_batches.split_items`."""
        context, shape = self.groups.context, self.shape
        found = split_items(
            items,
            max_tokens=max_tokens,
            stages=self.groups.pipeline.size,
            shares=can_share_prompts(candidates),
            ranks=context.size,
            attention_cost=estimate_attention_cost(shape),
        )
        self.counts.add_micro_batches(found, context.size)
        return found

    def select_own(self, found: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Select the micro-batches that this rank computes."""
        return [micro_batch for micro_batch in found if self.groups.context.index in micro_batch.ranks]

    def reports(self, micro_batch: MicroBatch) -> bool:
        """Check whether this rank reports the results of a micro-batch. All ranks that divide it have them."""
        return self.groups.context.index == micro_batch.ranks.start

    @torch.no_grad()
    def infer(
        self,
        batch: Batch,
        method: InferenceMethod,
        max_tokens: int,
        after_micro_batch: Callable[[], None] = lambda: None,
        candidates: Candidates | None = None,
        replays: Sequence[Replay | None] = (),
    ) -> tuple[Batch, Metrics]:
        """Run an inference call on this rank's items, in micro-batches of at most `max_tokens` tokens.

        `after_micro_batch` is called after each micro-batch. `candidates` and `replays` are `Call.candidates` and
        `Call.replays` of the call.

        The last stage returns the batch with the call's outputs added, and metrics summed over data-parallel ranks.
        Other stages return the batch unchanged and no metrics. Data-parallel ranks without items only join the
        collectives.
        """
        found: list[Outputs] = []
        recorded, batch = batch, batch.without(list_experts(replays))
        items = HostItems.of(method.sequences(batch), recorded, replays)
        parts = self.select_own(self.split_items(items, max_tokens, candidates))
        joint = self.passes_are_joint
        count = self.agree_on_passes(len(parts)) if self.aligns_passes else len(parts)
        actions, messages = self.plan_passes(parts, count)
        for action in actions:
            if action.micro_batch >= len(parts):
                messages.skip(action)
                if joint:
                    self.run_idle(action.virtual)
                    if self.passes is not None:
                        self.passes.release()
                continue
            micro_batch = parts[action.micro_batch]
            part = batch.select(micro_batch.items).to(self.device)
            of_part = items.select(micro_batch.items)
            outputs = self._infer_part(part, method, micro_batch, action, messages, candidates, of_part)
            if self.reports(micro_batch) and outputs is not None:
                found.append((micro_batch.items, outputs))
            after_micro_batch()
        messages.finish()
        if not self.shard.last:
            return batch, Metrics()
        found = gather_outputs(found, self.groups.context, self.device)
        batch = batch.with_fields(**_join_outputs(found))
        metrics = method.metrics(batch) if len(batch) else Metrics()
        reduce_metrics(metrics, self.groups.data, self.device, idle=not len(batch))
        return batch, metrics

    def _infer_part(
        self,
        part: Batch,
        method: InferenceMethod,
        micro_batch: MicroBatch,
        action: Action,
        messages: PassMessages,
        candidates: Candidates | None,
        items: HostItems,
    ) -> dict[str, Ragged] | None:
        """Run a pass of an inference call; returns outputs in host memory after the last virtual stage of all, and
        None after others."""
        rows, virtual = method.sequences(part), action.virtual
        packing = self.pack(rows, micro_batch)
        routing = items.make_routing(self.shard, packing, virtual)
        hidden = self.forward(rows, packing, messages.receive(action), routing=routing, virtual=virtual)
        if self.shard.ends(virtual):
            likeliest = candidates.count if candidates is not None and candidates.ids is None else 0
            ids = read_candidates(part, candidates)
            output = self.compute_output(hidden, rows, packing, candidates=ids, likeliest=likeliest)
            if self.passes is not None:
                self.passes.release()
            outputs = method.outputs(part, output)
            return {key: field.to(torch.device("cpu")) for key, field in outputs.items()}
        messages.send(action, hidden)
        return None


def make_unsharded_model(
    shape: ModelShape,
    head: Head,
    *,
    dtype: torch.dtype,
    device: torch.device,
    temperature: float = 1.0,
    products: Products = PLAIN,
) -> Model:
    """Make a model that is whole on one rank, for use outside a run."""
    placement = Placement(Mesh(0, 1), Strategy())
    groups = ParallelGroups.of_single_rank()
    layout = build_layout(shape, head, placement)
    return Model(
        layout,
        0,
        groups,
        dtype=dtype,
        device=device,
        temperature=temperature,
        part=TrainablePart(quantised=shape.quantised is not None),
        products=products,
    )


def _join_outputs(found: Sequence[Outputs]) -> dict[str, Ragged]:
    """Join the outputs of micro-batches, in the order of items."""
    rows: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    for positions, outputs in found:
        for key, field in outputs.items():
            rows[key].update(zip(positions, field.rows(), strict=True))
    return {key: Ragged.of([of[position] for position in sorted(of)]) for key, of in rows.items()}


def read_candidates(batch: Batch, candidates: Candidates | None) -> Tensor | None:
    """Read the candidate ids of a call from its inputs, [T, k] int64; None if the call has no such input."""
    if candidates is None or candidates.ids is None:
        return None
    return batch[candidates.ids].values.long()
