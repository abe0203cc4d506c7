"""Messages between pipeline stages."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.method import Metrics
from realrl.layout.limits import SENDS_PER_STAGE
from realrl.model.group import Group

_FORWARD, _BACKWARD, _TOKENS = 1, 2, 3  # tags, where the backend knows them


@dataclass(frozen=True)
class Coming:
    """Pending receive from another stage."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        self.work.wait()
        return self.tensor


class Pipeline:
    """Messages of this rank's stage.

    Sends do not wait. Receives are posted before other computation, so that messages travel meanwhile: gloo holds
    an unmatched send back until its receive is posted.

    Activations and gradients travel over groups of their own, because a backend without tags delivers what one
    pair of ranks exchanges in the order in which it was posted, and the two directions have different orders.
    """

    def __init__(
        self, group: Group, backward: Group, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`group`: the ranks of the stages, first to last; `backward`: the same ranks over a connection of its
        own."""
        self.group = group
        self._width, self._dtype, self._device = hidden_size, dtype, device
        self._back = backward.handle
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()
        if device.type == "cuda" and group.size > 1:
            self._meet()

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.group.index == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.group.index == self.group.size - 1

    def expect(self, rows: int) -> Coming:
        """Post the receive of activations of the stage before. [rows, H]"""
        return self._expect(self._hidden(rows), self.group.index - 1, self.group.handle, _FORWARD)

    def send(self, hidden: Tensor) -> None:
        """Send activations to the next stage."""
        self._post(hidden.detach().contiguous(), self.group.index + 1, self.group.handle, _FORWARD)

    def expect_gradient(self, rows: int) -> Coming:
        """Post the receive of the gradient of what is sent to the next stage. [rows, H]"""
        return self._expect(self._hidden(rows), self.group.index + 1, self._back, _BACKWARD)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of what came from the stage before."""
        self._post(gradient.contiguous(), self.group.index - 1, self._back, _BACKWARD)

    def expect_tokens(self, count: int) -> Coming:
        """Post the receive of the tokens that `tell` broadcasts. [count] int64"""
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        return self._expect(tokens, self.group.size - 1, self._back, _TOKENS)

    def tell(self, tokens: Tensor) -> None:
        """Broadcast the sampled tokens from the last stage to all others. [B] int64"""
        for stage in range(self.group.size - 1):
            self._post(tokens, stage, self._back, _TOKENS)

    def figures_from_last(self, figures: Metrics) -> Metrics:
        """Broadcast the last stage's metrics to every stage."""
        if self.group.size == 1:
            return figures
        box = [figures.to_plain() if self.last else None]
        cpu = torch.device("cpu")
        dist.broadcast_object_list(box, self.group.ranks[-1], group=self.group.handle, device=cpu)
        assert box[0] is not None, "the last stage has sent its figures"
        return Metrics.from_plain(box[0])

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._pending:
            self._pending.popleft()[0].wait()

    def _meet(self) -> None:
        """Exchange something with all stages that messages go to or come from, one pair after the other.

        NCCL connects two ranks at their first message and waits for both of them, which may take forever while a
        receive is under way that one of them will only send for later.
        """
        last = self.group.size - 1
        pairs = [(s, s + 1, self.group.handle) for s in range(last)]
        pairs += [(s + 1, s, self._back) for s in range(last)]
        pairs += [(last, s, self._back) for s in range(last - 1)]
        something = torch.zeros(1, device=self._device)
        for sender, receiver, handle in pairs:
            if self.group.index == sender:
                dist.send(something, self.group.ranks[receiver], group=handle)
            elif self.group.index == receiver:
                dist.recv(something, self.group.ranks[sender], group=handle)
        torch.cuda.synchronize(self._device)

    def _hidden(self, rows: int) -> Tensor:
        return torch.empty(rows, self._width, dtype=self._dtype, device=self._device)

    def _expect(self, buffer: Tensor, stage: int, handle: dist.ProcessGroup | None, tag: int) -> Coming:
        work = dist.irecv(buffer, self.group.ranks[stage], group=handle, tag=tag)
        assert work is not None, "a stage is part of its pipeline"
        return Coming(work, buffer)

    def _post(self, tensor: Tensor, stage: int, handle: dist.ProcessGroup | None, tag: int) -> None:
        work = dist.isend(tensor, self.group.ranks[stage], group=handle, tag=tag)
        assert work is not None, "a stage is part of its pipeline"
        self._pending.append((work, tensor))
        while len(self._pending) > SENDS_PER_STAGE * self.group.size:
            self._pending.popleft()[0].wait()


def one_ahead(expect: Callable[[int], Coming], sizes: Iterable[int]) -> Iterator[Tensor]:
    """Yield received tensors with these numbers of rows, always with the next receive posted."""
    left = iter(sizes)
    coming = deque(expect(rows) for rows in islice(left, 1))

    def each() -> Iterator[Tensor]:
        while coming:
            coming.extend(expect(rows) for rows in islice(left, 1))
            yield coming.popleft().wait()

    return each()
