"""Reports of the times of each step, from all ranks to the one that writes."""

import torch
import torch.distributed as dist

from realrl.program.lower import WRITER
from realrl.runtime.measure.step_timer import StepTimes
from realrl.runtime.processes.messages import pack, unpack
from realrl.runtime.processes.process import Process

_TAG = 1 << 22
"""Above those of the exchange of rows."""


class StepReports:
    """Sender of this rank's times, or their receiver on the rank that writes.

    Only the writer waits, once it has done its own part of a step, and others go on.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []

    def exchange(self, mine: StepTimes) -> list[StepTimes] | None:
        """Send this rank's times of a step; those of all ranks, in order, on the rank that writes."""
        if self._process.rank == WRITER:
            others = range(1, self._process.world)
            return [mine, *(self._take(rank) for rank in others)]
        for work, _ in self._under_way:
            work.wait()
        message = torch.frombuffer(bytearray(pack(mine)), dtype=torch.uint8)
        self._under_way = [self._post(torch.tensor([len(message)])), self._post(message)]
        return None

    def _post(self, message: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        work = dist.isend(message, WRITER, group=self._process.control, tag=_TAG)
        assert work is not None, "this rank is part of the control group"
        return work, message

    def _take(self, rank: int) -> StepTimes:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._process.control, tag=_TAG)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(message, rank, group=self._process.control, tag=_TAG)
        found = unpack(message.numpy().tobytes())
        assert isinstance(found, StepTimes), "nothing else has this tag"
        return found
