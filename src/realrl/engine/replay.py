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
        starts = torch.arange(len(tokens), device=tokens.device) - packing.positions
        before = count[starts] - differs[starts].long()
        experts = torch.where((count > before)[:, None, None], NONE_CHOSEN, experts)
        if packing.share is not None:
            experts = packing.share.select(experts, padding=NONE_CHOSEN)
        return ReplayedRouting(experts)

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
            position, place = self.positions[number // per_item], number % per_item
            made = self.replays[place] if place < len(self.replays) else None
            if made is not None:
                sequence = self.batch[made.sequences].row(position)[:length]
                found = self.batch[made.experts].row(position)[:length]
                stop = start + len(sequence)
                tokens[start:stop] = sequence
                experts[start:stop] = found.view(len(sequence), *size)[:, layers]
            start += length
        return tokens, experts
