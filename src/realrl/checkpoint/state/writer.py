"""Writing of a checkpoint by all ranks in parallel, through torch.distributed.checkpoint."""

import concurrent.futures
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from realrl.checkpoint.state.manifest import Chunk, Manifest, StoredState
from realrl.checkpoint.state.pieces import PiecesSavePlanner, State

BUFFER_BYTES = 8 << 20
"""Bytes that are copied to the host, and written, at a time."""


def write_state(
    directory: Path,
    tensors: State,
    state: Mapping[str, Any],
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    copied: Callable[[], None],
) -> None:
    """Write this rank's tensors into a directory that exists on all ranks, and on the first rank the manifest.

    `state` is all that the checkpoint has besides tensors, for the manifest. Every rank of `group` calls this, or
    the only one, without a group. `copied` is called as soon as tensors may change again. Raises what any rank has
    run into, on all ranks.
    """
    writer = _Writer(directory, state, rank, copied)
    with warnings.catch_warnings():
        # It says that a run of one process is one.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(
                dict(tensors),
                storage_writer=writer,
                planner=PiecesSavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        except dcp.CheckpointException as error:
            raise find_cause(error) from error


def find_cause(error: dcp.CheckpointException) -> BaseException:
    """Find what the first of the ranks that failed has run into."""
    return error.failures[min(error.failures)][0]


class _Writer(StorageWriter):
    """Writer of one file per rank that has any tensors, and of the manifest."""

    def __init__(
        self, directory: Path, state: Mapping[str, Any], rank: int, copied: Callable[[], None]
    ) -> None:
        self._directory, self._state, self._rank, self._copied = directory, state, rank, copied

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the directory exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"rank-{self._rank:05}.bin"
            with (self._directory / name).open("wb", buffering=0) as file:
                appender = _Appender(file)
                try:
                    for item in plan.items:
                        values, start = planner.resolve_data(item), appender.position
                        assert isinstance(values, Tensor), "all values are tensors"
                        chunk = Chunk(
                            offset=tuple(item.index.offset or ()),
                            size=tuple(values.shape),
                            file=name,
                            start=start,
                            crc32=appender.append(values),
                        )
                        results.append(WriteResult(item.index, appender.position - start, chunk))
                    self._copied()
                finally:
                    appender.finish()
                os.fsync(file.fileno())
        self._copied()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, on the first rank, after all ranks have written their files."""
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
        """Give no metadata."""
        return None


class _Appender:
    """Appender of tensors to a file, through two buffers: one is filled while the other is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffers: list[Tensor] = []
        self._writing: list[concurrent.futures.Future[None] | None] = [None, None]
        self._turn = 0
        self._used = 0
        """Bytes of the buffer that is being filled."""
        self._stream: torch.cuda.Stream | None = None
        self._pool = ThreadPoolExecutor(1, "checkpoint-file")
        self.position = 0
        """Bytes that have been appended."""

    def append(self, values: Tensor) -> int:
        """Append the values of a tensor, in row-major order; their checksum."""
        checksum = 0
        left = values.detach().reshape(-1).view(torch.uint8)
        while len(left):
            if self._used == BUFFER_BYTES:
                self._write()
            part, left = left.tensor_split([BUFFER_BYTES - self._used])
            checksum = zlib.crc32(self._copy(part), checksum)
            self.position += len(part)
        return checksum

    def finish(self) -> None:
        """Write what is left, and wait until everything has been written; OSError where it cannot be."""
        try:
            self._write()
        finally:
            self._pool.shutdown()
        for writing in self._writing:
            if writing is not None:
                writing.result()

    def _write(self) -> None:
        """Have the buffer written, and go on with the other one."""
        if self._used:
            data = self._buffers[self._turn][: self._used].numpy().data
            self._writing[self._turn] = self._pool.submit(_write_whole, self._file, data)
            self._turn, self._used = 1 - self._turn, 0
            before = self._writing[self._turn]
            if before is not None:
                before.result()

    def _copy(self, part: Tensor) -> memoryview:
        """Copy bytes into the buffer. Memory that numpy has seen cannot be given back for offloading, so that on a
        CPU, too, it sees a copy."""
        if not self._buffers:
            self._buffers = [
                torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=part.is_cuda) for _ in range(2)
            ]
            if part.is_cuda:
                # A stream of its own: training goes on in the default one.
                self._stream = torch.cuda.Stream(part.device)
                self._stream.wait_stream(torch.cuda.default_stream(part.device))
        host = self._buffers[self._turn][self._used : self._used + len(part)]
        self._used += len(part)
        if self._stream is None:
            host.copy_(part)
        else:
            with torch.cuda.stream(self._stream):
                host.copy_(part, non_blocking=True)
            self._stream.synchronize()
        return host.numpy().data


def _write_whole(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
