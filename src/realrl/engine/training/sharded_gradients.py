"""Gradients and updates under ZeRO-2 and ZeRO-3."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.engine.buffers import LocalSet
from realrl.engine.model import Model
from realrl.engine.sharding import SectionBuffer, SectionGradients, group_by_section
from realrl.engine.training.gradients import (
    Accumulation,
    find_counted_elements,
    require_gradients,
    sum_tensor_parallel,
    sum_tied_embeddings,
)
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.model.group import all_gather, make_single_rank_group
from realrl.plan.placement import Placement
from realrl.recipe.optimizer import OptimizerConfig


class ShardedGradients(Accumulation):
    """Gradients under ZeRO-2 and ZeRO-3: a rank accumulates and updates only its own rows.

    Under ZeRO-3 a rank updates the parameters that it stores. Under ZeRO-2 every rank has all parameters; a rank
    updates float32 copies of its rows, and `spread` sends them to all ranks.
    """

    def __init__(self, model: Model, trained: LocalSet, config: OptimizerConfig, *, backward: range) -> None:
        """`trained` is the parameter set that is updated; `backward` are the layers that gradients flow through."""
        self._model, self._trained = model, trained
        placement = trained.layout.placement
        self._copies = not placement.strategy.shards_parameters
        self.updated = trained
        if self._copies:
            rows = Placement(placement.mesh, replace(placement.strategy, zero=3))
            layout = replace(trained.layout, placement=rows)
            self.updated = LocalSet(layout, model.rank, torch.float32, model.device)
        self.adopt()
        complete = partial(sum_tensor_parallel, model)
        self._sections = SectionGradients(self.updated, model.shard, model.rank, model.groups, complete)
        self.gradients = self._sections.rows
        require_gradients(model, trained, self._sections.fused)
        self._passes = model.passes or model.make_passes()
        self._passes.train(self._sections, backward)
        model.transformer.hooks = self._passes
        locals_ = self.updated.layout.tensors(model.rank)
        self.optimizer = ShardedAdamW(
            self.updated.buffer,
            self.gradients,
            config,
            *(make_single_rank_group(model.rank) for _ in self.updated.buffer.runs),
            norm_group=model.groups.mesh,
            counted={local.spec.name: find_counted_elements(model, local) for local in locals_},
        )

    @property
    def persistent(self) -> list[Tensor]:
        return [*self.optimizer.persistent, *([self.updated.buffer.data] if self._copies else [])]

    def start_backward(self, *, last: bool) -> None:
        self._passes.start_backward()

    def finish_backward(self) -> None:
        self._passes.finish_backward()

    def finalize(self) -> Mapping[str, Tensor]:
        sum_tied_embeddings(self._model, self.gradients)
        return {}

    @torch.no_grad()
    def spread(self) -> None:
        if not self._copies:
            return
        target = self._trained.buffer
        arriving: deque[tuple[SectionBuffer, list[dist.Work | None]]] = deque()

        def finish() -> None:
            section, works = arriving.popleft()
            for work, names in zip(works, section.stacks, strict=True):
                if work is not None:
                    work.wait()
                target.fused(*names).copy_(section.buffer.fused(*names))
            section.free()

        for section in self._list_sections():
            section.allocate()
            works = []
            for names, group in section.stacks.items():
                rows = self.updated.buffer.fused(*names).view(-1).to(target.data.dtype)
                works.append(all_gather(section.view_stack(names), rows, group, async_op=True))
            arriving.append((section, works))
            if len(arriving) > 1:  # one section arrives while the previous one is copied
                finish()
        while arriving:
            finish()

    def _list_sections(self) -> Iterator[SectionBuffer]:
        """Yield a buffer for each section of the parameters. Under ZeRO-2, every rank has all of them."""
        whole = self._trained.buffer.data
        tensors = self._trained.layout.tensors(self._model.rank)
        for stacks in group_by_section(self._model.shard, tensors).values():
            yield SectionBuffer(stacks, self._model.groups, whole.dtype, whole.device)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy this rank's rows of the parameters to its float32 copies (see `Accumulation.adopt`)."""
        if not self._copies:
            return
        stacks = (stack for section in self._list_sections() for stack in section.stacks.items())
        for names, group in stacks:
            mine = self.updated.buffer.fused(*names).view(-1)
            first = group.index * mine.numel()
            taken = self._trained.buffer.fused(*names).view(-1)[first : first + mine.numel()]
            mine[: len(taken)].copy_(taken)
