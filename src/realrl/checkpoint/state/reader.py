"""Reading of a checkpoint into any layout, by all ranks in parallel, through torch.distributed.checkpoint.

Nothing in a checkpoint is unpickled or executed: tensors are bytes, all else is JSON.
"""

import concurrent.futures
import os
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from xxhash import xxh3_64_hexdigest

from realrl.checkpoint.state.manifest import DTYPE_BYTES, CheckpointError, Chunk, Manifest
from realrl.checkpoint.state.pieces import State
from realrl.checkpoint.state.planners import PiecesLoadPlanner
from realrl.checkpoint.state.writer import find_cause
from realrl.config.files import reason_of

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""Dtypes that tensors of a checkpoint may have, by name."""


def check_tensors(directory: Path, manifest: Manifest, tensors: State) -> None:
    """Check that a checkpoint has tensors of these names and shapes; else CheckpointError."""
    for name, pieces in tensors.items():
        stored = manifest.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{directory} has no tensor {name}")
        if stored.shape != pieces.shape:
            raise CheckpointError(
                f"{directory}: {name} has shape {list(stored.shape)}, the model's is {list(pieces.shape)}"
            )
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{directory}: {name} has the unknown dtype {stored.dtype}")


def read_state(
    directory: Path, manifest: Manifest, tensors: State, *, group: dist.ProcessGroup | None
) -> None:
    """Fill this rank's `tensors`, which `check_tensors` has accepted, with their values, converted to their dtypes.

    Every rank of `group` calls this, or the only one, without a group. Each box that is read is compared with its
    checksum first. CheckpointError, on all ranks, where one of them cannot read its part; what was read until then
    is in `tensors`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(
                dict(tensors),
                storage_reader=_Reader(directory, manifest, tensors),
                planner=PiecesLoadPlanner(),
                process_group=group,
                no_dist=group is None,
            )
        except dcp.CheckpointException as error:
            raise find_cause(error) from error


class _Reader(StorageReader):
    """Reader of the boxes that a rank needs of each file."""

    def __init__(self, directory: Path, manifest: Manifest, wanted: Collection[str]) -> None:
        self._directory, self._manifest, self._wanted = directory, manifest, wanted

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe the boxes of the tensors that are wanted."""
        tensors = {}
        for name in self._wanted:
            stored = self._manifest.tensors[name]
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[stored.dtype]),
                size=torch.Size(stored.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size))
                    for chunk in stored.chunks
                ],
            )
        return Metadata(state_dict_metadata=dict(tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the manifest is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of a plan, each of them once."""
        wanted: defaultdict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[item.storage_index.fqn, tuple(item.storage_index.offset or ())].append(item)
        chunks = [
            (name, chunk)
            for name in dict.fromkeys(name for name, _ in wanted)
            for chunk in self._manifest.tensors[name].chunks
            if (name, chunk.offset) in wanted
        ]
        for (name, chunk), values in zip(chunks, self._read_ahead(chunks), strict=True):
            for item in wanted[name, chunk.offset]:
                part = values
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_ahead(self, chunks: Sequence[tuple[str, Chunk]]) -> Iterator[Tensor]:
        """Read boxes and compare them with their checksums, each while the one before is used."""
        sizes = [prod(chunk.size) * self._dtype(name).itemsize for name, chunk in chunks]
        buffers = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(2)]
        with ThreadPoolExecutor(1, "checkpoint-file") as pool:
            reading: concurrent.futures.Future[None] | None = None
            for i, (name, chunk) in enumerate(chunks):
                mine = buffers[i % 2][: sizes[i]]
                if reading is None:
                    reading = pool.submit(self._read, name, chunk, mine)
                reading.result()
                if i + 1 < len(chunks):
                    following = buffers[(i + 1) % 2][: sizes[i + 1]]
                    reading = pool.submit(self._read, *chunks[i + 1], following)
                if xxh3_64_hexdigest(mine.numpy().data) != chunk.checksum:
                    path = self._directory / chunk.file
                    raise CheckpointError(f"{path} is damaged: the checksum of {name} is another one")
                yield mine.view(self._dtype(name)).view(chunk.size)

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._manifest.tensors[name].dtype]

    def _read(self, name: str, chunk: Chunk, into: Tensor) -> None:
        """Read a box as bytes."""
        path, left = self._directory / chunk.file, into.numpy().data
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(chunk.start)
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise CheckpointError(f"{path} is damaged: it ends within {name}")
                    left = left[count:]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any."""
        return True
