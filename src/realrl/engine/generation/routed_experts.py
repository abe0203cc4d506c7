"""Experts that tokens passed through during decoding, read from the cache when rows leave it."""

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
"""Maximum number of bytes that the stages of a pipeline exchange in one message. A row with more bytes gets a
message of its own."""


class RoutedExperts:
    """Experts of the rows of a generate call, in the layers of this rank's stage."""

    def __init__(self, record: Tensor) -> None:
        """`record` is the cache's tensor, [layers, blocks, block_tokens, k]."""
        self._block_tokens = record.shape[2]
        self._record = record.flatten(1, 2)
        self._own: defaultdict[int, list[Tensor]] = defaultdict(list)
        """Experts of each row's own segment. A part is read whenever the row leaves the cache. [n, layers, k]
        each"""
        self._prompts: dict[int, Tensor] = {}
        """Experts of the prompt's segment, for each row that has left the cache."""

    def read(self, released: Sequence[ReleasedRow]) -> None:
        """Read the experts of rows that leave the cache, before other rows overwrite their blocks.

        A row that comes back is prefilled again, perhaps with other experts. Its record keeps the experts from
        sampling, which are read here.
        """
        if not released:
            return
        spans = [self._find_span(one) for one in released]
        places = torch.from_numpy(np.concatenate(spans)).to(self._record.device)
        found = self._record.index_select(1, places).transpose(0, 1).cpu()
        for one, part in zip(released, found.split([len(span) for span in spans]), strict=True):
            number = one.row.number
            shared = 0
            if number not in self._prompts:
                shared = one.row.prompt.length - 1
                self._prompts[number] = part[:shared]
            self._own[number].append(part[shared:])

    def _find_span(self, released: ReleasedRow) -> np.ndarray:
        """Find the cache places to read. They hold the tokens of the row's own segment that have not been read yet
        and, if the row leaves for the first time, those of its prompt."""
        row = released.row
        known = sum(len(part) for part in self._own[row.number])
        own = list_places(released.blocks, self._block_tokens)[known : released.cached]
        if row.number in self._prompts:
            return own
        prompt = list_places(released.prompt_blocks, self._block_tokens)[: row.prompt.length - 1]
        return np.concatenate([prompt, own])

    def rewind(self, row: DecodeRow, length: int) -> None:
        """Forget what was read of a row after the first `length` tokens of its continuation.

        The last of them is computed again. If none are left, the row starts again.
        """
        parts = self._own.pop(row.number, [])
        if not length:
            self._prompts.pop(row.number, None)
        elif parts:
            # The own segment begins with the last token of the prompt.
            self._own[row.number] = [torch.cat(parts)[:length]]

    def row(self, row: DecodeRow) -> Tensor:
        """Concatenate the experts of a whole row; the newest token has none. [T, layers, k]"""
        if row.number not in self._prompts:  # the row's environment failed before the model sampled a token
            layers, _, per_token = self._record.shape
            return self._record.new_full((row.prompt.length, layers, per_token), NONE_CHOSEN, device="cpu")
        parts = [self._prompts[row.number], *self._own[row.number]]
        return torch.cat([*parts, parts[0].new_full((1, *parts[0].shape[1:]), NONE_CHOSEN)])


def join_stages(model: Model, rows: Sequence[DecodeRow], experts: RoutedExperts) -> list[Tensor]:
    """Join the experts of all stages' layers, row by row; all stages call this together. -> [T, layers * k] each"""
    found: list[Tensor] = []
    layers, mine = model.shape.layers, list(model.shard.layers)
    for part in _split(model, rows):
        lengths = [row.prompt.length + len(row.tokens) for row in part]
        assert model.shape.mixture is not None, "only mixtures have experts"
        whole = torch.zeros(sum(lengths), layers, model.shape.mixture.per_token, dtype=EXPERT_DTYPE)
        whole[:, mine] = torch.cat([experts.row(row) for row in part])
        if model.groups.pipeline.size > 1:
            # Experts are summed as bytes, which every backend can add. Each stage has 0 in the layers of other
            # stages.
            there = whole.view(torch.uint8).to(model.device)
            whole = model.groups.pipeline.sum(there).cpu().view(EXPERT_DTYPE)
        found += whole.flatten(1).split(lengths)
    return found


def _split(model: Model, rows: Sequence[DecodeRow]) -> Iterator[Sequence[DecodeRow]]:
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
