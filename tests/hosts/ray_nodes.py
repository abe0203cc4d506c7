"""Ray cluster of several nodes on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def make_ray_nodes(*cpus: int) -> Iterator[None]:
    """Run nodes with so many CPUs for a block, in which RAY_ADDRESS names their cluster."""
    from ray.cluster_utils import Cluster

    cluster, before = Cluster(), os.environ.get("RAY_ADDRESS")
    try:
        for count in cpus:
            cluster.add_node(
                num_cpus=count, num_gpus=0, object_store_memory=80 * 2**20, include_dashboard=False
            )
        os.environ["RAY_ADDRESS"] = cluster.address
        yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        if before is not None:
            os.environ["RAY_ADDRESS"] = before
        cluster.shutdown()
