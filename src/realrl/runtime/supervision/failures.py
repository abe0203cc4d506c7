"""Describe failures of processes, write them to files, and find the first cause among several.

Does not import torch.
"""

import errno
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Self

from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.config.files import as_os_error, partial_path, reason_of
from realrl.config.redaction import redact
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE

USER_STATUS, RUN_STATUS = 2, 1
"""Exit status after a mistake that the user can correct, and after any other failure."""

CAUSE, DEATH, CONSEQUENCE = 0, 1, 2
"""Minimum distance of a failure from the first cause.

A process that died may have died because of another process. A process that blames its peers has certainly lost one
of them.
"""

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
"""Numbers of operating-system errors that are never bugs."""

PLACE = "__realrl_place__"
"""Attribute of an exception with the place in the run at which it was raised."""

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of a rank's error file, for torchrun and realrl's launchers alike."""

_GLOO = re.compile(r"(^|failed with )\[(\S*/)?gloo/\S+:\d+\] ")
"""Matches the start of gloo's error messages, which is a place in gloo's source."""


@dataclass(frozen=True)
class Failure:
    """The failure of one process."""

    message: str
    status: int
    """Exit status of the command because of this failure."""
    rank: int
    time: float
    """When the process failed, in seconds since 1970, by a clock that all processes of a machine share."""
    distance: int = CAUSE
    trace: str = ""
    """Traceback to print if the message is not enough: for a bug, or for an error in the user's own code."""
    alone: bool = False
    """Whether a user's mistake was found only on this rank, so that other ranks may not know it."""
    final: bool = False
    """Whether a restart would fail in the same way."""
    device: bool = False
    """Whether this rank's device may be broken: its process died or froze, or its driver reported an error."""

    def to_text(self) -> str:
        """Convert to JSON, which `parse` and torchrun read."""
        # torchrun compares whole seconds, so the time of a consequence must be later than that of its cause.
        return json.dumps({**asdict(self), "timestamp": str(int(self.time) + self.distance)})

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read what `to_text` writes."""
        found = json.loads(text)
        return cls(**{field.name: found[field.name] for field in fields(cls)})


def describe_failure(error: Exception) -> Failure:
    """Describe the failure behind an unhandled exception, without secrets."""
    failure = _describe(error)
    return replace(failure, message=redact(failure.message), trace=redact(failure.trace))


def _describe(error: Exception) -> Failure:
    rank, now = _rank(), time.time()
    name = type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, UserError | RunError):
        # A message with several mistakes has an indented line for each mistake after the first.
        text = "\n  ".join(" ".join(line.split()) for line in re.split(r"\n  (?=\S)", str(error)))
        status = USER_STATUS if isinstance(error, UserError) else RUN_STATUS
        trace, alone = (error.trace, error.alone) if isinstance(error, UserCodeError) else ("", False)
        return Failure(text, status, rank, now, trace=trace, alone=alone, final=True)
    who = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    place = f" {getattr(error, PLACE)}" if hasattr(error, PLACE) else ""
    refusal = as_os_error(error)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return Failure(f"{who}out of memory{place}{text and ': '}{text}", RUN_STATUS, rank, now)
    if _blames_a_peer(error):
        # Leave out what follows in gloo's text: advice, and a picture made of characters.
        message = f"{who}lost connection to a peer rank{place}: {name}: {text.partition('. ')[0]}"
        return Failure(message, RUN_STATUS, rank, now, distance=CONSEQUENCE)
    if refusal is not None and refusal.errno in _DISK:
        file = f"{refusal.filename} cannot be written: " if refusal.filename else ""
        return Failure(f"{who}{file}{reason_of(refusal)}", RUN_STATUS, rank, now, final=True)
    message = f"{who}unexpected {name}{place}{text and ': '}{text}; see the traceback above"
    trace = "".join(traceback.format_exception(error))
    device = name == "AcceleratorError" or "CUDA error" in text
    return Failure(message, RUN_STATUS, rank, now, trace=trace, device=device)


def _blames_a_peer(error: BaseException) -> bool:
    """Return whether an exception of torch.distributed or gloo means that another rank cannot be reached."""
    names = {kind.__name__ for kind in type(error).__mro__}
    of_torch = names & {"DistBackendError", "DistNetworkError", "DistStoreError", "_DistError"}
    # gloo has no exception class of its own.
    return bool(of_torch) or (type(error) is RuntimeError and _GLOO.search(str(error)) is not None)


def describe_death(rank: int, status: int, noticed: float, place: str | None) -> Failure:
    """Describe the failure of a rank that has not reported one.

    `status`: exit status, or minus the number of the signal. `noticed`: when the launcher noticed the death.
    """
    where = "" if place is None else f" {place}"
    if status > 0:
        message = f"the process of rank {rank} ended with status {status}{where} and left no message"
        return Failure(message, status, rank, noticed, DEATH, device=True)
    reason = signal.strsignal(-status) or "unknown"
    message = f"signal {-status} ({reason}) ended the process of rank {rank}{where}"
    # Libraries abort a process if its peers are gone.
    distance = DEATH if -status == signal.SIGABRT else CAUSE
    return Failure(message, 128 - status, rank, noticed, distance, device=True)


def find_first_cause(failures: Iterable[Failure]) -> Failure:
    """Find the failure that most probably caused all others."""
    return min(failures, key=lambda failure: (failure.distance, failure.time, failure.rank))


def report_failure(error: Exception) -> int:
    """Write the failure of this process to a file for its launcher, and print it if no launcher will.

    Returns the exit status.
    """
    failure = describe_failure(error)
    _write_error_file(failure)
    if SCRATCH_VARIABLE in os.environ:
        log_error(error)
    elif not is_told_elsewhere(error):
        print_failure(failure, prefix="" if failure.rank == 0 else f"rank {failure.rank}: ")
    return failure.status


def is_told_elsewhere(error: BaseException) -> bool:
    """Return whether another rank prints the same error.

    All ranks of a node find the same mistakes in a user's input, so one rank of each node prints. Files may differ
    between nodes.
    """
    alone = isinstance(error, UserCodeError) and error.alone
    # A mistake in the variables of Slurm is found before those of torchrun are set.
    numbers = (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"))
    found = [os.environ.get(ours) or os.environ.get(theirs) or "0" for ours, theirs in numbers]
    return isinstance(error, UserError) and not alone and "0" not in found


def report_end(message: str, *, prints: bool) -> None:
    """Write a file for torchrun about why this rank ends although it has not failed itself.

    With `prints`, the message is also printed; otherwise it is only logged.
    """
    text, *notes = message.split("\n")
    distance = CAUSE if prints else CONSEQUENCE
    _write_error_file(Failure(text, RUN_STATUS, _rank(), time.time(), distance))
    if prints:
        own = f"rank {_rank()}: " if _rank() else ""
        print("\n".join([*notes, f"realrl: {own}{text}"]), file=sys.stderr, flush=True)
    else:
        os.write(2, f"ends because {text}\n".encode())


def _write_error_file(failure: Failure) -> None:
    """Write this process's error file, which its launcher reads. On a full disk, nothing is written."""
    if ERROR_FILE_VARIABLE not in os.environ:
        return
    file = Path(os.environ[ERROR_FILE_VARIABLE])
    with suppress(OSError):
        if SCRATCH_VARIABLE not in os.environ:
            # Do not create the directory of realrl's launcher again: if it is missing, the launcher has exited.
            file.parent.mkdir(parents=True, exist_ok=True)
        partial_path(file).write_text(failure.to_text())
        partial_path(file).replace(file)


def print_failure(
    failure: Failure, *, prefix: str = "", logs: Path | None = None, notes: Sequence[str] = ()
) -> None:
    """Print a failure, with its message at the end."""
    message = failure.message if failure.message.startswith(prefix) else prefix + failure.message
    note = "" if logs is None else f"note: the logs of all ranks are in {logs}\n"
    note += "".join(f"note: {text}\n" for text in notes)
    print(f"{failure.trace}{note}realrl: {message}", file=sys.stderr, flush=True)


def log_error(error: Exception) -> None:
    """Write the full error into this process's log, which is its standard error."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"{stamp} rank {_rank()} ends:\n{''.join(traceback.format_exception(error))}"
    with suppress(OSError):
        os.write(2, redact(text).encode())


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def make_error(cause: Failure) -> UserError | RunError:
    """Make the exception for the failure of another process. The message for a bug has the traceback, too."""
    if cause.status != USER_STATUS:
        return RunError(f"{cause.trace}{cause.message}")
    return UserCodeError(cause.message, cause.trace, cause.alone) if cause.trace else UserError(cause.message)
