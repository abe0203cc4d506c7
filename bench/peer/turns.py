"""Protocol between the comparison and the process of a side, which takes a step whenever it is told to."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Turns:
    """Of a side: waits for its turn before each step, and says how long the step took."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        # What libraries print goes to the log.
        os.dup2(2, 1)
        self._imported = read_memory("VmRSS")
        self._begin = self._processor = 0.0
        self.step = 0
        """Number of the step that runs or is next."""

    def ready(self) -> None:
        """Say that the first step may begin, and wait for it."""
        self._say({})

    def done(self, tokens: int) -> None:
        """Say what the step took, and wait for the next one. `tokens`: those that are no padding."""
        seconds = time.perf_counter() - self._begin
        processor = time.process_time() - self._processor
        self.step += 1
        memory = {"peak": read_memory("VmHWM"), "imported": self._imported}
        self._say({"seconds": seconds, "processor": processor, "tokens": tokens, **memory})

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._begin = time.perf_counter()
        self._processor = time.process_time()


def read_memory(field: str) -> int:
    """Read a figure of this process's memory, in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))
