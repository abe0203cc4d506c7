"""Ranks of several nodes find each other, and the network interface between them."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from realrl.config.errors import UserError
from realrl.runtime.processes import network
from realrl.runtime.processes.network import (
    INTERFACE_VARIABLE,
    find_interface,
    find_own_address,
    use_route,
)
from realrl.runtime.processes.rendezvous import open_new_store


def test_a_rendezvous_finds_nothing_of_an_earlier_start() -> None:
    shared = dist.HashStore()
    for start in ("first", "second"):
        with ThreadPoolExecutor(3) as pool:
            # Rank 0 comes last, so that the others find what the first start has left.
            others = [pool.submit(open_new_store, shared, rank, 3) for rank in (2, 1)]
            stores = [pool.submit(open_new_store, shared, 0, 3).result(20), *(o.result(20) for o in others)]
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", start)
        assert [store.get("address").decode() for store in stores] == [start] * 3


linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for interfaces")


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Peer -> the address of this node on the way to it. The host's own name is on the loopback interface."""
    found = {"node0": "127.0.1.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)
    monkeypatch.setattr(network, "find_own_address", lambda peer: found[peer])
    monkeypatch.setattr(network, "find_interface", lambda address: f"to-{address}")
    return found


@linux
def test_the_node_where_all_meet_uses_its_way_to_another_one(addresses: dict[str, str]) -> None:
    published: list[str] = []
    use_route(3, 0, "node0", published.append, {1: "127.0.0.1", 2: "10.0.0.2"}.__getitem__)
    assert published == ["127.0.1.1"] and os.environ.pop(INTERFACE_VARIABLE) == "to-10.0.0.1"


@linux
def test_nodes_that_are_all_on_this_machine_use_the_loopback_interface(addresses: dict[str, str]) -> None:
    use_route(2, 0, "node0", lambda _: None, lambda _: "127.0.0.1")
    assert os.environ.pop(INTERFACE_VARIABLE) == "to-127.0.1.1"


@linux
def test_an_interface_that_the_user_names_is_kept(
    addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "ib0")
    use_route(2, 0, "node0", lambda _: None, lambda _: "10.0.0.2")
    assert os.environ[INTERFACE_VARIABLE] == "ib0"


@linux
def test_interfaces_are_found_by_their_addresses() -> None:
    assert find_interface(find_own_address("127.0.0.1")) == "lo" == find_interface("127.0.1.1")
    with pytest.raises(UserError, match=f"has the address 203.0.113.77; set {INTERFACE_VARIABLE}"):
        find_interface("203.0.113.77")


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(UserError, match=r"has no way to no\.such\.host\.invalid, where the nodes meet"):
        find_own_address("no.such.host.invalid")


TOLD_TO_END = """
import time
from realrl.runtime.processes.signals import deferred_termination, raise_signals, stop_requested
raise_signals()
with deferred_termination(60):
    print("ready", flush=True)
    while not stop_requested():
        time.sleep(0.01)
    time.sleep(1)
    print("saved", flush=True)
"""


@linux
def test_the_same_request_to_end_may_come_from_slurm_and_from_torchrun() -> None:
    command = [sys.executable, "-c", TOLD_TO_END]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        threading.Timer(0.3, process.send_signal, [signal.SIGTERM]).start()
        assert process.stdout.read() == "saved\n"
    assert process.returncode == 0
