"""Time to write checkpoints, and to read weights and checkpoints, on all nodes at once."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from realrl.layout.sets import element_width
from realrl.plan.placement import Placement
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.shard_sizes import SetSizes, size_shards
from realrl.program.arrays import Floats, Ints
from realrl.program.memory import StoredModel

_SAVED = 4 * 3
"""Bytes of a trained parameter in a checkpoint: it, or its master, and two moments of the optimizer, in float32."""


@dataclass(frozen=True)
class StorageTraffic:
    """Bytes that each rank writes in a checkpoint and reads at a start, and the bandwidths between."""

    written: Floats
    """By rank."""
    read: Floats
    """By rank: state that is restored, and the weights of roles that do not learn."""
    node: Ints
    """Of each rank."""
    bytes_per_s: Floats
    """Between each node and storage, while all nodes use it."""

    @property
    def write_seconds(self) -> float:
        """Seconds until the last node has written its part of a checkpoint."""
        return self._slowest(self.written)

    @property
    def read_seconds(self) -> float:
        """Seconds until the last node has read what its ranks start from."""
        return self._slowest(self.read)

    def _slowest(self, by_rank: Floats) -> float:
        by_node = np.bincount(self.node, by_rank, len(self.bytes_per_s))
        return float((by_node / self.bytes_per_s).max())


def count_traffic(scenario: Scenario, homes: Mapping[str, Placement]) -> StorageTraffic:
    """Count the bytes that ranks write and read if roles live at `homes`, as `checkpoint.contents` does.

    Every element of a learning role is written once; if data-parallel ranks share it, one of them writes it. A
    restart restores these elements, and reads each rank's part of the other roles from their own files.
    """
    spec = scenario.spec
    written, read = np.zeros(spec.size), np.zeros(spec.size)
    following = {average.role for average in scenario.graph.averages}
    for role, home in homes.items():
        model = scenario.models[role]
        saved = np.array(_stage_bytes(model, home, learns=model.trained or role in following))
        stages = np.repeat(np.array(_stage_weights(model, home)), home.mesh.size // home.strategy.pp)
        shares = np.repeat(saved / home.strategy.dp, home.mesh.size // home.strategy.pp)
        here = slice(home.mesh.first, home.mesh.first + home.mesh.size)
        written[here] += shares
        read[here] += np.where(shares > 0, shares, stages)
    nodes = [group for group in spec.groups for _ in range(group.nodes)]
    return StorageTraffic(
        written,
        read,
        np.repeat(np.arange(len(nodes)), [group.devices_per_node for group in nodes]),
        np.array([group.storage_bytes_per_s for group in nodes]),
    )


def count_saved_bytes(scenario: Scenario) -> float:
    """Count the least bytes of a checkpoint under any plan, on all nodes together."""
    following = {average.role for average in scenario.graph.averages}
    total = 0.0
    for role in scenario.graph.roles:
        model = scenario.models[role]
        for name, sizes in _sizes(model, 1).items():
            if model.trained or role in following:
                total += _saved_width(model, name) * sum(sizes.stage_elements(1))
    return total


def _sizes(model: StoredModel, tp: int) -> Mapping[str, SetSizes]:
    """Sizes of the parameter sets in a role's checkpoint; a model under adapters is read from its own files."""
    sizes = size_shards(model, tp).sets
    if not model.part.adapters:
        return sizes
    return {name: of for name, of in sizes.items() if model.sets[name].trainable}


def _saved_width(model: StoredModel, name: str) -> float:
    """Bytes of an element of a parameter set in a checkpoint."""
    if model.trained and model.sets[name].trainable:
        return _SAVED
    return element_width(name, model.element_bytes)


def _stage_bytes(model: StoredModel, home: Placement, *, learns: bool) -> list[float]:
    """Bytes that the data-parallel ranks of each stage, one TP rank of each, save together."""
    strategy = home.strategy
    total = [0.0] * strategy.pp
    for name, sizes in _sizes(model, strategy.tp).items() if learns else ():
        for stage, elements in enumerate(sizes.stage_elements(strategy.pp)):
            total[stage] += _saved_width(model, name) * elements
    return total


def _stage_weights(model: StoredModel, home: Placement) -> list[float]:
    """Bytes of the parameters that a rank of each stage holds."""
    strategy = home.strategy
    total = [0.0] * strategy.pp
    local = size_shards(model, strategy.tp)
    stored = local.cut_sets(strategy.dp) if strategy.shards_parameters else local.sets
    for name, sizes in stored.items():
        for stage, elements in enumerate(sizes.stage_elements(strategy.pp)):
            total[stage] += element_width(name, model.width(strategy)) * elements
    return total
