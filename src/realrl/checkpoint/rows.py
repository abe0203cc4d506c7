"""Rows of batches under way in a checkpoint: batches that were sampled, but are not trained on yet.

Each rank saves the rows that its calls have produced. A run that resumes reads all rows on every rank, so it may
have other ranks and another plan.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from realrl.checkpoint.contents import State, TensorPieces
from realrl.checkpoint.manifest import Manifest
from realrl.data.batch import Ragged

Rows = Mapping[str, tuple[Sequence[int], Ragged]]
"""Rows by key, with the items that they belong to."""
StoredRows = dict[int, dict[str, dict[int, Tensor]]]
"""Rows by batch, key and item."""

_FOLDER = "under_way"
"""First part of the names of these tensors: under_way/BATCH/KEY/RANK/PART. It is not the name of a role."""


def list_rows(batches: Mapping[int, Rows], rank: int) -> State:
    """List the tensors that a rank saves. `batches` has its rows by the number of the batch's step."""
    state: dict[str, TensorPieces] = {}
    for batch, rows in batches.items():
        for key, (items, values) in rows.items():
            parts = {
                "items": torch.tensor(items, dtype=torch.int64),
                "lengths": torch.tensor(values.lengths, dtype=torch.int64),
                "values": values.values.detach().cpu().contiguous(),
            }
            for part, tensor in parts.items() if items else ():
                if tensor.numel():
                    name = f"{_FOLDER}/{batch}/{key}/{rank}/{part}"
                    state[name] = TensorPieces(
                        tuple(tensor.shape), tensor.dtype, {(0,) * tensor.dim(): tensor}
                    )
    return state


def make_room(manifest: Manifest) -> State:
    """Allocate memory for all rows in a checkpoint."""
    return {
        name: TensorPieces(
            stored.shape,
            dtype := getattr(torch, stored.dtype),
            {(0,) * len(stored.shape): torch.empty(stored.shape, dtype=dtype)},
        )
        for name, stored in manifest.tensors.items()
        if name.startswith(f"{_FOLDER}/")
    }


def collect_rows(state: State) -> StoredRows:
    """Collect the rows of all ranks from the tensors that `make_room` has allocated, after they were read."""
    tensors = {name: tensor for name, pieces in state.items() for tensor in pieces.pieces.values()}
    found: StoredRows = {}
    for name, items in tensors.items():
        _, batch, key, _, part = name.split("/")
        if part != "items":
            continue
        of = name.removesuffix("items")
        lengths = tuple(tensors[f"{of}lengths"].tolist())
        # Rows without any number have no tensor.
        values = tensors.get(f"{of}values", torch.empty(0))
        rows = Ragged(values, lengths).rows()
        found.setdefault(int(batch), {}).setdefault(key, {}).update(zip(items.tolist(), rows, strict=True))
    return found
