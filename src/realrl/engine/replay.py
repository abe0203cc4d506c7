"""Router replay: calls that infer or train on sampled sequences use the experts that were recorded during
sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realrl.data.batch import Batch, Ragged, copy_to_device
from realrl.dataflow.call import Replay
from realrl.layout.shard import Shard
from realrl.model.packing import Packing
from realrl.model.routing import EXPERT_DTYPE, LIKELIEST, NONE_CHOSEN, ReplayedRouting, Routing

_NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class SampledItems:
    """Items with sampled sequences, and the experts that were chosen for these sequences. They are in host memory,
    which has more room than a GPU."""

    batch: Batch
    """Sequences and experts of all items."""
    replays: Sequence[Replay | None]
    """For each row of an item, the keys of its sequence and experts; None if the model has not sampled the row."""
    positions: Sequence[int]
    """The selected items of the batch."""

    @classmethod
    def of(cls, batch: Batch, replays: Sequence[Replay | None]) -> "SampledItems":
        names = [name for made in replays if made is not None for name in (made.sequences, made.experts)]
        return cls(Batch(batch.ids, {name: batch[name] for name in names}), replays, range(len(batch)))

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the recorded experts. Methods do not see these keys."""
        return tuple(made.experts for made in self.replays if made is not None)

    def select(self, positions: Sequence[int]) -> "SampledItems":
        """Select some of the items that are selected now. `positions` are positions among them."""
        return replace(self, positions=[self.positions[i] for i in positions])

    def make_routing(self, shard: Shard, rows: Ragged, packing: Packing) -> Routing:
        """Make the routing for the rows of a micro-batch. Each item has the same number of rows.

        The recorded experts are replayed for the longest prefix of a row that matches its sampled sequence; later
        tokens are routed normally. The j-th row of an item uses the j-th replay.
        """
        if not any(self.replays):
            return LIKELIEST
        tokens, experts = self._pack(rows.lengths, shard)
        tokens, experts = copy_to_device((tokens, experts), rows.values.device)
        # From a row's first difference on, the running count of differences is higher than before the row.
        differs = tokens != rows.values
        count = differs.cumsum(0)
        starts = packing.starts[packing.rows]
        before = count[starts] - differs[starts].long()
        experts = torch.where((count > before)[:, None, None], NONE_CHOSEN, experts)
        return ReplayedRouting(packing.select(experts, padding=NONE_CHOSEN))

    def limit_common(self, rows: Ragged, common: Sequence[int]) -> Sequence[int]:
        """Limit the numbers of tokens that neighbouring rows of all selected items begin with in common: a common
        token must also have the same recorded experts. `common`: see `count_common_tokens`."""
        if not any(self.replays):
            return common
        per_item = len(rows) // len(self.positions)
        replayed = [self._find_replayed(*divmod(i, per_item), row) for i, row in enumerate(rows.rows())]
        found = []
        for count, before, experts in zip(common, replayed, replayed[1:], strict=False):
            size = min(count, len(before), len(experts))
            differs = (before[:size] != experts[:size]).any(1).nonzero()
            if len(differs):
                count = int(differs[0])
            elif len(before) != len(experts):
                count = size
            found.append(count)
        return found

    def _find_replayed(self, item: int, place: int, row: Tensor) -> Tensor:
        """Find the experts that are replayed for a row: those of the tokens before the first difference from the
        sampled sequence. -> [tokens, layers * k]

        `item`: number of the item among the selected items; `place`: number of the row in its item.
        """
        found = self._find_sample(item, place, len(row))
        if found is None:
            return torch.empty(0, 1)
        tokens, experts = found
        differs = (tokens != row[: len(tokens)]).nonzero()
        return experts[: int(differs[0]) if len(differs) else len(tokens)]

    def _find_sample(self, item: int, place: int, length: int) -> tuple[Tensor, Tensor] | None:
        """Find up to `length` tokens of a row's sampled sequence, and the recorded experts of these tokens; None if
        the model has not sampled the row. -> [tokens], [tokens, layers * k]"""
        made = self.replays[place] if place < len(self.replays) else None
        if made is None:
            return None
        position = self.positions[item]
        tokens, experts = (self.batch[key].row(position)[:length] for key in (made.sequences, made.experts))
        return tokens, experts

    def _pack(self, lengths: Sequence[int], shard: Shard) -> tuple[Tensor, Tensor]:
        """Pack sampled tokens and their experts as rows of these lengths. -> [T], [T, layers of the stage, k]"""
        mixture, layers = shard.shape.mixture, slice(shard.layers.start, shard.layers.stop)
        assert mixture is not None, "only mixtures have experts"
        size = shard.shape.layers, mixture.per_token
        tokens = torch.full((sum(lengths),), _NO_TOKEN, dtype=torch.int64)
        experts = torch.full((len(tokens), len(shard.layers), size[1]), NONE_CHOSEN, dtype=EXPERT_DTYPE)
        per_item = len(lengths) // len(self.positions)
        start = 0
        for number, length in enumerate(lengths):
            found = self._find_sample(*divmod(number, per_item), length)
            if found is not None:
                sequence, of_sequence = found
                stop = start + len(sequence)
                tokens[start:stop] = sequence
                experts[start:stop] = of_sequence.view(len(sequence), *size)[:, layers]
            start += length
        return tokens, experts
