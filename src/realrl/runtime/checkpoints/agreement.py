"""Agreement of all ranks, once a step, on what only some know: that it is time to save, or to end."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from realrl.runtime.processes.process import Process


class StepAgreement:
    """Exchange of flags between ranks without waiting: what one says after a step, all learn after the next."""

    def __init__(self, process: Process, ask: Callable[[], tuple[bool, ...]]) -> None:
        """`ask` gives this rank's flags, always the same number."""
        self._process, self._ask = process, ask
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def learn(self) -> tuple[bool, ...]:
        """Learn which flags any rank has raised: when it last `said` so or, of one rank alone, now."""
        if self._process.control is None:
            return self._ask()
        if self._under_way is None:
            return tuple(False for _ in self._ask())
        work, flags = self._under_way
        work.wait()
        self._under_way = None
        return tuple(map(bool, flags.tolist()))

    def say(self) -> None:
        """Tell the other ranks this one's flags, after what followed from those before has been done."""
        if self._process.control is not None:
            flags = torch.tensor(self._ask(), dtype=torch.int32)
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._process.control, async_op=True)
            self._under_way = work, flags
