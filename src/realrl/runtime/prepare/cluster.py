"""The `cluster` setting of a recipe. No torch."""

from pathlib import Path

from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec


def named_cluster(text: str) -> ClusterSpec | None:
    """Read the devices that `cluster` names by their kind or in a file; None where it only counts them.

    UserError where it does so wrongly.
    """
    names = ":" in text or Path(text).suffix in (".yaml", ".yml")
    return ClusterSpec.parse(text) if names else None


def written_cluster(text: str) -> Cluster | None:
    """Read the nodes and devices per node of `cluster`; None for `auto`. UserError for anything else."""
    if text == "auto":
        return None
    named = named_cluster(text)
    return Cluster.parse(text) if named is None else named.cluster
