"""Restoring of a run from the latest of its checkpoints that can be read."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from realrl.checkpoint.state.manifest import CheckpointError, Manifest, read_manifest
from realrl.config.errors import UserError
from realrl.runtime.checkpoints.contents import CheckpointContents
from realrl.runtime.output.run_state import Restored, RunState
from realrl.runtime.processes.process import Process


def restore(
    paths: Sequence[Path], contents: CheckpointContents, process: Process, group: dist.ProcessGroup | None
) -> Restored:
    """Load the first of several checkpoints, the latest of which comes first, that all ranks can read.

    UserError, on all ranks, where there is none.
    """
    # Importing it takes a second, which runs that begin need not wait for.
    from realrl.checkpoint.state.reader import check_tensors, read_state

    problems: list[str] = []
    for path in paths:
        problem, manifest, state = None, None, None
        tensors = contents.list_loaded()
        try:
            manifest, state = _open(path)
            check_tensors(path, manifest, tensors)
        except CheckpointError as error:
            problem = str(error)
        problem = _agree(problem, process)
        if problem is None:
            assert manifest is not None and state is not None, "all ranks have opened it"
            try:
                read_state(path, manifest, tensors, group=group)
            except CheckpointError as error:
                problem = str(error)
            problem = _agree(problem, process)
        if problem is None:
            assert state is not None, "all ranks have opened it"
            contents.spread()
            return Restored(path, state, tuple(problems))
        problems.append(problem)
    raise UserError(
        f"no checkpoint of this run can be read: {'; '.join(problems)}; overwrite=true starts from the beginning"
    )


def _open(path: Path) -> tuple[Manifest, RunState]:
    manifest = read_manifest(path)
    try:
        return manifest, RunState.from_json(manifest.state)
    except TypeError:
        raise CheckpointError(f"{path} is of another version: its state has other fields") from None


def _agree(problem: str | None, process: Process) -> str | None:
    """Find the problem of the first rank that has one."""
    return next((found for found in process.gather(problem) if found is not None), None)
