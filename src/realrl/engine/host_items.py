"""What a call knows of its items on the host: token rows, which may begin alike, and the experts that were recorded
during sampling, which inference and training use again (router replay)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from realrl.data.batch import Batch, Ragged, copy_to_device
from realrl.data.prefixes import count_common_tokens
from realrl.dataflow.call import Replay
from realrl.layout.shard import Shard
from realrl.model.packing import Packing
from realrl.model.routing import EXPERT_DTYPE, LIKELIEST, NONE_CHOSEN, ReplayedRouting, Routing


def list_experts(replays: Sequence[Replay | None]) -> list[str]:
    """List the keys of recorded experts. Methods do not see these keys."""
    return [made.experts for made in replays if made is not None]


@dataclass(frozen=True, eq=False)
class HostItems:
    """Token rows of items, with recorded experts if they were sampled. They are in host memory, which has more room
    than a GPU."""

    rows: Ragged
    """Token rows of all items, the same number of consecutive rows for each."""
    sampled: Batch
    """Sampled sequences and their experts, of all items."""
    replays: Sequence[Replay | None]
    """For each row of an item, the keys of its sequence and experts; None if the model has not sampled the row."""
    positions: Sequence[int]
    """The selected items."""

    @classmethod
    def of(cls, rows: Ragged, batch: Batch, replays: Sequence[Replay | None]) -> "HostItems":
        """`rows`: token rows of the items of `batch`, in any memory. `batch` has the recorded experts of
        `replays`."""
        names = [name for made in replays if made is not None for name in (made.sequences, made.experts)]
        sampled = Batch(batch.ids, {name: batch[name] for name in names})
        return cls(rows.to(torch.device("cpu")), sampled, replays, range(len(batch)))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def rows_per_item(self) -> int:
        return len(self.rows) // max(1, len(self.sampled))

    def select(self, positions: Sequence[int]) -> "HostItems":
        """Select some of the items that are selected now. `positions` are positions among them."""
        return replace(self, positions=[self.positions[i] for i in positions])

    def list_rows(self) -> list[Tensor]:
        """List the token rows of the selected items."""
        each = self.rows_per_item
        return [self.rows.row(item * each + i) for item in self.positions for i in range(each)]

    def count_common(self) -> list[int]:
        """Count, for each row of the selected items but the first, the tokens that it begins with like the row
        before. Replayed experts must also be the same for these tokens."""
        common = count_common_tokens(self.list_rows())
        if not any(self.replays):
            return common
        found = []
        for count, (before, experts) in zip(common, pairwise(self._list_replayed()), strict=True):
            size = min(count, len(before), len(experts))
            differs = (before[:size] != experts[:size]).any(1).nonzero()
            if len(differs):
                size = int(differs[0])
            elif len(before) == len(experts):
                size = count  # no later token of either row has recorded experts
            found.append(size)
        return found

    def make_routing(self, shard: Shard, packing: Packing, virtual: int = 0) -> Routing:
        """Make the routing for the selected items on a virtual stage. `packing` has their rows.

        The recorded experts are replayed for the longest prefix of a row that matches its sampled sequence; later
        tokens are routed normally. The j-th row of an item uses the j-th replay.
        """
        if not any(self.replays):
            return LIKELIEST
        mixture, layers = shard.shape.mixture, shard.virtual_stages[virtual]
        assert mixture is not None, "only mixtures have experts"
        size = sum(packing.lengths), len(layers), mixture.per_token
        experts = torch.full(size, NONE_CHOSEN, dtype=EXPERT_DTYPE)
        for place, found in zip(experts.split(packing.lengths), self._list_replayed(), strict=True):
            of_model = found.view(len(found), shard.shape.layers, mixture.per_token)
            place[: len(found)] = of_model[:, layers.start : layers.stop]
        (experts,) = copy_to_device([experts], packing.positions.device)
        first = shard.places(virtual).start
        return ReplayedRouting(packing.select(experts, padding=NONE_CHOSEN), first)

    def _list_replayed(self) -> list[Tensor]:
        """List, for each row of the selected items, the experts that are replayed: those of the tokens before the
        first difference from the sampled sequence. -> [tokens, layers * k] each"""
        found = []
        for number, row in enumerate(self.list_rows()):
            item, place = divmod(number, self.rows_per_item)
            made = self.replays[place] if place < len(self.replays) else None
            if made is None:
                found.append(torch.empty(0, 1, dtype=EXPERT_DTYPE))
                continue
            position = self.positions[item]
            tokens, experts = (self.sampled[key].row(position) for key in (made.sequences, made.experts))
            size = min(len(tokens), len(row))
            differs = (tokens[:size] != row[:size]).nonzero()
            found.append(experts[: int(differs[0]) if len(differs) else size])
        return found
