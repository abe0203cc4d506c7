"""Names, interfaces and ports of this machine, and the way to the hub. No torch."""

import errno
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from realrl.runtime.doctor.finding import Finding, ok, problem, warning

_HUB, _SECONDS = "https://huggingface.co", 4.0
_CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TRUE = ("1", "true", "yes", "on")


def check_host_name(
    nodes: int, name: str | None = None, resolve: Callable[[str], str] = socket.gethostbyname
) -> Iterator[Finding]:
    """Check that the name of this machine leads to an address that other nodes can use."""
    name = socket.gethostname() if name is None else name
    try:
        address = resolve(name)
    except OSError as error:
        text = f"the name of this machine, {name}, has no address ({error})"
        if nodes > 1:
            yield problem("network", f"{text}; add it to /etc/hosts")
        else:
            yield ok("network", f"{text}, and one machine needs none")
        return
    loopback = nodes > 1 and ip_address(address).is_loopback
    more = ", which other nodes cannot reach: ranks take the interface that leads to them" if loopback else ""
    yield ok("network", f"{name} has the address {address}{more}")


def check_interfaces(
    environment: Mapping[str, str], interfaces: Path = Path("/sys/class/net")
) -> Iterator[Finding]:
    """Check that interfaces which variables name exist and are up."""
    there = {entry.name: _is_up(entry) for entry in interfaces.iterdir()} if interfaces.is_dir() else {}
    for variable in _CHOSEN:
        value = environment.get(variable, "")
        # NCCL also takes beginnings of names, and lists; ^ excludes, = is exact.
        names = (
            [] if value.startswith("^") else [part.strip().lstrip("=") for part in value.split(",") if part]
        )
        for name in names if there else ():
            matching = [
                up
                for found, up in there.items()
                if found == name or (variable[0] == "N" and found.startswith(name))
            ]
            if not matching:
                yield problem(
                    "network",
                    f"{variable}={value}: there is no interface {name}; there are {', '.join(sorted(there))}",
                )
            elif not any(matching):
                yield problem("network", f"{variable}={value}: {name} is down; choose another, or unset it")


def check_ports(
    environment: Mapping[str, str], *, launched: bool, host: str = "127.0.0.1"
) -> Iterator[Finding]:
    """Check that this machine lets processes listen, and that the port where ranks meet is free."""
    try:
        with socket.socket() as listener:
            listener.bind((host, 0))
            listener.listen()
    except OSError as error:
        yield problem("ports", f"no process can listen at {host} ({error.strerror}); processes meet there")
        return
    port = environment.get("MASTER_PORT", "29500")
    if launched:  # whoever meets has it already
        yield ok("ports", "the ports where ranks meet could be opened")
        return
    if not port.isdigit() or not 0 < int(port) < 65536:
        yield problem("ports", f"MASTER_PORT={port} is no port; unset it")
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(port)))
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            yield warning(
                "ports",
                f"port {port}, where torchrun has ranks meet, {reason}; give it another one with --master-port",
            )
            return
    yield ok("ports", f"ports can be opened; {port}, that of torchrun, is free")


def check_hub(
    environment: Mapping[str, str], names: Sequence[str] | None, ask: Callable[[str], None] | None = None
) -> Iterator[Finding]:
    """Check the way to the hub, for `names`, which the recipe takes from there; `ask` raises where there is none.

    `names` is None without a recipe.
    """
    wants = f", which has {', '.join(names)}," if names else ""
    offline = next(
        (
            name
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
            if environment.get(name, "").lower() in _TRUE
        ),
        None,
    )
    if offline is not None:
        what = f"; {', '.join(names)} must be in its cache" if names else ""
        yield ok("hub", f"{offline} is set, so that nothing is asked{what}")
        return
    address = environment.get("HF_ENDPOINT") or _HUB
    try:
        (ask or _ask)(address)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        text = f"{address}{wants} cannot be reached ({reason})"
        if names is not None and not names:
            yield ok("hub", f"{text}, and this recipe takes nothing from there")
        else:
            advice = "check proxy and network; with HF_HUB_OFFLINE=1 its cache alone is used, without waiting"
            yield warning("hub", f"{text}; {advice}")
        return
    yield ok("hub", f"{address}{wants} can be reached")


def _ask(address: str) -> None:
    try:
        with urlopen(Request(address, method="HEAD"), timeout=_SECONDS):
            pass
    except HTTPError:
        pass  # it is there
    except URLError as error:
        raise OSError(str(error.reason)) from None


def _is_up(interface: Path) -> bool:
    try:
        return (interface / "operstate").read_text(encoding="utf-8").strip() != "down"
    except OSError:
        return True
