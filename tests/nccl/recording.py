"""Recording of what the engine's own code posts on one rank, without other ranks: nothing is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.engine import pipeline
from realrl.engine.parallel_groups import ParallelGroups, select_groups
from realrl.model import group as model_group
from realrl.model.group import Group
from realrl.plan.communicators import RankSet, list_rank_sets
from realrl.plan.placement import Placement
from tests.nccl.simulator import COMPUTE, Action, Collective, Launch, Messages

_NO_METRICS = b'{"means": {}, "maxima": {}}'


@dataclass(frozen=True)
class Handle:
    """Stand-in for a process group: the ranks of a communicator."""

    ranks: RankSet

    @property
    def name(self) -> str:
        """Name of the communicator."""
        return "-".join(map(str, self.ranks))


@dataclass
class Recorder:
    """Actions of one rank so far."""

    actions: list[Action] = field(default_factory=list)

    def launch(
        self, stream: str, operation: Collective | Messages | None, after: tuple[int, ...] = ()
    ) -> int:
        """Record a launch after all that has been computed; its number."""
        launches = [a for a in self.actions if isinstance(a, Launch)]
        computed = [i for i, a in enumerate(launches) if a.stream == COMPUTE]
        waits = after if stream == COMPUTE else (*after, *computed[-1:])
        self.actions.append(Launch(stream, operation, waits))
        return len(launches)

    def wait(self, number: int) -> None:
        """Record that computing waits for a launch."""
        self.launch(COMPUTE, None, (number,))

    def batch(self, operations: "list[P2POp]") -> "list[Work]":
        """Stand in for `batch_isend_irecv`."""
        handle = operations[0].group
        sends, receives = [], []
        for one in operations:
            assert one.group is handle, "a batch is on one communicator"
            (sends if one.op is dist.isend else receives).append((one.peer, one.tensor.nbytes))
            if one.op is dist.irecv:
                one.tensor.zero_()
        number = self.launch(handle.name, Messages(handle.name, tuple(sends), tuple(receives)))
        return [Work(self, number)]

    def collective(self, name: str, handle: Handle, *, asynchronous: bool = False) -> "Work | None":
        """Stand in for a collective."""
        number = self.launch(handle.name, Collective(handle.name, handle.ranks, name))
        work = Work(self, number)
        if asynchronous:
            return work
        work.wait()
        return None


@dataclass(frozen=True)
class Work:
    """Stand-in for a work of NCCL: waiting holds up what is computed next."""

    recorder: Recorder
    number: int

    def wait(self) -> None:
        """Have computing wait."""
        self.recorder.wait(self.number)


@dataclass(frozen=True, eq=False)
class P2POp:
    """Stand-in for an operation of a batch."""

    op: Any
    tensor: Tensor
    peer: int
    group: Any = None


@contextmanager
def recording() -> Iterator[Recorder]:
    """Have the engine post into a recorder, as it does with GPUs."""
    recorder = Recorder()

    def all_reduce(
        tensor: Tensor, op: object = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return recorder.collective("all_reduce", group, asynchronous=async_op)

    def broadcast(tensor: Tensor, source: int, group: Any = None) -> None:
        recorder.collective(f"broadcast from {source}", group)
        if tensor.dtype == torch.int64 and not tensor.any():
            tensor.fill_(len(_NO_METRICS))
        elif tensor.dtype == torch.uint8 and len(tensor) == len(_NO_METRICS):
            tensor.copy_(torch.frombuffer(bytearray(_NO_METRICS), dtype=torch.uint8))

    def all_gather(whole: Tensor, part: Tensor, group: Any, async_op: bool = False) -> Work | None:
        # If a rank holds no key of a row, another one does, whose numbers are finite.
        own = part.nan_to_num(neginf=0.0) if part.is_floating_point() else part
        whole.view(len(group.ranks), -1).copy_(own.reshape(1, -1))
        return recorder.collective("all_gather", group, asynchronous=async_op)

    def reduce_scatter(
        part: Tensor, whole: Tensor, op: object, group: Any, async_op: bool = False
    ) -> Work | None:
        part.copy_(whole.view(len(group.ranks), -1)[0].view(part.shape))
        return recorder.collective("reduce_scatter", group, asynchronous=async_op)

    with (
        mock.patch.object(dist, "batch_isend_irecv", recorder.batch),
        mock.patch.object(dist, "P2POp", P2POp),
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "broadcast", broadcast),
        mock.patch.object(model_group, "_all_gather", all_gather),
        mock.patch.object(model_group, "_reduce_scatter", reduce_scatter),
        mock.patch.object(pipeline, "needs_order", lambda device: True),
    ):
        yield recorder


def make_groups(placement: Placement, rank: int) -> ParallelGroups:
    """Make stand-ins for the groups of a rank, as `make_nccl_groups` does: equal ranks share a communicator."""
    groups = {
        ranks: Group(ranks, ranks.index(rank), Handle(tuple(sorted(ranks))))  # type: ignore[arg-type]
        for ranks in list_rank_sets([placement])
        if rank in ranks
    }
    return select_groups(placement, rank, groups)
