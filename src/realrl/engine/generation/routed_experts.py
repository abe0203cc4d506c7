"""Experts that tokens passed through while rows were decoded, read from the cache as the rows leave it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from realrl.engine.generation.prefill import list_places
from realrl.engine.generation.scheduler import DecodeRow, ReleasedRow
from realrl.engine.model import Model
from realrl.model.routing import EXPERT_DTYPE, NONE_CHOSEN

_MESSAGE_BYTES = 64 << 20
"""Most bytes of rows that the stages of a pipeline put together at a time, but for a longer row alone."""


class RoutedExperts:
    """Experts of the rows of a generate call, in the layers of this rank's stage."""

    def __init__(self, record: Tensor) -> None:
        """`record`: that of the cache, [layers, blocks, BLOCK_TOKENS, k]."""
        self._record = record.flatten(1, 2)
        self._own: defaultdict[int, list[Tensor]] = defaultdict(list)
        """Parts of a row's own segment, from before and after it was preempted: [n, layers, k] each."""
        self._prompts: dict[int, Tensor] = {}
        """The prompt's segment, by row."""

    def read(self, released: Sequence[ReleasedRow]) -> None:
        """Read the experts of rows that leave the cache, before others write to their blocks.

        Of tokens that are prefilled again after a preemption, those count that they were sampled with.
        """
        if not released:
            return
        spans = [self._find_span(one) for one in released]
        places = torch.from_numpy(np.concatenate(spans)).to(self._record.device)
        found = self._record.index_select(1, places).transpose(0, 1).cpu()
        for one, part in zip(released, found.split([len(span) for span in spans]), strict=True):
            row = one.row
            shared = row.prompt.length - 1 if row.done else 0
            if row.done:
                self._prompts[row.number] = part[:shared]
            self._own[row.number].append(part[shared:])

    def _find_span(self, released: ReleasedRow) -> np.ndarray:
        """Find the places of the tokens that are read: at the end the prompt, and own ones not yet known."""
        row = released.row
        known = sum(len(part) for part in self._own[row.number])
        # The prompt's last token is the first of the row's own segment; the newest one has not passed through.
        own = list_places(released.blocks)[known : len(row.tokens)]
        if not row.done:
            return own
        return np.concatenate([list_places(released.prompt_blocks)[: row.prompt.length - 1], own])

    def row(self, row: DecodeRow) -> Tensor:
        """Put the experts of a whole row together, none of its newest token. [T, layers, k]"""
        parts = [self._prompts[row.number], *self._own[row.number]]
        return torch.cat([*parts, parts[0].new_full((1, *parts[0].shape[1:]), NONE_CHOSEN)])


def join_stages(model: Model, rows: Sequence[DecodeRow], experts: RoutedExperts) -> list[Tensor]:
    """Put the experts in the layers of all stages together; all stages call it. -> [T, layers * k] each"""
    found: list[Tensor] = []
    layers, mine = model.shape.layers, slice(model.shard.layers.start, model.shard.layers.stop)
    for part in _split(model, rows):
        lengths = [row.prompt.length + len(row.tokens) for row in part]
        assert model.shape.mixture is not None, "only mixtures have experts"
        whole = torch.zeros(sum(lengths), layers, model.shape.mixture.per_token, dtype=EXPERT_DTYPE)
        whole[:, mine] = torch.cat([experts.row(row) for row in part])
        if model.groups.pipeline.size > 1:
            # As bytes, which every backend adds; those of other stages' layers are 0.
            there = whole.view(torch.uint8).to(model.device)
            whole = model.groups.pipeline.sum(there).cpu().view(EXPERT_DTYPE)
        found += whole.flatten(1).split(lengths)
    return found


def _split(model: Model, rows: Sequence[DecodeRow]) -> Iterator[Sequence[DecodeRow]]:
    """Split rows into messages."""
    assert model.shape.mixture is not None, "only mixtures have experts"
    each = model.shape.layers * model.shape.mixture.per_token * EXPERT_DTYPE.itemsize
    part: list[DecodeRow] = []
    size = 0
    for row in rows:
        more = each * (row.prompt.length + len(row.tokens))
        if part and size + more > _MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(row)
        size += more
    yield part
