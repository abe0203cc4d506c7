"""Write and read the files of a checkpoint, on all ranks in parallel, through torch.distributed.checkpoint.

Nothing in a checkpoint is unpickled or executed. Tensors are stored as raw bytes, and everything else as JSON. Any
layout can read a checkpoint that another layout has written.

Import this module before a process group exists. Otherwise torch.distributed.tensor, which it imports, keeps the
group alive, and a thread of gloo that is left at the end of a script can abort the interpreter.
"""

import concurrent.futures
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from xxhash import xxh3_64, xxh3_64_hexdigest

from realrl.checkpoint.contents import State
from realrl.checkpoint.manifest import DTYPE_BYTES, CheckpointError, Chunk, Manifest, StoredState
from realrl.config.files import reason_of, write_all
from realrl.engine.offload import view_bytes


class PiecesSavePlanner(DefaultSavePlanner):
    """Save planner for the tensors that its constructor receives."""

    def __init__(self, tensors: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = dict(tensors)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Plan the tensors of the constructor instead of `state_dict`."""
        super().set_up_planner(self._tensors, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of a box."""
        assert index.offset is not None, "pieces have offsets"
        return self.state_dict[index.fqn].pieces[tuple(index.offset)]


class PiecesLoadPlanner(DefaultLoadPlanner):
    """Load planner that finds the destination of values by the offset of their box."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the arguments unchanged. The base class would drop all pieces, because they are not tensors."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that receives the values of a box."""
        assert index.offset is not None, "pieces have offsets"
        return self.state_dict[index.fqn].pieces[tuple(index.offset)]


BUFFER_BYTES = 8 << 20
"""Bytes copied from a GPU at a time."""
CACHED_BYTES = 1 << 20
"""Bytes of host memory that are hashed and written at a time."""


def write_state(
    directory: Path,
    tensors: State,
    state: Mapping[str, Any],
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    copied: Callable[[], None],
) -> None:
    """Write this rank's tensors into a directory that all ranks see; the first rank also writes the manifest.

    `state` is the checkpoint's state other than tensors, and goes into the manifest. Every rank of `group` must
    call this function; `group` is None in a run with one rank. `copied` is called as soon as training may change
    the tensors again. An error on one rank is raised on all ranks.
    """
    writer = _Writer(directory, state, rank, copied)
    with warnings.catch_warnings():
        # torch warns that torch.distributed is disabled if the run has only one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(
                # The planner already has the tensors, and torch would log every entry of this argument.
                {},
                storage_writer=writer,
                planner=PiecesSavePlanner(tensors),
                process_group=group,
                no_dist=group is None,
            )
        except dcp.CheckpointException as error:
            raise find_cause(error) from error


def find_cause(error: dcp.CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed."""
    return error.failures[min(error.failures)][0]


class _Writer(StorageWriter):
    """Writes one file for each rank that has tensors, and the manifest."""

    def __init__(
        self, directory: Path, state: Mapping[str, Any], rank: int, copied: Callable[[], None]
    ) -> None:
        self._directory, self._state, self._rank, self._copied = directory, state, rank, copied

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a writer is used only once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the directory exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to its file."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"rank-{self._rank:05}.bin"
            with (self._directory / name).open("wb", buffering=0) as file:
                results.extend(self._write_items(plan, planner, file, name))
                self._copied()
                os.fsync(file.fileno())
        else:
            self._copied()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_items(
        self, plan: SavePlan, planner: SavePlanner, file: RawIOBase, name: str
    ) -> Iterator[WriteResult]:
        host, start = _HostBytes(), 0
        for item in plan.items:
            values = planner.resolve_data(item)
            assert isinstance(values, Tensor), "all values are tensors"
            checksum = xxh3_64()
            for data in host.read(values):
                checksum.update(data)
                write_all(file, data)
            chunk = Chunk(
                offset=tuple(item.index.offset or ()),
                size=tuple(values.shape),
                file=name,
                start=start,
                checksum=checksum.hexdigest(),
            )
            yield WriteResult(item.index, values.nbytes, chunk)
            start += values.nbytes

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest. The first rank calls this after all ranks have written their files."""
        tensors: dict[str, list[Chunk]] = {}
        files: dict[str, int] = {}
        for result in (result for of_rank in results for result in of_rank):
            chunk: Chunk = result.storage_data
            tensors.setdefault(result.index.fqn, []).append(chunk)
            files[chunk.file] = max(files.get(chunk.file, 0), chunk.start + result.size_in_bytes)
        stored = {}
        for name, chunks in tensors.items():
            of: Any = metadata.state_dict_metadata[name]
            dtype = str(of.properties.dtype).removeprefix("torch.")
            stored[name] = StoredState(dtype, tuple(of.size), tuple(chunks))
        manifest = Manifest(stored, files, self._state)
        incomplete = manifest.find_incomplete()
        assert incomplete is None, f"ranks have not written all of {incomplete}, or some of it twice"
        manifest.save(self._directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return None, because there is no metadata."""
        return None


class _HostBytes:
    """Reads the bytes of tensors: directly from host memory, or from a GPU through a pinned buffer."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def read(self, values: Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in row-major order, part by part.

        A part is valid until the next part is requested.
        """
        flat = values.detach().reshape(-1).view(torch.uint8)
        if flat.is_cuda:
            yield from self._copy(flat)
        else:
            whole = view_bytes(flat)
            # Parts are small, so that they are still in the processor's cache when they are written after hashing.
            yield from (whole[at : at + CACHED_BYTES] for at in range(0, len(whole), CACHED_BYTES))

    def _copy(self, flat: Tensor) -> Iterator[memoryview]:
        if self._buffer is None or self._stream is None:
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            # Copy in a separate stream, because training continues in the default stream.
            self._stream = torch.cuda.Stream(flat.device)
            self._stream.wait_stream(torch.cuda.default_stream(flat.device))
        for part in flat.split(BUFFER_BYTES):
            host = self._buffer[: len(part)]
            with torch.cuda.stream(self._stream):
                host.copy_(part, non_blocking=True)
            self._stream.synchronize()
            yield host.numpy().data


DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""Dtypes of tensors in a checkpoint, by name."""


def check_tensors(directory: Path, manifest: Manifest, tensors: State) -> None:
    """Check that a checkpoint has tensors with these names and shapes. Raises CheckpointError if not."""
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
    """Read this rank's `tensors` from a checkpoint that `check_tensors` has accepted, and convert their dtypes.

    Every rank of `group` must call this function; `group` is None in a run with one rank. The checksum of each box
    is verified before the box is used. If one rank cannot read its part, all ranks raise CheckpointError. Some of
    the tensors may then contain new values already.
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
    """Reads the boxes that a rank needs from each file."""

    def __init__(self, directory: Path, manifest: Manifest, wanted: Collection[str]) -> None:
        self._directory, self._manifest, self._wanted = directory, manifest, wanted

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a reader is used only once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe the boxes of the wanted tensors."""
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
        """Do nothing, because the constructor has received the manifest."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each box of the plan once, even if several items need parts of it."""
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
        """Read boxes and verify their checksums. While the caller uses a box, the next one is read."""
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
                    raise CheckpointError(f"{path} is damaged: the checksum of {name} does not match")
                yield mine.view(self._dtype(name)).view(chunk.size)

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._manifest.tensors[name].dtype]

    def _read(self, name: str, chunk: Chunk, into: Tensor) -> None:
        """Read the bytes of a box from its file into a buffer."""
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
