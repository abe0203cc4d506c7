"""Messages between the passes of pipeline stages: hidden states, and their gradients."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from realrl.engine.pass_schedule import Action, Message
from realrl.engine.pipeline import Pipeline, Sends, prefetch_receives


class PrefetchedMessages:
    """Messages of stages without virtual stages, which each exchange them only with the stages beside them."""

    def __init__(self, pipeline: Pipeline, rows: Sequence[int], *, gradients: bool) -> None:
        """`rows`: number of rows of hidden states of each micro-batch. `gradients`: whether this stage has backward
        passes."""
        self._pipeline = pipeline
        self._received = {
            "F": None if pipeline.first else prefetch_receives(pipeline.post_recv, rows),
            "B": prefetch_receives(pipeline.post_recv_gradient, rows)
            if gradients and not pipeline.last
            else None,
        }

    def receive(self, action: Action) -> Tensor | None:
        """Receive what an action needs; None if no stage sends it anything. [rows, H]"""
        received = self._received[action.kind]
        return None if received is None else next(received)

    def send(self, action: Action, made: Tensor) -> None:
        """Send what an action has made to the stage that needs it. made: [rows, H]"""
        if action.kind == "F":
            self._pipeline.send(made)
        else:
            self._pipeline.send_gradient(made)

    def skip(self, action: Action) -> None:
        """Pass over an action of a micro-batch that this rank does not have, and that has no messages. The messages
        that are held back are sent, because the next message of this stage may come much later."""
        self._pipeline.flush()

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._pipeline.wait_sends()


class OrderedMessages:
    """Messages that each stage posts in the one order of `Schedule.messages`."""

    def __init__(self, pipeline: Pipeline, order: Sequence[Message], rows: Sequence[int]) -> None:
        """`order`: all messages of the schedule. `rows`: number of rows of hidden states of each micro-batch of
        this rank; messages of other micro-batches are never posted."""
        self._pipeline, self._rows, own = pipeline, rows, pipeline.group.index
        self._unposted = deque(
            message for message in order if own in (message.made_by.stage, message.needed_by.stage)
        )
        self._needed: Mapping[Action, Message] = {
            message.needed_by: message for message in self._unposted if message.needed_by.stage == own
        }
        self._made: Mapping[Action, Message] = {
            message.made_by: message for message in self._unposted if message.made_by.stage == own
        }
        self._arriving: dict[Action, tuple[list[dist.Work], Tensor]] = {}
        self._dropped: set[Action] = set()
        """Actions that other ranks' micro-batches need, whose receives have been passed over."""
        self._sends = Sends(pipeline.group.size)
        if pipeline.receives_early:
            self._post_receives()

    def receive(self, action: Action) -> Tensor | None:
        """See `PrefetchedMessages.receive`."""
        message = self._needed.get(action)
        if message is None:
            return None
        if action not in self._arriving:
            self._post_receives(message)
        works, buffer = self._arriving.pop(action)
        for work in works:
            work.wait()
        return buffer

    def send(self, action: Action, made: Tensor) -> None:
        """See `PrefetchedMessages.send`."""
        message, tensor = self._made[action], made.detach().contiguous()
        self._pass_over(message)
        works = self._pipeline.post(dist.isend, tensor, message.needed_by.stage, backward=action.kind == "B")
        self._sends.add(works, [tensor])
        if self._pipeline.receives_early:
            self._post_receives()

    def skip(self, action: Action) -> None:
        """See `PrefetchedMessages.skip`. Receives before the messages that the action would have are posted at the
        places of these messages: other stages count on it."""
        needed, made = self._needed.get(action), self._made.get(action)
        if needed is not None and action not in self._dropped:
            self._post_receives(needed)
        if made is not None:
            self._pass_over(made)

    def _pass_over(self, sent: Message) -> None:
        """Post all receives before a message that this stage sends now, or passes over."""
        self._post_receives()
        assert self._unposted.popleft() is sent, "a message is sent as soon as it is made"

    def finish(self) -> None:
        """See `PrefetchedMessages.finish`."""
        assert not self._unposted, "every message is needed by an action that has run"
        self._sends.wait()

    def _post_receives(self, last: Message | None = None) -> None:
        """Post this stage's next receives: up to the message `last`, or all before its next send."""
        pipeline = self._pipeline
        while self._unposted and self._unposted[0].made_by.stage != pipeline.group.index:
            message = self._unposted.popleft()
            maker = message.made_by
            if maker.micro_batch < len(self._rows):
                buffer = pipeline.make_hidden(self._rows[maker.micro_batch])
                works = pipeline.post(dist.irecv, buffer, maker.stage, backward=maker.kind == "B")
                self._arriving[message.needed_by] = works, buffer
            else:
                self._dropped.add(message.needed_by)
            if message is last:
                return


PassMessages = PrefetchedMessages | OrderedMessages
