"""Network interfaces and connections of ranks on several nodes. Does not import torch."""

import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Variable with the network interface that gloo uses. By default, gloo uses the interface with the address of the
host's name."""

INTERFACE_VARIABLES = (INTERFACE_VARIABLE, "NCCL_SOCKET_IFNAME")
"""The variables for gloo and NCCL. On one machine, NCCL uses its interface only for the rendezvous of ranks."""

SILENCE = 20
"""Seconds without any answer after which a host counts as lost.

Without a limit, a rank behind a pulled cable looks like a rank that computes. Linux retries for 15 minutes if it
has data to send, and otherwise waits forever.
"""

_PROBES = 5
_GET_ADDRESS = 0x8915
_WITHOUT_PORT = 9
"""Any port. No program needs to listen on it, because connecting a datagram socket to it sends nothing."""


def use_loopback() -> None:
    """Make gloo and NCCL communicate only within this machine, unless the user has set an interface."""
    for variable in INTERFACE_VARIABLES:
        os.environ.setdefault(variable, find_loopback())


def find_loopback() -> str:
    """Return the name of the loopback interface, which reaches only this machine."""
    return "lo" if sys.platform == "linux" else "lo0"


def use_route(
    nodes: int, node: int, first: str, publish: Callable[[str], None], read: Callable[[int], str]
) -> None:
    """Make gloo use the interface through which this node reaches other nodes, unless the user has named one.

    By default, gloo uses the address of the host's name, which on many machines is that of the loopback interface.
    `first`: address of the node with the rendezvous. `publish` sends this node's address to all other nodes. `read`
    waits for the address of another node. Raises UserError if the interface cannot be found.
    """
    own = find_own_address(first)
    # Publish the address even if the user has named an interface here, because other nodes may wait for it.
    publish(own)
    if INTERFACE_VARIABLE in os.environ or sys.platform != "linux":
        return
    if ip_address(own).is_loopback:
        # The node with the rendezvous may know itself by another address than other nodes do.
        others = (read(other) for other in range(nodes) if other != node)
        reached = next((address for address in others if not ip_address(address).is_loopback), None)
        own = own if reached is None else find_own_address(reached)
    os.environ[INTERFACE_VARIABLE] = find_interface(own)


def find_own_address(peer: str) -> str:
    """Find the address of this machine for connections to another machine.

    Raises UserError if there is no route.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, _WITHOUT_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} has no way to {peer}, where the nodes meet ({error.strerror}); check the name"
            " and the network"
        ) from None


def find_interface(address: str) -> str:
    """Find the network interface with this address. Raises UserError if no interface has it."""
    if ip_address(address).is_loopback:
        return "lo"
    found = _with_version_6(address) if ":" in address else _with_version_4(address)
    if found is None:
        raise UserError(
            f"no network interface of {socket.gethostname()} has the address {address}; set {INTERFACE_VARIABLE}"
            " to the one that leads to the other nodes"
        )
    return found


@contextmanager
def limited_silence() -> Iterator[None]:
    """Make the system close connections that are opened in the block if the other host falls silent.

    A connection is closed after SILENCE seconds without an answer, and waiting threads get an error. If a process
    computes or is stopped, its operating system still answers. Use this only for gloo and stores, because time in
    which a receiver has no room for data also counts as silence. Gloo sends nothing before the receiver waits for
    it, but NCCL sends to ranks that compute for minutes before they receive.
    """
    before = _find_sockets()
    yield
    for inode, number in _find_sockets().items():
        # The socket may be closed by now.
        with suppress(OSError):
            if inode not in before:
                with socket.socket(fileno=os.dup(number)) as connection:
                    _limit(connection)


def _find_sockets() -> dict[int, int]:
    """Find the file descriptors of this process's sockets, by inode. Only Linux lists them."""
    found: dict[int, int] = {}
    if sys.platform != "linux":
        return found
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that was used to list the directory is closed by now.
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _limit(connection: socket.socket) -> None:
    remote = connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6)
    if not remote or ip_address(connection.getpeername()[0].partition("%")[0]).is_loopback:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE // 2 // _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE * 1000)


def _with_version_4(address: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # Some interfaces have no address.
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return _on_route(address)


def _on_route(address: str) -> str | None:
    """Find the interface whose network contains an address, which may not be the interface's main address."""
    number = struct.unpack("=I", socket.inet_aton(address))[0]
    found: tuple[int, str] | None = None
    for name, target, mask in _list_routes():
        if number & mask == target and mask:
            found = max(found or (0, ""), (mask.bit_count(), name))
    return None if found is None else found[1]


def _list_routes() -> Sequence[tuple[str, int, int]]:
    """List the system's routes as (interface, network, mask), in the byte order of the machine."""
    try:
        with open("/proc/net/route", encoding="ascii") as file:
            lines = [line.split() for line in file][1:]
    except OSError:
        return ()
    return [(fields[0], int(fields[1], 16), int(fields[7], 16)) for fields in lines]


def _with_version_6(address: str) -> str | None:
    wanted = ip_address(address).packed.hex()
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            fields = line.split()
            if fields[0] == wanted:
                return fields[5]
    return None


NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Environment variables of launchers that this module reads. All of them are numbers."""


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The node of a process, as its launcher describes it."""

    node: int
    """Number of this node."""
    nodes: int
    ranks: range
    """Ranks on this node."""
    world: int

    @property
    def even(self) -> bool:
        """Whether all nodes may have the same number of ranks."""
        here = len(self.ranks)
        return self.nodes * here == self.world and self.ranks.start == self.node * here

    def match(self, cluster: Cluster | None) -> Cluster:
        """Return the cluster that the launcher has started. Raises UserError if the user has named another
        `cluster`."""
        started = Cluster(self.nodes, len(self.ranks)) if self.even else None
        if cluster is None and started is not None:
            return started
        as_large = cluster is not None and (cluster.size, cluster.nodes) == (self.world, self.nodes)
        if cluster is not None and as_large and cluster.ranks(self.node) == self.ranks:
            return cluster
        if started is not None:
            raise UserError(
                f"cluster={cluster}, but {len(self.ranks)} processes were started on each of {self.nodes} nodes;"
                f" set cluster={started} or auto"
            )
        raise UserError(
            f"cluster={cluster or 'auto'}, but node {self.node} of {self.nodes} has {len(self.ranks)} of the"
            f" {self.world} processes, from rank {self.ranks.start} on; nodes of different size must be named in"
            " the order in which they are numbered, for example cluster=2x8+1x4 (torchrun orders them by address)"
        )


def find_node_place(environment: Mapping[str, str] = os.environ) -> NodePlace:
    """Find the node of this process. Without a launcher, it is a single node with all ranks.

    torchrun sets all variables. If another launcher omits some, all nodes are assumed to have the same number of
    ranks.
    """
    world = int(environment.get("WORLD_SIZE", 1))
    rank = int(environment.get("RANK", 0))
    here = int(environment.get("LOCAL_WORLD_SIZE", world))
    first = rank - int(environment.get("LOCAL_RANK", rank % here))
    return NodePlace(
        node=int(environment.get("GROUP_RANK", first // here)),
        nodes=int(environment.get("GROUP_WORLD_SIZE", world // here)),
        ranks=range(first, first + here),
        world=world,
    )
