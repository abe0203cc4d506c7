"""Failures of processes: their error messages, and the first cause among several. No torch."""

import errno
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.config.files import as_os_error, partial_path, reason_of
from realrl.config.redaction import redact
from realrl.runtime.processes.environment import SCRATCH_VARIABLE, is_writer

USER_STATUS, RUN_STATUS = 2, 1
"""Exit status after a mistake that the user can correct, and after any other failure."""

CAUSE, DEATH, CONSEQUENCE = 0, 1, 2
"""Distance of a failure from the first cause, at least.

A process that was killed may have found another one gone, and one that blames its peers has.
"""

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
"""Operating system errors that are never bugs."""

PLACE = "__realrl_place__"
"""Attribute of an exception with the place in the run where it came up."""

_GLOO = re.compile(r"(^|failed with )\[(\S*/)?gloo/\S+:\d+\] ")
"""Start of gloo's error messages: the place in its source."""


@dataclass(frozen=True)
class Failure:
    """Failure of one process."""

    message: str
    status: int
    rank: int
    time: float
    """Time on the clock that processes of a machine share."""
    distance: int = CAUSE
    trace: str = ""
    """Traceback to print where the message cannot say enough: of a bug, or of the user's own code."""
    alone: bool = False
    """Whether a mistake that the user can correct came up on this rank, and others may not know of it."""
    final: bool = False
    """Whether the same would come again if the run were started again."""
    device: bool = False
    """Whether this rank's device may be broken: its process died or froze, or the driver refuses."""


def describe_failure(error: Exception) -> Failure:
    """Describe the failure behind an unhandled exception, without secrets."""
    failure = _describe(error)
    return replace(failure, message=redact(failure.message), trace=redact(failure.trace))


def _describe(error: Exception) -> Failure:
    rank = _rank()
    name = type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, UserError | RunError):
        # A message that lists several mistakes has an indented line for each but the first.
        text = "\n  ".join(" ".join(line.split()) for line in re.split(r"\n  (?=\S)", str(error)))
        status = USER_STATUS if isinstance(error, UserError) else RUN_STATUS
        trace, alone = (error.trace, error.alone) if isinstance(error, UserCodeError) else ("", False)
        return Failure(text, status, rank, time.time(), trace=trace, alone=alone, final=True)
    who = f"rank {rank}: " if _is_one_of_several() else ""
    place = find_place(error)
    refusal = as_os_error(error)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return Failure(f"{who}out of memory{place}{text and ': '}{text}", RUN_STATUS, rank, time.time())
    if _blames_a_peer(error):
        # What follows in gloo's text is advice, and ends with a picture.
        message = f"{who}lost connection to a peer rank{place}: {name}: {text.partition('. ')[0]}"
        return Failure(message=message, status=RUN_STATUS, rank=rank, time=time.time(), distance=CONSEQUENCE)
    if refusal is not None and refusal.errno in _DISK:
        file = f"{refusal.filename} cannot be written: " if refusal.filename else ""
        return Failure(f"{who}{file}{reason_of(refusal)}", RUN_STATUS, rank, time.time(), final=True)
    message = f"{who}unexpected {name}{place}{text and ': '}{text}; see the traceback above"
    trace = "".join(traceback.format_exception(error))
    device = name == "AcceleratorError" or "CUDA error" in text
    return Failure(message, RUN_STATUS, rank, time.time(), trace=trace, device=device)


def find_place(error: BaseException) -> str:
    """Find where in a run an error came up, as part of a message; empty where nobody has noted it."""
    place = getattr(error, PLACE, None)
    return f" {place}" if place else ""


def report_end(message: str, *, prints: bool) -> None:
    """Leave for torchrun why a rank ends that has not failed itself, and print it, or else log it."""
    rank = _rank()
    own = "" if is_writer() else f"rank {rank}: "
    text, *notes = message.split("\n")
    distance = CAUSE if prints else CONSEQUENCE
    _write_for_torchrun(
        Failure(message=text, status=RUN_STATUS, rank=rank, time=time.time(), distance=distance)
    )
    if prints:
        print("\n".join([*notes, f"realrl: {own}{text}"]), file=sys.stderr, flush=True)
    else:
        os.write(2, f"ends because {text}\n".encode())


def report_failure(error: Exception) -> int:
    """Leave the failure for the local launcher if there is one, else print it; return the exit status."""
    failure = describe_failure(error)
    scratch = os.environ.get(SCRATCH_VARIABLE)
    if scratch is None:
        _write_for_torchrun(failure)
        if _prints(failure):
            print_failure(failure, prefix="" if is_writer() else f"rank {failure.rank}: ")
        return failure.status
    log_error(error)
    # Where even this disk is full, the launcher says that this process has left no message.
    with suppress(OSError):
        file = Path(scratch) / f"failure-{failure.rank}.json"
        # Not by write_whole, which would make the directory anew: it is gone once the launcher is, for good.
        partial_path(file).write_text(json.dumps(asdict(failure)))
        partial_path(file).replace(file)
    return failure.status


def print_failure(
    failure: Failure, *, prefix: str = "", logs: Path | None = None, notes: Sequence[str] = ()
) -> None:
    """Print a failure, its message last."""
    message = failure.message if failure.message.startswith(prefix) else prefix + failure.message
    note = "" if logs is None else f"note: the logs of all ranks are in {logs}\n"
    note += "".join(f"note: {text}\n" for text in notes)
    print(f"{failure.trace}{note}realrl: {message}", file=sys.stderr, flush=True)


def read_failures(scratch: Path) -> list[Failure]:
    """Read the failures that processes of the local launcher have left."""
    return [Failure(**json.loads(file.read_text())) for file in scratch.glob("failure-*.json")]


def find_first_cause(failures: Iterable[Failure]) -> Failure:
    """Find the failure that the others follow from, as far as can be known."""
    return min(failures, key=lambda failure: (failure.distance, failure.time, failure.rank))


def _blames_a_peer(error: BaseException) -> bool:
    """Check whether an exception says that another rank cannot be reached.

    True for those of torch.distributed, and for those of gloo, which have no class of their own.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    of_torch = names & {"DistBackendError", "DistNetworkError", "DistStoreError", "_DistError"}
    return bool(of_torch) or (type(error) is RuntimeError and _GLOO.search(str(error)) is not None)


def _prints(failure: Failure) -> bool:
    """Check whether this process prints its failure: one per node.

    All ranks of a node find the same mistakes in a user's input, but the files of nodes may differ. An error of the
    user's code may have come up on this rank alone.
    """
    first = is_writer() or int(os.environ.get("LOCAL_RANK", 0)) == 0
    return first or failure.alone or failure.status != USER_STATUS


def log_error(error: Exception) -> None:
    """Write the full error into this process's log, which is its standard error."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"{stamp} rank {_rank()} ends:\n{''.join(traceback.format_exception(error))}"
    with suppress(OSError):
        os.write(2, redact(text).encode())


def _write_for_torchrun(failure: Failure) -> None:
    """Leave the message where torchrun looks for it; its summary then names the rank that failed first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    # It compares whole seconds, so a consequence has to be reported later than its cause.
    stamp = str(int(failure.time) + failure.distance)
    with suppress(OSError):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps({"message": failure.message, "timestamp": stamp}))


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _is_one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1
