"""Writing of a checkpoint by all ranks in parallel, through torch.distributed.checkpoint."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from xxhash import xxh3_64

from realrl.checkpoint.state.manifest import Chunk, Manifest, StoredState
from realrl.checkpoint.state.pieces import State
from realrl.checkpoint.state.planners import PiecesSavePlanner
from realrl.config.files import write_all
from realrl.engine.offload import view_bytes

BUFFER_BYTES = 8 << 20
"""Bytes that are copied from a GPU at a time."""
CACHED_BYTES = 1 << 20
"""Bytes of host memory that are read at a time."""


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
                # Not through this argument, every entry of which is logged, whether that is read or not.
                {},
                storage_writer=writer,
                planner=PiecesSavePlanner(tensors),
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


class _HostBytes:
    """Reader of the bytes of tensors in host memory: where they are, or, of a GPU, through a pinned buffer."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def read(self, values: Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, in row-major order; each part is valid until the next one."""
        flat = values.detach().reshape(-1).view(torch.uint8)
        if flat.is_cuda:
            yield from self._copy(flat)
        else:
            whole = view_bytes(flat)
            # What is summed up and then written should still be in the processor's cache.
            yield from (whole[at : at + CACHED_BYTES] for at in range(0, len(whole), CACHED_BYTES))

    def _copy(self, flat: Tensor) -> Iterator[memoryview]:
        if self._buffer is None or self._stream is None:
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            # A stream of its own: training goes on in the default one.
            self._stream = torch.cuda.Stream(flat.device)
            self._stream.wait_stream(torch.cuda.default_stream(flat.device))
        for part in flat.split(BUFFER_BYTES):
            host = self._buffer[: len(part)]
            with torch.cuda.stream(self._stream):
                host.copy_(part, non_blocking=True)
            self._stream.synchronize()
            yield host.numpy().data
