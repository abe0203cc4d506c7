"""Measured links and clocks of ranks, beside what the planner assumes. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.runtime.doctor.finding import Finding, ok, problem, warning

_SLOWER = 4.0
"""Factor by which a link may be slower than assumed without a word: a moment's measurement is rough."""
_ROUND_TRIP, _NODE_ROUND_TRIP = 5e-3, 50e-3
"""Seconds of a message there and back that are worth a warning, inside a node and between nodes."""
_SKEW, _MUCH = 1.0, 60.0
"""Seconds between clocks of nodes that are worth a warning, and that break certificates and files' ages."""


@dataclass(frozen=True, kw_only=True)
class PeerFigures:
    """Messages between rank 0 and another rank, as measured."""

    rank: int
    host: str
    node: int
    """Number of its node; rank 0 is on node 0."""
    round_trip: float
    """Shortest time of a small message there and back, in seconds."""
    offset: float
    """Clock of its machine minus that of rank 0's, in seconds."""
    bytes_per_s: float
    """Bytes per second of a large message over gloo."""


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """Collective of all GPUs, as measured."""

    nodes: int
    bytes_per_s: float
    """Bytes per second that each GPU sends in a large all-reduce over NCCL."""


def judge_links(
    peers: Sequence[PeerFigures], group: GroupFigures | None, spec: ClusterSpec | None
) -> Iterator[Finding]:
    """Compare measured links with those that plans are predicted with; None where their kind is not known."""
    for peer in peers:
        limit = _NODE_ROUND_TRIP if peer.node else _ROUND_TRIP
        if peer.round_trip > limit:
            yield warning(
                "links",
                f"a message from rank 0 to rank {peer.rank} ({peer.host}) and back takes {_ms(peer.round_trip)},"
                f" and each step needs many; look for other programs, or a slow network",
            )
    if group is not None:
        assumed = None if spec is None else _assume(spec, group.nodes > 1)
        yield from _judge_speed("NCCL among all GPUs", group.bytes_per_s, assumed)
        return
    for between in (False, True):
        found = [peer for peer in peers if bool(peer.node) == between]
        if not found:
            continue
        slowest = min(found, key=lambda peer: peer.bytes_per_s)
        assumed = None if spec is None or not spec.groups[0].device.cpu else _assume(spec, between)
        what = f"gloo from rank 0 to rank {slowest.rank}" + (f" ({slowest.host})" if between else "")
        trip = f", {_ms(min(peer.round_trip for peer in found))} there and back"
        yield from _judge_speed(what, slowest.bytes_per_s, assumed, trip)


def judge_clocks(peers: Sequence[PeerFigures]) -> Iterator[Finding]:
    """Compare the clocks of nodes with that of rank 0."""
    nodes = {peer.node: peer for peer in peers if peer.node}
    for peer in nodes.values():
        # Half the way there and back is what can be told.
        if abs(peer.offset) - peer.round_trip / 2 > _SKEW:
            where = "ahead of" if peer.offset > 0 else "behind"
            yield (problem if abs(peer.offset) > _MUCH else warning)(
                "clocks",
                f"the clock of {peer.host} is {abs(peer.offset):.1f} s {where} that of rank 0; synchronise them"
                " (NTP)",
            )
    if nodes:
        most = max(abs(peer.offset) for peer in nodes.values())
        yield ok("clocks", f"{len(nodes) + 1} nodes, at most {_ms(most)} apart")


def _judge_speed(what: str, speed: float, assumed: float | None, more: str = "") -> Iterator[Finding]:
    text = f"{what}: {_per_second(speed)}{more}"
    if assumed is None:
        yield ok("links", text)
    elif speed * _SLOWER < assumed:
        yield warning(
            "links",
            f"{text}, and plans are predicted with {_per_second(assumed)}; check the links, or measure them with"
            " `realrl profile` and name its file in profile",
        )
    else:
        yield ok("links", f"{text}; plans are predicted with {_per_second(assumed)}")


def _assume(spec: ClusterSpec, between_nodes: bool) -> float:
    if between_nodes:
        return min(group.node_bytes_per_s / group.devices_per_node for group in spec.groups)
    return min(group.device.link_bytes_per_s for group in spec.groups)


def _per_second(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
