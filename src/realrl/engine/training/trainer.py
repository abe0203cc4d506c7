"""Training: gradients over micro-batches, stages and ranks, and one optimizer step per mini-batch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from realrl.algorithms.base.method import Metrics, TrainMethod
from realrl.data.batch import Batch
from realrl.dataflow.call import Candidates, Replay
from realrl.engine.buffers import LocalSet
from realrl.engine.host_items import HostItems, list_experts
from realrl.engine.micro_batches import MicroBatch
from realrl.engine.model import Model, read_candidates
from realrl.engine.offload import Offloadable
from realrl.engine.pass_messages import PassMessages
from realrl.engine.pass_schedule import Action
from realrl.engine.reduced_metrics import broadcast_metrics, reduce_metrics
from realrl.engine.training.expert_balance import ExpertBalance
from realrl.engine.training.full_gradients import FullGradients
from realrl.engine.training.gradients import Accumulation
from realrl.engine.training.sharded_gradients import ShardedGradients
from realrl.engine.training.skipped_steps import SkippedSteps, find_first_not_finite
from realrl.model.arithmetic.ops import LeftOut
from realrl.recipe.optimizer import OptimizerConfig

LOSS = "loss"
"""Name of the loss in the metrics of a train call."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a train call."""

    max_tokens: int
    """Maximum tokens of a micro-batch."""
    recompute: bool = False
    """Whether only the inputs of layers are kept for the backward pass, which then recomputes the layers."""
    zero_bubble: bool = False
    """Whether backward passes leave the gradients of weights for the time in which a pipeline stage would wait."""
    candidates: Candidates | None = None
    """Candidate tokens of the call."""
    call: str = "train"
    """Name of the call, for error messages."""
    after_pass: Callable[[], None] = lambda: None
    """Called after each forward and backward pass of a micro-batch."""
    before_update: Callable[[], None] = lambda: None
    """Called before parameters or optimizer state change."""


