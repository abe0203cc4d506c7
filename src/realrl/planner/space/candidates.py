"""Enumeration of meshes, strategies and micro-batch sizes."""

from collections.abc import Iterator
from itertools import product

from realrl.dataflow.call import Kind
from realrl.plan.axes import list_degrees
from realrl.plan.placement import Dtype, Mesh, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.workload.workload import CallWork

_FEW_DEVICES = 16
"""Largest cluster, in devices, for which every run of devices inside a node is a candidate."""
_FEW_NODES = 16
"""Largest number of nodes for which every run of nodes is a candidate."""
_SMALLEST_BATCH, _LARGEST_PASS = 4096, 16384
"""Tokens of the smallest micro-batch, and of the largest micro-batch outside generation."""
MANY_DEVICES = 2048
"""Largest cluster, in devices, for which small meshes are candidates."""
_SMALLEST, _SMALLEST_OF_MANY = 128, 16
"""Meshes smaller than 1/128 of the cluster are left out; 1/16 if the cluster has more than `MANY_DEVICES`."""


def list_meshes(spec: ClusterSpec) -> list[Mesh]:
    """Enumerate meshes: parts of one node, and runs of whole nodes.

    On small clusters, parts of a node may begin and end anywhere. Otherwise their size divides the node's, and they
    begin at multiples of their size. On large clusters, the number of nodes of a run is 4 to 7 times a power of two
    (or 1, 2 or 3), and the run begins or ends at a multiple of the smallest power of two that holds it.
    """
    meshes = [mesh for part in spec.uniform_parts for node in part for mesh in _list_inside(spec, node)]
    bounds = spec.cluster.bounds
    for part in spec.uniform_parts:
        for nodes in range(1, len(part) + 1):
            for begin in range(len(part) - nodes + 1):
                if len(part) <= _FEW_NODES or _tidy(begin, nodes, len(part)):
                    first = part.start + begin
                    meshes.append(Mesh(bounds[first], bounds[first + nodes] - bounds[first]))
    smallest = _SMALLEST if spec.size <= MANY_DEVICES else _SMALLEST_OF_MANY
    return [mesh for mesh in meshes if mesh.size * smallest >= spec.size]


def _list_inside(spec: ClusterSpec, node: int) -> Iterator[Mesh]:
    """Enumerate meshes that are smaller than a node."""
    ranks = spec.cluster.ranks(node)
    anywhere = spec.size <= _FEW_DEVICES
    for size in range(1, len(ranks)):
        if anywhere or len(ranks) % size == 0:
            for first in ranks[: len(ranks) - size + 1 : 1 if anywhere else size]:
                yield Mesh(first, size)


def list_strategies(
    size: int,
    divided: int,
    layers: int,
    heads: int,
    micro_batch_tokens: tuple[int, ...],
    recompute: tuple[bool, ...] = (False,),
    zero: tuple[int, ...] = (1,),
    dtypes: tuple[Dtype | None, ...] = (None,),
) -> Iterator[Strategy]:
    """Enumerate strategies on `size` devices; the TP degree divides `divided`, the devices of every node."""
    allowed = {
        "tp": [tp for tp in range(1, min(divided, heads) + 1) if divided % tp == 0],
        "pp": range(1, layers + 1),
    }
    for degrees in list_degrees(size, allowed, rest="dp"):
        stages = tuple(stage for stage in zero if stage == 1 or degrees["dp"] > 1)
        for tokens, recomputes, stage, dtype in product(micro_batch_tokens, recompute, stages, dtypes):
            yield Strategy(
                degrees=degrees,
                micro_batch_tokens=tokens,
                sequence_parallel=degrees["tp"] > 1,
                recompute=recomputes,
                zero=stage,
                dtype=dtype,
            )


def list_micro_batches(kind: Kind, work: CallWork) -> tuple[int, ...]:
    """Enumerate micro-batch sizes in tokens, from a size that keeps a device busy to a whole mini-batch.

    For generation they count the capacity of the KV cache and grow up to all sequences, since larger decode batches
    cost less per token.
    """
    whole = work.capacity
    sizes = [max(work.longest, min(_SMALLEST_BATCH, whole // 4))]
    largest, step = (whole, 4) if kind is Kind.GENERATE else (min(whole, _LARGEST_PASS), 2)
    while sizes[-1] < largest:
        sizes.append(min(largest, sizes[-1] * step))
    return tuple(sizes)


def _tidy(begin: int, nodes: int, total: int) -> bool:
    if nodes == total:
        return True
    power = 1 << (nodes.bit_length() - 1)
    block = nodes if nodes == power else 2 * power
    return nodes % max(1, power // 4) == 0 and (begin % block == 0 or (begin + nodes) % block == 0)
