"""Split a cluster into disjoint meshes."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations

from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh


@lru_cache
def list_mesh_sizes(cluster: Cluster) -> tuple[int, ...]:
    """List the sizes of meshes that tile a cluster, ascending: divisors of a node's size, and runs of whole
    nodes."""
    sizes = {size for _, node in cluster.runs for size in range(1, node) if node % size == 0}
    if cluster.even:
        sizes.update(cluster.bounds[1:])
    else:
        sizes.update(end - first for first, end in combinations(cluster.bounds, 2))
    return tuple(sorted(sizes))


def split_evenly(cluster: Cluster, count: int) -> list[Mesh]:
    """Find `count` disjoint meshes of equal size, as large as possible. The cluster must have at least `count`
    devices."""
    assert 0 < count <= cluster.size, f"{count} parts of cluster {cluster}"
    fitting = (size for size in list_mesh_sizes(cluster) if size * count <= cluster.size)
    parts = (_place(cluster, [size] * count) for size in sorted(fitting, reverse=True))
    return next(meshes for meshes in parts if meshes is not None)


def split_by_weight(cluster: Cluster, weights: Sequence[float]) -> list[Mesh]:
    """Find one mesh per weight: start with equal meshes, then enlarge the heaviest first while all meshes fit."""
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
    """Place disjoint meshes of these sizes, aligned to nodes, the largest first; None if they do not fit."""
    free = [True] * cluster.size
    meshes: list[Mesh] = [Mesh(0, 1)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        starts = _starts(cluster, sizes[i])
        first = next((s for s in starts if all(free[s : s + sizes[i]])), None)
        if first is None:
            return None
        meshes[i] = Mesh(first, sizes[i])
        free[first : first + sizes[i]] = [False] * sizes[i]
    return meshes


def _starts(cluster: Cluster, size: int) -> Iterator[int]:
    """List the first ranks that a mesh of this size may have. A mesh inside a node starts at a multiple of its
    size. A larger mesh starts with a node and must end with a node."""
    for node in range(cluster.nodes):
        ranks = cluster.ranks(node)
        end = ranks.start + size
        if size < len(ranks):
            yield from ranks[: len(ranks) - size + 1 : size]
        elif end == cluster.size or (end < cluster.size and cluster.ranks(cluster.node(end)).start == end):
            yield ranks.start
