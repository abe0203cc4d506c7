"""Threads by which a rank gives signs of life and keeps its status file."""

import faulthandler
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from realrl.config.files import partial_path
from realrl.runtime.monitor.activity import Activity
from realrl.runtime.monitor.host_memory import read_memory
from realrl.runtime.monitor.rank_status import RANKS, RankStatus, name_status_file
from realrl.runtime.monitor.sign import BEAT, Board

STATUS_EVERY = 2.0
"""Seconds between writes of the status file."""


class Monitor:
    """Threads of one rank that go on while it computes or waits."""

    def __init__(self, activity: Activity, device: torch.device, restart: int = 0) -> None:
        self._activity, self._device, self._restart = activity, device, restart
        self._started = time.time()
        self._stop = threading.Event()
        self._directory: Path | None = None

    def beat(self, board: Board) -> None:
        """Give signs of life from now on, and dump all stacks into the log on SIGUSR1."""
        if hasattr(signal, "SIGUSR1"):
            # In C, so that it works while Python waits for native code.
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        board.post(self._activity.beat())
        # To the end: a process that does nothing but end is not frozen.
        self._run("beats", BEAT, lambda: board.post(self._activity.beat()), threading.Event())

    def publish(self, run_dir: Path) -> None:
        """Keep the status file in the run's directory from now on."""
        self._directory = run_dir / RANKS
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._write_status()
        # A thread of its own: a file system that hangs must not look like a frozen rank.
        self._run("status", STATUS_EVERY, self._write_status, self._stop)

    def close(self) -> None:
        """Write the last status, and no other one."""
        self._stop.set()
        self._write_status()

    @staticmethod
    def _run(name: str, every: float, action: Callable[[], None], stop: threading.Event) -> None:
        def work() -> None:
            while not stop.wait(every):
                action()

        threading.Thread(target=work, name=name, daemon=True).start()

    def _write_status(self) -> None:
        if self._directory is None:
            return
        with suppress(OSError):
            status = self.describe()
            file = name_status_file(self._directory, status.rank)
            # Not by `save`, which would make a directory anew that somebody has deleted.
            partial_path(file).write_text(status.to_text())
            partial_path(file).replace(file)

    def describe(self) -> RankStatus:
        """Describe what this rank does and holds now."""
        activity, sign, now = self._activity, self._activity.sign(), time.time()
        memory = read_memory()
        on_gpu = self._device.type == "cuda"
        limit = torch.cuda.get_device_properties(self._device).total_memory if on_gpu else None
        return RankStatus(
            rank=activity.rank,
            host=activity.host,
            pid=activity.pid,
            time=now,
            started=self._started,
            step=activity.step,
            steps=activity.steps,
            doing=sign.doing,
            instruction=sign.instruction,
            call=sign.call,
            since=now - sign.waited,
            function=sign.function,
            resident_bytes=memory.resident,
            peak_resident_bytes=memory.peak,
            device_bytes=torch.cuda.memory_reserved(self._device) if on_gpu else memory.resident,
            device_limit_bytes=limit,
            checkpoint=activity.checkpoint,
            restart=self._restart,
            phase=activity.phase,
        )
