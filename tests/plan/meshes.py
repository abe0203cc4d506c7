"""Meshes of small clusters, by enumeration."""

from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh


def list_all(cluster: Cluster) -> list[Mesh]:
    """List every run of ranks."""
    return [Mesh(a, b - a) for b in range(cluster.size + 1) for a in range(b)]


def list_tidy(cluster: Cluster) -> list[Mesh]:
    """List the runs of ranks that a search considers on a small cluster: those inside a node, and whole nodes."""
    found = []
    for mesh in list_all(cluster):
        nodes = {cluster.node(rank) for rank in mesh.ranks}
        whole = all(set(cluster.ranks(node)) <= set(mesh.ranks) for node in nodes)
        if len(nodes) == 1 or whole:
            found.append(mesh)
    return found
