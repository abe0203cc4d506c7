"""Time to write checkpoints, and to read weights and checkpoints, on all nodes at once."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from realrl.layout.sets import element_width
from realrl.plan.placement import Placement, Strategy
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.shard_sizes import SetSizes, size_shards
from realrl.program.arrays import Floats, Ints

_SAVED = 4 * 3
"""Bytes of a trained parameter in a checkpoint: the parameter (or its master copy) and two optimizer moments, in
float32."""


@dataclass(frozen=True)
class StorageTraffic:
    """Bytes that each rank writes in a checkpoint and reads at a start, and the bandwidth of each node to
    storage."""

    written: Floats
    """Bytes that each rank writes."""
    read: Floats
    """Bytes that each rank reads: the state that is restored, and the weights of roles that do not learn."""
    node: Ints
    """Node of each rank."""
    bytes_per_s: Floats
    """Bandwidth between each node and storage while all nodes use it, in bytes per second."""

    @property
    def write_seconds(self) -> float:
        """Seconds until the last node has written its part of a checkpoint."""
        return self._slowest(self.written)

    @property
    def read_seconds(self) -> float:
        """Seconds until the last node has read the state and weights of its ranks."""
        return self._slowest(self.read)

    def _slowest(self, by_rank: Floats) -> float:
        by_node = np.bincount(self.node, by_rank, len(self.bytes_per_s))
        return float((by_node / self.bytes_per_s).max())


def count_traffic(scenario: Scenario, homes: Mapping[str, Placement]) -> StorageTraffic:
    """Count the bytes that ranks write and read, as `checkpoint.contents` does. `homes`: the placement that holds
    each role's parameters.

    Every element of a learning role is written once. If several data-parallel ranks hold an element, one of them
    writes it. A restart restores these elements. Each rank reads its part of the other roles from their own model
    files.
    """
    spec = scenario.spec
    written, read = np.zeros(spec.size), np.zeros(spec.size)
    for role, home in homes.items():
        model, strategy = scenario.models[role], home.strategy
        ranks = home.mesh.size // strategy.pp
        saved = np.repeat(_saved_stages(scenario, role, strategy) / strategy.copies, ranks)
        sizes, width = size_shards(model, strategy.tp, strategy.ep), model.width(strategy)
        copies = strategy.copies, strategy.for_experts().copies
        stored = sizes.cut_sets(*copies) if strategy.shards_parameters else sizes.sets
        weights = {name: element_width(name, width) for name in stored}
        here = slice(home.mesh.first, home.mesh.first + home.mesh.size)
        written[here] += saved
        read[here] += np.where(saved > 0, saved, np.repeat(_by_stage(stored, weights, strategy), ranks))
    nodes = [group for group in spec.groups for _ in range(group.nodes)]
    return StorageTraffic(
        written,
        read,
        np.repeat(np.arange(len(nodes)), [group.devices_per_node for group in nodes]),
        np.array([group.storage_bytes_per_s for group in nodes]),
    )


def count_saved_bytes(scenario: Scenario) -> float:
    """Count the least bytes of a checkpoint under any plan, on all nodes together."""
    return float(sum(_saved_stages(scenario, role, Strategy()).sum() for role in scenario.graph.roles))


def _saved_stages(scenario: Scenario, role: str, strategy: Strategy) -> Floats:
    """Bytes that the data-parallel ranks of each stage save together, for one TP rank, [stages].

    Only learning roles are saved. If a role has adapters, its other parameters are read from the model's own files
    instead.
    """
    model = scenario.models[role]
    if not model.trained and role not in {average.role for average in scenario.graph.averages}:
        return np.zeros(strategy.pp)
    trainable = {name for name, of in model.sets.items() if of.trainable}
    sets = {
        name: sizes
        for name, sizes in size_shards(model, strategy.tp).sets.items()
        if name in trainable or not model.part.adapters
    }
    widths = {
        name: _SAVED if model.trained and name in trainable else element_width(name, model.element_bytes)
        for name in sets
    }
    return _by_stage(sets, widths, strategy)


def _by_stage(sets: Mapping[str, SetSizes], widths: Mapping[str, float], strategy: Strategy) -> Floats:
    """Bytes of parameter sets on each stage, [stages]. `widths`: bytes of an element of each set."""
    total = np.zeros(strategy.pp)
    for name, sizes in sets.items():
        counts = sizes.stage_elements, sizes.stage_experts
        total += widths[name] * np.sum([of(strategy.pp, strategy.vpp) for of in counts], axis=0)
    return total
