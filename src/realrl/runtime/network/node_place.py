"""Node of this process among those that a launcher has started. No torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Environment variables of launchers that are read here, all of them numbers."""


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Node of a process, as its launcher describes it."""

    node: int
    """Number of the node."""
    nodes: int
    ranks: range
    """Ranks on this node."""
    world: int

    @property
    def even(self) -> bool:
        """Whether all nodes may have as many ranks as this one."""
        here = len(self.ranks)
        return self.nodes * here == self.world and self.ranks.start == self.node * here

    def match(self, cluster: Cluster | None) -> Cluster:
        """Find the cluster that was started; UserError where a user names another, `cluster`."""
        started = Cluster(self.nodes, len(self.ranks)) if self.even else None
        if cluster is None and started is not None:
            return started
        as_large = cluster is not None and (cluster.size, cluster.nodes) == (self.world, self.nodes)
        if cluster is not None and as_large and cluster.ranks(self.node) == self.ranks:
            return cluster
        if started is not None:
            raise UserError(
                f"cluster={cluster}, but {len(self.ranks)} processes were started on each of {self.nodes} nodes;"
                f" set cluster={started} or auto"
            )
        raise UserError(
            f"cluster={cluster or 'auto'}, but node {self.node} of {self.nodes} has {len(self.ranks)} of the"
            f" {self.world} processes, from rank {self.ranks.start} on; nodes of different size must be named in"
            " the order in which they are numbered, for example cluster=2x8+1x4 (torchrun orders them by address)"
        )


def find_node_place(environment: Mapping[str, str] = os.environ) -> NodePlace:
    """Find the node of this process; one node with all ranks where no launcher says anything else.

    torchrun says all of it; of a launcher that does not, nodes are taken to have as many ranks each.
    """
    world = int(environment.get("WORLD_SIZE", 1))
    rank = int(environment.get("RANK", 0))
    here = int(environment.get("LOCAL_WORLD_SIZE", world))
    first = rank - int(environment.get("LOCAL_RANK", rank % here))
    return NodePlace(
        node=int(environment.get("GROUP_RANK", first // here)),
        nodes=int(environment.get("GROUP_WORLD_SIZE", world // here)),
        ranks=range(first, first + here),
        world=world,
    )