class Trainer:
    """Gradients and optimizer state of the parameter set that training updates.

    Other sets are frozen. They have no gradients, and gradients flow back only to the first pipeline stage with
    something to train.
    """

    def __init__(
        self,
        model: Model,
        config: OptimizerConfig,
        *,
        router_loss: float = 0.0,
        max_skipped: int | None = None,
    ) -> None:
        """`router_loss` is the coefficient of a mixture's balance loss (see `ExpertBalance`). `max_skipped` is the
        limit of `SkippedSteps`."""
        self.model = model
        self._skipped = SkippedSteps(max_skipped)
        mixture = model.shape.mixture
        assert mixture is not None or not router_loss, "only mixtures have routers"
        self._balance = None if mixture is None else ExpertBalance(model, mixture, router_loss)
        names = [name for name, updated in model.part.sets.items() if updated]
        assert len(names) == 1, f"a trainer updates one parameter set, not {', '.join(names) or 'none'}"
        (self.parameter_set,) = names
        trained = model.sets[self.parameter_set]
        self._first_trained = min(map(model.shard.find_first_place, trained.layout.specs))
        """Place of the first virtual stage with something to train (`Shard.find_first_place`)."""
        self._accumulation: Accumulation = (
            FullGradients(model, trained, config)
            if trained.layout.placement.strategy.zero == 1
            else ShardedGradients(model, trained, config, backward=self._find_backward_layers(trained))
        )
        self.optimizer = self._accumulation.optimizer
        self.gradients = self._accumulation.gradients
        self.updated = self._accumulation.updated
        """Tensors, or rows of tensors, that the optimizer works on."""
        workspace = [self.gradients.data, *self.optimizer.workspace]
        self._waiting: list[tuple[Batch, Metrics]] = []
        """Batches whose gradients no optimizer step has applied yet, with their metrics."""
        self._weight = 0.0
        """Global weight of these batches, if their gradients have not been divided by it."""
        self._loss = torch.zeros((), dtype=torch.float64, device=model.device)
        """Sum of this rank's losses since the last optimizer step."""
        self.memory = Offloadable(self._accumulation.persistent, workspace)
        """Memory that training needs in addition to the parameters."""

    def _find_backward_layers(self, trained: LocalSet) -> range:
        """Find the layers of this stage that gradients flow through: the last few, or all."""
        shard = self.model.shard
        specs = [tensor.spec for tensor in trained.layout.gathered_tensors(self.model.rank)]
        embeds = shard.first and any(spec.parameter in ("embedding", "positions") for spec in specs)
        layers = [shard.layers.index(spec.layer) for spec in specs if spec.layer is not None]
        count = len(shard.layers)
        return range(0 if embeds or self._sends_gradients(0) else min(layers, default=count), count)

    def _has_backward(self, virtual: int) -> bool:
        """Check whether a virtual stage of this rank, or an earlier one of any stage, has something to train."""
        return self.model.shard.find_place(virtual) >= self._first_trained

    def _sends_gradients(self, virtual: int) -> bool:
        """Check whether a virtual stage before this one has something to train."""
        return self.model.shard.find_place(virtual) > self._first_trained

    @property
    def updated_values(self) -> Tensor:
        """Values of `updated`, on the device or in host memory."""
        values = self.updated.buffer.data
        own = any(tensor is values for tensor in self._accumulation.persistent)
        return (self.memory if own else self.updated.memory).find_values(values)

    def spread(self) -> None:
        """Send this rank's updated parameters to all ranks that compute with them; all ranks call it together."""
        self.optimizer.publish()
        self._accumulation.spread()

    def adopt(self) -> None:
        """Copy parameters whose values were set from outside into the optimizer's own copies."""
        self._accumulation.adopt()
        self.optimizer.adopt()

    def train(
        self,
        batch: Batch,
        method: TrainMethod,
        minibatches: Sequence[Sequence[int]],
        options: TrainOptions,
        *,
        lr: float,
        replays: Sequence[Replay | None] = (),
    ) -> Metrics:
        """Run a train call on this rank's items.

        `minibatches` lists, for each mini-batch, the positions of its items in `batch`. Every rank of the group has
        the same number of mini-batches. `replays` is `Call.replays` of the call.

        Losses are sums divided by their global weight, so they do not depend on micro-batches or parallelism. An
        optimizer step with a loss or gradient that is not finite is skipped. A mini-batch without weight has
        nothing to learn; its step is left out, so that momentum and weight decay change nothing.

        Returns metrics summed over data-parallel ranks: the metrics of the method; `loss` (the differentiated loss,
        without a mixture's balance loss), unless the method reports a loss itself; `grad_norm` (mean over the
        applied steps); `skipped_steps` and `skipped_for/QUANTITY` (by the first quantity that was not finite);
        `empty_steps` (steps left out, if any); `learning_rate`; and for a mixture the metrics of
        `ExpertBalance.end_call`.

        Raises SkippedStepsError, on every rank, when too many steps in a row are skipped.
        """
        model = self.model
        data = model.groups.data
        recorded = batch
        batch = batch.without(list_experts(replays)).to(model.device)
        batch, metrics = method.prepare(batch, data.sum)
        items = HostItems.of(method.sequences(batch), recorded, replays)
        reduce_metrics(metrics, data, model.device)
        steps = [positions for _ in range(method.epochs) for positions in minibatches]
        self._skipped.begin_call(options.call)
        if self._balance is not None:
            self._balance.begin_call()
        empty = 0
        for positions in steps:
            minibatch = batch.select(positions)
            found, learns = self._accumulate_gradients(minibatch, method, options, items.select(positions))
            metrics.update(found)
            if not learns:
                self._discard()
                empty += 1
                continue
            if method.stop(found.result()):
                self._discard()
                break
            metrics.update(
                self._update(minibatch, found, lr, options.before_update, head_scale=method.head_scale)
            )
        metrics.update(self._end_updates(lr, empty))
        if self._balance is not None:
            metrics.update(self._balance.end_call())
        metrics.update(method.finish())
        return metrics

    def accumulate(
        self,
        batch: Batch,
        method: TrainMethod,
        options: TrainOptions,
        *,
        averages: bool = True,
        last: bool = False,
    ) -> Metrics:
        """Add the gradients of this rank's items to those of earlier calls. `update` applies their sum.

        `averages`: divide the loss by the global weight of these items, as `train` does. If this is false, `update`
        divides all gradients by the weight of the items of all calls. `last`: whether `update` follows and every
        rank has items, so that gradients can be reduced during the last backward pass. Otherwise some data-parallel
        ranks, but not the first, may have no items.

        If the method fails, all these gradients are dropped. Returns the metrics of `train`, without those of
        optimizer steps.
        """
        data = self.model.groups.data
        batch, metrics = method.prepare(batch.to(self.model.device), data.sum)
        reduce_metrics(metrics, data, self.model.device)
        if self._balance is not None:
            self._balance.begin_call()
        items = HostItems.of(method.sequences(batch), batch, ())
        try:
            found, learns = self._accumulate_gradients(
                batch, method, options, items, last=last, averages=averages
            )
        except BaseException:
            self._discard()  # gradients of some micro-batches must not stay behind
            raise
        if learns:
            self._waiting.append((batch, found))
        metrics.update(found)
        if self._balance is not None:
            metrics.update(self._balance.end_call())
        metrics.update(method.finish())
        return metrics

    def update(
        self,
        lr: float,
        *,
        call: str,
        before_update: Callable[[], None] = lambda: None,
        head_scale: float = 1.0,
    ) -> Metrics:
        """Make an optimizer step with the gradients of all `accumulate` calls since the last update.

        Returns the metrics of optimizer steps, see `train`. Without gradients, or if a loss or gradient is
        not finite, nothing changes. Raises SkippedStepsError like `train`.
        """
        self._skipped.begin_call(call)
        metrics, waiting = Metrics(), self._waiting
        if waiting:
            # Gradients that are not finite are reported with the first batch of such metrics, or else the last.
            wrong = next((one for one in waiting if not _is_finite(one[1])), waiting[-1])
            metrics.update(self._update(*wrong, lr, before_update, head_scale))
        else:
            self._discard()
        metrics.update(self._end_updates(lr, empty=int(not waiting)))
        return metrics

    def _update(
        self,
        minibatch: Batch,
        found: Metrics,
        lr: float,
        before_update: Callable[[], None],
        head_scale: float = 1.0,
    ) -> Metrics:
        """Make an optimizer step, or skip it if the loss or a gradient is not finite.

        `found`: the metrics of `minibatch`.
        """
        metrics = Metrics()
        summed = self._accumulation.finalize()
        before_update()
        norm = self.optimizer.step(
            lr, head_scale=head_scale, summed=summed, weight=self._weight or 1.0, loss=self._loss
        )
        if isfinite(norm):
            self._forget()
            self._accumulation.spread()
            self._skipped.count_applied()
            metrics.mean("grad_norm", torch.tensor(norm), 1)
        else:
            quantity = find_first_not_finite(self.model, minibatch, found, self._loss, self.gradients)
            self._discard()
            self._skipped.count_skipped(quantity, self._copy_for_report(minibatch))
        return metrics

    def _discard(self) -> None:
        """Drop all accumulated gradients."""
        self._accumulation.discard()
        self._forget()

    def _forget(self) -> None:
        """Forget what belongs to gradients that were applied or dropped."""
        self._waiting, self._weight = [], 0.0
        self._loss.zero_()

    def _end_updates(self, lr: float, empty: int) -> Metrics:
        """Return the metrics of the optimizer steps of a call. `empty`: the number of steps that were left out."""
        metrics = Metrics()
        for name, count in self._skipped.end_call().items():
            metrics.mean(name, torch.tensor(float(count)), 1)
        if empty:
            metrics.mean("empty_steps", torch.tensor(float(empty)), 1)
        metrics.mean("learning_rate", torch.tensor(lr), 1)
        return metrics

    @property
    def has_gradients(self) -> bool:
        """Whether `accumulate` has added gradients that no `update` has applied."""
        return bool(self._waiting)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of applied steps and the counts of skipped steps as JSON values; tensors are saved
        elsewhere."""
        return {"steps": self.optimizer.steps, "skipped": self._skipped.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.steps = state["steps"]
        self._skipped.load_state_dict(state["skipped"])

    def check_learning(self) -> None:
        """Raise SkippedStepsError unless training makes progress (see `SkippedSteps.check`)."""
        self._skipped.check()

    def _copy_for_report(self, minibatch: Batch) -> Batch | None:
        """Copy a mini-batch to the host for a report; None if another TP or CP rank or stage reports the same
        items."""
        groups = self.model.groups
        first = groups.tensor.index == groups.context.index == 0 and self.model.shard.last
        return minibatch.to(torch.device("cpu")) if first else None

    def _accumulate_gradients(
        self,
        batch: Batch,
        method: TrainMethod,
        options: TrainOptions,
        items: HostItems,
        *,
        last: bool = True,
        averages: bool = True,
    ) -> tuple[Metrics, bool]:
        """Accumulate the gradient of one mini-batch. `averages`: see `accumulate`.

        Returns, on every stage, its metrics summed over data-parallel ranks, and whether it has any weight.
        """
        model = self.model
        rows = method.sequences(batch)
        own_weight = float(method.weight(batch))
        totals = torch.tensor([own_weight, len(rows)], device=model.device)
        weight, sequences = model.groups.data.sum(totals)
        learns = bool(weight != 0)
        if averages:
            weight = torch.where(weight > 0, weight, 1.0)  # without weight, all losses are 0
        else:
            self._weight += float(weight)
            weight = torch.ones_like(weight)
        found = model.split_items(items, options.max_tokens, options.candidates)
        parts = model.select_own(found)
        metrics = Metrics()
        loss = torch.zeros((), dtype=torch.float64, device=model.device)
        minibatch = _MiniBatch(batch, items, weight, sequences, metrics, loss)
        passes: dict[tuple[int, int], _Pass] = {}
        accumulation = self._accumulation
        # If micro-batches have collectives of ranks with other ones, ranks with fewer of them run idle passes.
        joint = model.passes_are_joint or model.layout.placement.strategy.zero > 1
        aligned = joint or model.aligns_passes
        last = last and not (aligned and model.shard.vpp > 1)
        own = len(parts) + (last and self._lacks_last_pass(found, parts))
        count = model.agree_on_passes(own) if aligned else own
        splits = options.zero_bubble
        actions, messages = model.plan_passes(parts, count, first=self._first_trained, splits=splits)
        left_out: dict[tuple[int, int], LeftOut] = {}
        for action in actions:
            number, has_backward = action.micro_batch, self._has_backward(action.virtual)
            key, part = (number, action.virtual), parts[number] if number < len(parts) else None
            if part is None and action.kind != "W":
                messages.skip(action)
            if number >= own and not joint:
                continue  # other ranks have this micro-batch
            if action.kind == "F":
                if part is None:
                    done = self._run_idle(action, options)
                else:
                    done = self._forward(part, minibatch, method, options, action, messages)
                if has_backward:
                    passes[key] = done
                del done  # without a backward pass, this frees the activations before the next forward pass
            elif has_backward and action.kind == "W":
                left_out.pop(key).compute()
            elif has_backward:
                # The last micro-batch has the last backward pass of each virtual stage.
                accumulation.start_backward(last=last and number == count - 1)
                with left_out.setdefault(key, LeftOut()).collect() if splits else nullcontext():
                    self._backward(passes.pop(key), action, None if part is None else messages)
                accumulation.finish_backward()
            options.after_pass()
        messages.finish()
        self._loss += loss
        idle = not any(map(model.reports, parts))
        if model.shard.last and LOSS not in metrics.means and not idle:
            # The mean over mini-batches weighs each of them by its own weight.
            metrics.mean(LOSS, loss * weight, own_weight if model.groups.context.index == 0 else 0.0)
        groups = model.groups
        reduce_metrics(metrics, groups.copies, model.device, idle=idle and model.shard.last)
        metrics = broadcast_metrics(metrics, groups.context, 0, model.device)
        return broadcast_metrics(metrics, groups.pipeline, groups.pipeline.size - 1, model.device), learns

    def _lacks_last_pass(self, found: Sequence[MicroBatch], own: Sequence[MicroBatch]) -> bool:
        """Check whether this rank must add an idle pass, because gradients are reduced during its last pass.

        That cannot be a pass with peers that go on with other micro-batches. `found`: micro-batches of all
        context-parallel ranks; `own`: those of this rank.
        """
        if self.model.layout.placement.strategy.zero > 1:
            return False  # gradients are reduced in every pass
        ranks = self.model.groups.context.size
        alike = all(len(micro_batch.ranks) == ranks for micro_batch in found)
        return bool(found) and not alike and not (own and len(own[-1].ranks) == 1)

    def _forward(
        self,
        micro_batch: MicroBatch,
        minibatch: "_MiniBatch",
        method: TrainMethod,
        options: TrainOptions,
        action: Action,
        messages: PassMessages,
    ) -> "_Pass":
        """Run the forward pass of a micro-batch, and add its metrics to those of the mini-batch."""
        model, virtual = self.model, action.virtual
        part = minibatch.batch.select(micro_batch.items)
        items = minibatch.items.select(micro_batch.items)
        rows = method.sequences(part)
        packing = model.pack(rows, micro_batch)
        received = messages.receive(action)
        if received is not None:
            received.requires_grad_(self._sends_gradients(virtual))
        routing = items.make_routing(model.shard, packing, virtual)
        if self._balance is not None:
            routing = self._balance.route(routing, packing, minibatch.sequences, virtual)
        hidden = model.forward(
            rows, packing, received, recompute=options.recompute, routing=routing, virtual=virtual
        )
        if not model.shard.ends(virtual):
            messages.send(action, hidden)
            return _Pass(received, hidden)
        ids = read_candidates(part, options.candidates)
        output = model.compute_output(hidden, rows, packing, entropy=method.entropy, candidates=ids)
        loss, part_metrics = method.loss(part, output)
        loss = loss / minibatch.weight
        if model.reports(micro_batch):
            minibatch.metrics.update(part_metrics)
            minibatch.loss.add_(loss.detach())
        return _Pass(received, loss)

    def _run_idle(self, action: Action, options: TrainOptions) -> "_Pass":
        """Take part in the forward pass of other ranks."""
        sends = self._sends_gradients(action.virtual)
        output = self.model.run_idle(action.virtual, recompute=options.recompute, requires_grad=sends)
        return _Pass(None, output)

    def _backward(self, done: "_Pass", action: Action, messages: PassMessages | None) -> None:
        """Run the backward pass of an action. Without `messages`, it takes part in those of other ranks."""
        if messages is None:
            done.result.backward(torch.zeros_like(done.result))
            return
        done.result.backward(messages.receive(action))
        if self._sends_gradients(action.virtual):
            assert done.received is not None and done.received.grad is not None, (
                "every stage depends on the one before it"
            )
            messages.send(action, done.received.grad)


def _is_finite(metrics: Metrics) -> bool:
    return all(isfinite(float(total)) for total, _ in metrics.means.values())


@dataclass(frozen=True, eq=False)
class _MiniBatch:
    """Mini-batch of this rank."""

    batch: Batch
    items: HostItems
    """The same items on the host."""
    weight: Tensor
    """Weight that losses are divided by."""
    sequences: Tensor
    """Number of sequences of the mini-batch on all data-parallel ranks."""
    metrics: Metrics
    """Metrics of the micro-batches so far that this rank reports."""
    loss: Tensor
    """Sum of their losses."""


@dataclass(frozen=True, eq=False)
class _Pass:
    """Micro-batch between its forward and its backward pass: its input, and its output or loss."""

    received: Tensor | None
    result: Tensor
