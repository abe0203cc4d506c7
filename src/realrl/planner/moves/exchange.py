"""Time to send data between calls, vectorised over pairs of a producer's and a consumer's layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster, Links
from realrl.planner.moves.transfers import Layouts, find_nodes
from realrl.planner.workload.workload import Workload
from realrl.program.arrays import Floats, Ints
from realrl.program.order import keys_between, producers

_LENGTH_BYTES = 8
_REPORT_S = 40e-6
"""Seconds that the rank that writes reports takes to read another rank's times and align its clock
(docs/notes/scale.md)."""


@dataclass(frozen=True)
class ExchangeModel:
    """Data exchange between the calls of a step.

    Every DP rank of the target receives its share of the rows, from one sender after the other. All its TP ranks
    and stages receive copies. Rows travel over the network between hosts if the ranks span several nodes.
    """

    links: Links
    cluster: Cluster
    volumes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Bytes of all records that a consumer reads from a producer in a step, by (producer, consumer)."""
    items: int = 0
    """Number of items in a step."""

    def lengths_seconds(self, senders: Ints, ranks: Ints) -> Floats:
        """Compute the seconds until `ranks` ranks know the lengths of all items. `senders` ranks know a part of
        them each.

        One sender collects the lengths and sends them to the ranks, one after the other (`Exchange.share_lengths`).
        """
        told = ranks - 1
        posted = told * self.items * _LENGTH_BYTES / self.links.node_bytes_per_s
        return np.asarray((senders - 1 + told) * self.links.latency_s + posted)

    def reports_seconds(self, ranks: int) -> float:
        """Compute the seconds that the writing rank takes to receive the times of a step from all ranks
        (`StepReports`).

        Each rank sends two messages.
        """
        return (ranks - 1) * (2 * self.links.latency_s + _REPORT_S)

    def seconds(self, producer: str, consumer: str, source: Layouts, target: Layouts) -> Floats:
        """Compute the seconds from the producer's to the consumer's layout, for each pair of layouts."""
        volume = self.volumes.get((producer, consumer), 0.0)
        links = self.links
        copies, senders = target.size // target.shares, source.shares
        busiest = volume * np.maximum(copies / target.size, copies / senders)
        first = np.minimum(source.first, target.first)
        last = np.maximum(source.first + source.size, target.first + target.size) - 1
        nodes = find_nodes(self.cluster)
        width = np.where(nodes[first] < nodes[last], links.node_bytes_per_s, links.device_bytes_per_s)
        return np.asarray(busiest / width + (senders + target.size) * links.latency_s)

    def at_least(
        self,
        producer: str,
        consumer: str,
        *,
        senders: tuple[Ints, Ints],
        size: Ints,
        copies: Ints,
        rows: Ints,
    ) -> Floats:
        """Compute a lower bound on the seconds between layouts that are only partly known.

        `senders`: minimum and maximum number of ranks that send. `size`: minimum size of the target. `copies`:
        minimum number of ranks that receive the same rows. `rows`: maximum number of ranks that receive different
        rows.
        """
        volume = self.volumes.get((producer, consumer), 0.0)
        links = self.links
        busiest = volume * np.maximum(1 / rows, copies / senders[1])
        width = max(links.node_bytes_per_s, links.device_bytes_per_s)
        return np.asarray(busiest / width + (senders[0] + size) * links.latency_s)


def count_exchanged_bytes(graph: DataflowGraph, workload: Workload) -> dict[tuple[str, str], float]:
    """Count the bytes of a step's records that each consumer reads from each producer."""
    return {
        (producer.name, consumer.name): workload.items
        * sum(_row_bytes(graph, workload, key) for key in keys_between(graph, producer, consumer))
        for consumer in graph.calls
        for producer in producers(graph, consumer)
    }


def _row_bytes(graph: DataflowGraph, workload: Workload, key: str) -> float:
    """Mean bytes of one record's value for a key."""
    each = graph.keys[key].position_bytes
    length = graph.length_key(key)
    if length is None:
        return each
    made_by = graph.producer(length)
    tokens = sum(workload.prompts) / len(workload.prompts)
    # The length of a function's output is unknown. It counts like the length of a generated answer.
    if made_by is not None and made_by.kind in (Kind.GENERATE, Kind.FUNCTION):
        tokens += sum(workload.answers) / len(workload.answers)
    return each * tokens
