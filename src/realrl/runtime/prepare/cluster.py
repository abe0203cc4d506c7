"""Read the `cluster` setting of a recipe. Does not import torch."""

from realrl.config.paths import is_yaml
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec


def named_cluster(text: str) -> ClusterSpec | None:
    """Return the devices that `cluster` names by kind or in a file; None if it only gives their number.

    Raises UserError for a wrong name or file.
    """
    names = ":" in text or is_yaml(text)
    return ClusterSpec.parse(text) if names else None


def written_cluster(text: str) -> Cluster | None:
    """Return the nodes and devices per node of `cluster`; None for `auto`. Raises UserError for anything else."""
    if text == "auto":
        return None
    named = named_cluster(text)
    return Cluster.parse(text) if named is None else named.cluster
