"""Messages among the ranks of a replica about the replies of its environment.

One rank leads: it talks to the environment, and sends its replies to the others, which run the same rows.
"""

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.config.errors import UserCodeError
from realrl.engine.generation.turns import TurnReply, decode_replies, encode_replies
from realrl.plan.placement import Placement

_HEAD = 2
"""Numbers in the message that announces replies: how many numbers follow, and whether the leader has failed."""
_TAG = (1 << 21) + 1
"""Tag of messages about replies. It differs from the tags of `worker.exchange`."""


def list_replica(placement: Placement, rank: int) -> list[int]:
    """List the ranks of a placement that process the same items as `rank`."""
    item = placement.item_index(rank)
    return [other for other in placement.ranks if placement.item_index(other) == item]


class ReplySender:
    """Sends replies to the other ranks of a replica."""

    def __init__(self, ranks: Sequence[int], control: dist.ProcessGroup | None) -> None:
        """`ranks`: the other ranks."""
        self._ranks, self._control = ranks, control
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, replies: Sequence[TurnReply]) -> None:
        """Send replies, which may be none."""
        self._send(torch.from_numpy(encode_replies(replies)), failed=False)

    def send_error(self, error: UserCodeError) -> None:
        """Send the error with which this rank ends, and wait until the others have it.

        The first rank to fail may be any of them, so all say the same.
        """
        self._send(torch.tensor([*json.dumps([str(error), error.trace]).encode()]), failed=True)
        for work, _ in self._sent:
            work.wait()

    def _send(self, numbers: Tensor, *, failed: bool) -> None:
        """Send numbers, or the message of a failure. [N] int64"""
        head = torch.tensor([len(numbers), int(failed)])
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for rank in self._ranks:
            for tensor in (head, numbers) if len(numbers) else (head,):
                work = dist.isend(tensor, rank, group=self._control, tag=_TAG)
                assert work is not None, "this rank is part of the control group"
                self._sent.append((work, tensor))


class Follower:
    """A rank that learns of replies from the leader of its replica."""

    def __init__(self, leader: int, control: dist.ProcessGroup | None) -> None:
        self._leader, self._control = leader, control

    def note(self, row: int, token: int, logprob: float) -> None:
        """Do nothing: the leader has sampled the same token."""

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """Do nothing: the leader has sampled the same tokens."""

    def collect(self, _seconds: float) -> list[TurnReply]:
        """Receive replies, for which the leader waits. Raises UserCodeError if the leader has failed."""
        head = torch.empty(_HEAD, dtype=torch.int64)
        dist.recv(head, self._leader, group=self._control, tag=_TAG)
        size, failed = head.tolist()
        if not size:
            return []
        numbers = torch.empty(size, dtype=torch.int64)
        dist.recv(numbers, self._leader, group=self._control, tag=_TAG)
        if failed:
            message, trace = json.loads(bytes(numbers.tolist()))
            raise UserCodeError(message, trace, alone=True)
        return list(decode_replies(numbers.numpy()))
