"""Enumeration of meshes, strategies and micro-batch sizes."""

from collections.abc import Iterator
from itertools import product

from realrl.dataflow.call import Kind
from realrl.plan.placement import Mesh, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.workload.workload import CallWork

_FEW_NODES = 16
"""Largest number of nodes for which every run of nodes is a candidate."""
_SMALLEST_BATCH, _LARGEST_PASS = 4096, 16384
"""Tokens of the smallest micro-batch tried, and of the largest outside generation."""
_SMALLEST = 128
"""Meshes with fewer than one in this many of the cluster's devices are left out."""


def list_meshes(spec: ClusterSpec) -> list[Mesh]:
    """Enumerate meshes: aligned slices of a node, and runs of whole nodes.

    On large clusters, runs have 1 to 7 times a power of two nodes, and begin or end at a boundary between blocks of
    the next power of two.
    """
    meshes = []
    for mesh in spec.meshes():
        group = spec.groups[spec.group_index(mesh.first)]
        if mesh.size * _SMALLEST < spec.size:
            continue
        nodes = mesh.size // group.devices_per_node
        begin = spec.node(mesh.first) - spec.node(_group_start(spec, mesh))
        if nodes == 0 or group.nodes <= _FEW_NODES or _tidy(begin, nodes, group.nodes):
            meshes.append(mesh)
    return meshes


def list_strategies(
    size: int,
    devices_per_node: int,
    layers: int,
    heads: int,
    micro_batch_tokens: tuple[int, ...],
    recompute: tuple[bool, ...] = (False,),
) -> Iterator[Strategy]:
    """Enumerate strategies on `size` devices; the TP degree divides the devices of a node."""
    for tp in (t for t in range(1, min(devices_per_node, size, heads) + 1) if devices_per_node % t == 0):
        if size % tp:
            continue
        for pp in (p for p in range(1, min(layers, size // tp) + 1) if size // tp % p == 0):
            for tokens, recomputes in product(micro_batch_tokens, recompute):
                yield Strategy(
                    size // tp // pp,
                    tp,
                    pp,
                    micro_batch_tokens=tokens,
                    sequence_parallel=tp > 1,
                    recompute=recomputes,
                )


def list_micro_batches(kind: Kind, work: CallWork) -> tuple[int, ...]:
    """Enumerate micro-batch sizes in tokens, from one that keeps a device busy to all of a mini-batch.

    For generation they count the capacity of the KV cache and grow up to all sequences, since larger decode batches
    cost less per token.
    """
    whole = work.capacity
    sizes = [max(work.longest, min(_SMALLEST_BATCH, whole // 4))]
    largest, step = (whole, 4) if kind is Kind.GENERATE else (min(whole, _LARGEST_PASS), 2)
    while sizes[-1] < largest:
        sizes.append(min(largest, sizes[-1] * step))
    return tuple(sizes)


def _group_start(spec: ClusterSpec, mesh: Mesh) -> int:
    """First rank of the node group of a mesh."""
    return sum(group.size for group in spec.groups[: spec.group_index(mesh.first)])


def _tidy(begin: int, nodes: int, total: int) -> bool:
    if nodes == total:
        return True
    power = 1 << (nodes.bit_length() - 1)
    block = nodes if nodes == power else 2 * power
    return nodes % max(1, power // 4) == 0 and (begin % block == 0 or (begin + nodes) % block == 0)
