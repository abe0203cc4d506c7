"""Partition of a cluster into disjoint meshes."""

from collections.abc import Iterator, Sequence

from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh


def list_mesh_sizes(cluster: Cluster) -> Iterator[int]:
    """List the sizes of meshes that tile a cluster, ascending: divisors of a node, and whole nodes."""
    per_node = cluster.devices_per_node
    yield from (size for size in range(1, per_node) if per_node % size == 0)
    yield from (per_node * nodes for nodes in range(1, cluster.nodes + 1))


def split_evenly(cluster: Cluster, count: int) -> list[Mesh]:
    """Find `count` disjoint meshes of equal size, as large as possible. The cluster must have as many devices."""
    assert 0 < count <= cluster.size, f"{count} parts of cluster {cluster}"
    size = max(size for size in list_mesh_sizes(cluster) if size * count <= cluster.size)
    return [Mesh(i * size, size) for i in range(count)]


def split_by_weight(cluster: Cluster, weights: Sequence[float]) -> list[Mesh]:
    """Find one mesh per weight: equal parts, of which the heaviest then grow as long as all fit."""
    sizes = [mesh.size for mesh in split_evenly(cluster, len(weights))]
    heaviest_first = sorted(range(len(weights)), key=lambda i: -weights[i])
    grown = True
    while grown:
        grown = False
        for i in heaviest_first:
            larger = next((size for size in list_mesh_sizes(cluster) if size > sizes[i]), None)
            trial = [larger if j == i and larger else size for j, size in enumerate(sizes)]
            if larger and _place(cluster, trial) is not None:
                sizes = trial
                grown = True
    meshes = _place(cluster, sizes)
    assert meshes is not None, "equal parts have room"
    return meshes


def _place(cluster: Cluster, sizes: Sequence[int]) -> list[Mesh] | None:
    """Place aligned disjoint meshes of these sizes, the largest first; None if they do not fit."""
    free = [True] * cluster.size
    meshes: list[Mesh] = [Mesh(0, 1)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        step = min(sizes[i], cluster.devices_per_node)
        starts = range(0, cluster.size - sizes[i] + 1, step)
        first = next((s for s in starts if all(free[s : s + sizes[i]])), None)
        if first is None:
            return None
        meshes[i] = Mesh(first, sizes[i])
        free[first : first + sizes[i]] = [False] * sizes[i]
    return meshes
