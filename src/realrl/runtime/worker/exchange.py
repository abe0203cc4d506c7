"""Exchange rows and lengths between the ranks of two calls."""

import json

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.base.method import Metrics
from realrl.data.batch import KEY_DTYPES, Ragged
from realrl.dataflow.call import Call
from realrl.program.instructions import Receive, Report, Send, ShareLengths
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.store import Store

# Tags must be higher than every exchange number of a program.
_LENGTHS_TAG = 1 << 20
_METRICS_TAG = 1 << 21


class Exchange:
    """Executes `Send`, `Receive` and `ShareLengths` on one rank.

    Sender and receiver both compute which rows move, because both know the lengths of all rows. A message therefore
    contains only rows. The rows of all keys that one rank sends to another form one message of bytes.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def send(self, send: Send, store: Store) -> None:
        """Post the rows for every receiver. Rows for this rank itself stay in place."""
        producer, consumer = store.graph.call(send.producer), store.graph.call(send.consumer)
        source = store.plan[producer.name].item_index(self._process.rank)
        for receiver in send.receivers:
            ids = self._moving(store, producer, source, consumer, receiver)
            if receiver != self._process.rank and ids:
                rows = [store.rows(key, ids).values for key in send.keys]
                message = torch.cat([values.flatten().view(torch.uint8) for values in rows])
                self._post(message, receiver, send.number)

    def receive(self, receive: Receive, store: Store) -> None:
        """Wait for the rows of every sender and put them into the store."""
        rank = self._process.rank
        producer, consumer = store.graph.call(receive.producer), store.graph.call(receive.consumer)
        for source, sender in enumerate(receive.senders):
            ids = self._moving(store, producer, source, consumer, rank)
            if sender == rank or not ids:
                continue
            lengths = {key: store.row_lengths(key, ids) for key in receive.keys}
            declared = [store.graph.keys[key] for key in receive.keys]
            sizes = [sum(lengths[key.name]) * key.position_bytes for key in declared]
            message = torch.empty(sum(sizes), dtype=torch.uint8)
            self._take(message, sender, receive.number)
            for key, part in zip(declared, message.split(sizes), strict=True):
                values = part.clone().view(KEY_DTYPES[key.dtype])
                if key.width is not None:
                    values = values.view(-1, key.width)
                store.put(key.name, ids, Ragged(values, lengths[key.name]))

    def share_lengths(self, share: ShareLengths, store: Store) -> None:
        """Gather the lengths of a call's new rows on its first output rank, which sends them to all readers.

        The length of a row that does not exist yet is -1.
        """
        rank, first = self._process.rank, share.output_ranks[0]
        call = store.graph.call(share.call)
        items = [store.items(call, dp) for dp in range(len(share.output_ranks))]
        mine = items[share.output_ranks.index(rank)] if rank in share.output_ranks else []
        rows = [store.row(share.key, item) for item in mine]
        known = torch.tensor([-1 if row is None else len(row) for row in rows], dtype=torch.int64)
        if rank != first and mine:
            self._post(known, first, _LENGTHS_TAG)
        everything = torch.tensor(store.lengths.get(share.key, (-1,) * store.size), dtype=torch.int64)
        if rank == first:
            if mine:
                everything[mine] = known
            for source, ids in zip(share.output_ranks[1:], items[1:], strict=True):
                if not ids:
                    continue
                lengths = torch.empty(len(ids), dtype=torch.int64)
                self._take(lengths, source, _LENGTHS_TAG)
                everything[ids] = lengths
            for other in sorted({*share.output_ranks, *share.readers} - {first}):
                self._post(everything, other, _LENGTHS_TAG + 1)
        else:
            self._take(everything, first, _LENGTHS_TAG + 1)
        store.lengths[share.key] = tuple(everything.tolist())

    def report(self, report: Report, metrics: dict[str, Metrics]) -> None:
        """Send a call's metrics to the receiver, which adds them to its own metrics."""
        if self._process.rank in report.senders:
            plain = metrics[report.call].to_plain()
            text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
            self._post(torch.tensor([len(text)]), report.receiver, _METRICS_TAG)
            self._post(text, report.receiver, _METRICS_TAG)
            return
        for sender in report.senders:
            size = torch.empty(1, dtype=torch.int64)
            self._take(size, sender, _METRICS_TAG)
            text = torch.empty(int(size), dtype=torch.uint8)
            self._take(text, sender, _METRICS_TAG)
            received = Metrics.from_plain(json.loads(bytes(text.tolist())))
            metrics.setdefault(report.call, Metrics()).update(received)

    def finish(self) -> None:
        """Wait until all posted messages are sent."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _moving(self, store: Store, producer: Call, source: int, consumer: Call, receiver: int) -> list[int]:
        """List the items of `producer` on its DP rank `source` that `consumer` needs on `receiver`."""
        there = set(store.items(consumer, store.plan[consumer.name].item_index(receiver)))
        return [i for i in store.items(producer, source) if i in there]

    def _post(self, message: Tensor, receiver: int, tag: int) -> None:
        work = dist.isend(message, receiver, group=self._process.control, tag=tag)
        assert work is not None, "this rank is part of the control group"
        self._pending.append((work, message))

    def _take(self, message: Tensor, sender: int, tag: int) -> None:
        dist.recv(message, sender, group=self._process.control, tag=tag)
