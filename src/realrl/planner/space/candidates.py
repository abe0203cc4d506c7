"""The meshes and strategies that are worth considering for a call."""

from collections.abc import Iterator
from itertools import product

from realrl.dataflow.call import Kind
from realrl.plan.placement import Mesh, Strategy
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.workload.workload import CallWork

_FEW_NODES = 16
"""Up to so many, every run of nodes is a candidate."""
_SMALLEST_BATCH, _LARGEST_PASS = 4096, 16384
"""Tokens of the micro-batches that are tried where there are so many."""
_SMALLEST = 128
"""Meshes with a smaller part of the cluster's devices than one in so many are left out."""


def list_meshes(spec: ClusterSpec) -> list[Mesh]:
    """Candidate meshes: aligned slices of a node, and runs of whole nodes.

    On large clusters, runs have 1 to 7 times a power of two nodes, and begin or end where the cluster is cut into
    blocks of the next power of two.
    """
    found = []
    for mesh in spec.meshes():
        group = spec.groups[spec.group_index(mesh.first)]
        if mesh.size * _SMALLEST < spec.size:
            continue
        nodes = mesh.size // group.devices_per_node
        begin = spec.node(mesh.first) - spec.node(_group_start(spec, mesh))
        if nodes == 0 or group.nodes <= _FEW_NODES or _tidy(begin, nodes, group.nodes):
            found.append(mesh)
    return found


def list_strategies(
    size: int,
    devices_per_node: int,
    layers: int,
    heads: int,
    micro_batch_tokens: tuple[int, ...],
    recompute: tuple[bool, ...] = (False,),
) -> Iterator[Strategy]:
    """Strategies that fill `size` devices: tensor parallelism inside a node, in parts that divide it."""
    for tp in (t for t in range(1, min(devices_per_node, size, heads) + 1) if devices_per_node % t == 0):
        if size % tp:
            continue
        for pp in (p for p in range(1, min(layers, size // tp) + 1) if size // tp % p == 0):
            for tokens, again in product(micro_batch_tokens, recompute):
                yield Strategy(
                    size // tp // pp,
                    tp,
                    pp,
                    micro_batch_tokens=tokens,
                    sequence_parallel=tp > 1,
                    recompute=again,
                )


def list_micro_batches(kind: Kind, work: CallWork) -> tuple[int, ...]:
    """Most tokens of a micro-batch: sizes that keep a device busy, up to the whole of what is done at once.

    Of generation, where they count what the key/value cache has room for, and each token of a larger one costs
    less, up to all sequences.
    """
    records = -(-work.items // work.minibatches)
    whole = records * work.longest
    sizes = [max(work.longest, min(_SMALLEST_BATCH, whole // 4))]
    most, step = (whole, 4) if kind is Kind.GENERATE else (min(whole, _LARGEST_PASS), 2)
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] * step))
    return tuple(sizes)


def _group_start(spec: ClusterSpec, mesh: Mesh) -> int:
    """The first rank of the nodes that are like those of the mesh."""
    return sum(group.size for group in spec.groups[: spec.group_index(mesh.first)])


def _tidy(begin: int, nodes: int, total: int) -> bool:
    if nodes == total:
        return True
    power = 1 << (nodes.bit_length() - 1)
    block = nodes if nodes == power else 2 * power
    return nodes % max(1, power // 4) == 0 and (begin % block == 0 or (begin + nodes) % block == 0)
