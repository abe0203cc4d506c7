"""Switch between hosts of a test: `python switch.py HOSTS`, run as root on Linux.

A host is a set of namespaces (network, host name, processes, mounts) with an interface `eth0` of its own,
10.77.0.N, whose packets this process carries to the other hosts, with a delay where one is set, or drops, where the
cable is cut.
Hosts know each other as host0, host1, ..., but themselves as 127.0.1.1, as Debian sets up a machine.

It says `N PID` for each host, the process that holds its namespaces; commands on standard input are `delay
SECONDS` (for each packet), `cut HOST` and `heal`. It ends with its parent, and all processes of hosts end with it.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque

NETWORK = bytes((10, 77, 0))
MTU = 32000
"""Bytes of a packet, large since each costs time of this process."""

_NEW_MOUNTS, _NEW_UTS, _NEW_PID, _NEW_NET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_END_WITH_PARENT = 1

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Make the hosts, then carry packets until standard input is closed."""
    libc.prctl(_END_WITH_PARENT, signal.SIGKILL)
    devices = []
    count = int(sys.argv[1])
    for host in range(count):
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            hold(host, count, theirs)
        theirs.close()
        message, descriptors, _, _ = socket.recv_fds(ours, 100, 1)
        if not descriptors:
            sys.exit(message.decode() or "a host could not be made")
        devices.append(descriptors[0])
        print(host, message.decode(), flush=True)
    carry(devices)


def hold(host: int, count: int, parent: socket.socket) -> None:
    """In a child process: be the first process of a host, and hand over its interface."""
    libc.prctl(_END_WITH_PARENT, signal.SIGKILL)
    try:
        check(libc.unshare(_NEW_MOUNTS | _NEW_UTS | _NEW_NET), "unshare")
        socket.sethostname(f"host{host}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", b"eth0", _TUN | _NO_HEADER))
        run(f"ip addr add {address(host)}/24 dev eth0")
        run(f"ip link set eth0 up mtu {MTU}")
        run("ip link set lo up")
        run("mount --make-rprivate /")
        names = {"localhost": "127.0.0.1", **{f"host{other}": address(other) for other in range(count)}}
        names[f"host{host}"] = "127.0.1.1"
        with tempfile.NamedTemporaryFile("w") as file:
            file.writelines(f"{number} {name}\n" for name, number in names.items())
            file.flush()
            run(f"mount --bind {file.name} /etc/hosts")
        check(libc.unshare(_NEW_PID), "unshare")
    except (OSError, subprocess.CalledProcessError) as error:
        parent.send(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    # The next process is the first of its process namespace: when it ends, the system kills all others there.
    holder = os.fork()
    if holder == 0:
        libc.prctl(_END_WITH_PARENT, signal.SIGKILL)
        parent.close()
        run("mount -t proc proc /proc")
        while True:
            signal.pause()
    socket.send_fds(parent, [str(holder).encode()], [device])
    os.close(device)
    os.waitpid(holder, 0)
    os._exit(0)


def carry(devices: list[int]) -> None:
    """Carry packets between interfaces, and obey commands."""
    os.set_blocking(0, False)
    waiting: deque[tuple[float, int, bytes]] = deque()
    delay, cut = 0.0, -1
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, *devices], [], [], patience)
        if 0 in ready:
            commands = os.read(0, 1000).decode()
            if not commands:
                return
            for command in commands.splitlines():
                name, _, value = command.partition(" ")
                delay = float(value) if name == "delay" else delay
                cut = int(value) if name == "cut" else -1 if name == "heal" else cut
        for source, device in enumerate(devices):
            if device not in ready:
                continue
            packet = os.read(device, 65536)
            # Only version 4 of the protocol, and only between hosts.
            target = packet[19] - 1 if packet[0] >> 4 == 4 and packet[16:19] == NETWORK else -1
            if 0 <= target < len(devices) and cut not in (source, target):
                waiting.append((time.monotonic() + delay, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            if cut != target:
                try:
                    os.write(devices[target], packet)
                except BlockingIOError:
                    continue  # a lost packet, as on any network


def address(host: int) -> str:
    """The address of a host."""
    return f"{'.'.join(map(str, NETWORK))}.{host + 1}"


def run(command: str) -> None:
    """Run a command, which must end well."""
    subprocess.run(command.split(), check=True)


def check(result: int, what: str) -> None:
    """Raise OSError where a function of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
