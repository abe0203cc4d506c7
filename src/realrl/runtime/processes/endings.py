"""Error messages of processes that failed, and which of them tells the first cause. No torch."""

import errno
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.config.files import as_os_error, partial_path, reason_of
from realrl.runtime.processes.environment import SCRATCH_VARIABLE, is_writer

USER_STATUS, RUN_STATUS = 2, 1
"""Exit status after a mistake that the user can correct, and after any other failure."""

CAUSE, DEATH, CONSEQUENCE = 0, 1, 2
"""How far an ending is from the first cause, at best: a process that died without a word may have found another one
gone, and one that blames its peers has."""

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
"""Refusals that are no bug wherever they are met."""

_GLOO = re.compile(r"(^|failed with )\[(\S*/)?gloo/\S+:\d+\] ")
"""How gloo's error messages begin: with the place in its source."""


@dataclass(frozen=True)
class Ending:
    """Why one process failed."""

    message: str
    status: int
    rank: int
    time: float
    """By the clock that processes of a machine share."""
    distance: int = CAUSE
    trace: str = ""
    """A traceback for people to see, where the message cannot say enough: of a bug, or of the user's own code."""
    alone: bool = False
    """Whether a mistake that the user can correct shows on this rank, and others may not know of it."""


def describe(error: Exception) -> Ending:
    """The ending that an exception means which nobody has handled."""
    rank, name, text = _rank(), type(error).__name__, " ".join(str(error).split())
    if isinstance(error, UserError | RunError):
        status = USER_STATUS if isinstance(error, UserError) else RUN_STATUS
        trace, alone = (error.trace, error.alone) if isinstance(error, UserCodeError) else ("", False)
        return Ending(text, status, rank, time.time(), trace=trace, alone=alone)
    who = f"rank {rank}: " if _is_one_of_several() else ""
    refusal = as_os_error(error)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return Ending(f"{who}out of memory{text and ': '}{text}", RUN_STATUS, rank, time.time())
    if _blames_a_peer(error):
        # What follows in gloo's text is advice, and ends with a picture.
        message = f"{who}another rank has gone: {name}: {text.partition('. ')[0]}"
        return Ending(message, RUN_STATUS, rank, time.time(), CONSEQUENCE)
    if refusal is not None and refusal.errno in _DISK:
        file = f"{refusal.filename} cannot be written: " if refusal.filename else ""
        return Ending(f"{who}{file}{reason_of(refusal)}", RUN_STATUS, rank, time.time())
    message = f"{who}unexpected {name}{text and ': '}{text}; see the traceback above"
    trace = "".join(traceback.format_exception(error))
    return Ending(message, RUN_STATUS, rank, time.time(), trace=trace)


def report(error: Exception) -> int:
    """Leave an ending for the local launcher if there is one, else print it; the exit status."""
    ending = describe(error)
    scratch = os.environ.get(SCRATCH_VARIABLE)
    if scratch is None:
        _tell_torchrun(ending)
        if _speaks(ending):
            show(ending, prefix="" if is_writer() else f"rank {ending.rank}: ")
        return ending.status
    _log(error)
    # Where even this disk is full, the launcher says that this process has left no message.
    with suppress(OSError):
        file = Path(scratch) / f"ending-{ending.rank}.json"
        # Not by write_whole, which would make the directory anew: it is gone once the launcher is, for good.
        partial_path(file).write_text(json.dumps(asdict(ending)))
        partial_path(file).replace(file)
    return ending.status


def show(ending: Ending, *, prefix: str = "", logs: Path | None = None) -> None:
    """Print an ending, its message last."""
    message = ending.message if ending.message.startswith(prefix) else prefix + ending.message
    note = "" if logs is None else f"note: the logs of all ranks are in {logs}\n"
    print(f"{ending.trace}{note}realrl: {message}", file=sys.stderr, flush=True)


def read_endings(scratch: Path) -> list[Ending]:
    """Read the endings that processes of the local launcher have left."""
    return [Ending(**json.loads(file.read_text())) for file in scratch.glob("ending-*.json")]


def first_cause(endings: Iterable[Ending]) -> Ending:
    """The ending that the others follow from, as far as can be told."""
    return min(endings, key=lambda ending: (ending.distance, ending.time, ending.rank))


def _blames_a_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank cannot be reached: those of torch.distributed, and of gloo, which
    has none of its own."""
    names = {kind.__name__ for kind in type(error).__mro__}
    of_torch = names & {"DistBackendError", "DistNetworkError", "DistStoreError", "_DistError"}
    return bool(of_torch) or (type(error) is RuntimeError and _GLOO.search(str(error)) is not None)


def _speaks(ending: Ending) -> bool:
    """Whether this process prints how it ended. All ranks of a node find the same mistakes in a user's input, so
    that one of each node speaks, whose files may differ from those of the first node; but for one that has come up
    while its code ran on this rank."""
    first = is_writer() or int(os.environ.get("LOCAL_RANK", 0)) == 0
    return first or ending.alone or ending.status != USER_STATUS


def _log(error: Exception) -> None:
    """Write all that is known into this process's log, which is where its standard error goes."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"{stamp} rank {_rank()} ends:\n{''.join(traceback.format_exception(error))}"
    with suppress(OSError):
        os.write(2, text.encode())


def _tell_torchrun(ending: Ending) -> None:
    """Leave the message where torchrun looks for it; its summary then names the rank that failed first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    # It reads whole seconds, so that a consequence has to come later to be told from its cause.
    stamp = str(int(ending.time) + ending.distance)
    with suppress(OSError):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps({"message": ending.message, "timestamp": stamp}))


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _is_one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1
