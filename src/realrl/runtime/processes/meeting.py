"""Meeting of ranks that torchrun has started, where it says."""

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from realrl.config.errors import RunError
from realrl.runtime.processes.network import find_node_place, use_loopback, use_route

TIMEOUT = timedelta(minutes=30)
"""Longest that ranks wait for each other until all have met."""

_LOOK_EVERY = 0.05


def meet(rank: int, world: int) -> dist.Store:
    """Meet the other ranks, and choose the network that gloo uses between them; return a store of their own."""
    place = find_node_place()
    nodes = place.nodes
    if nodes == 1:
        use_loopback()
    found, _, _ = next(rendezvous("env://", rank, world, timeout=TIMEOUT))
    store = open_room(found, rank, world)
    if nodes > 1:
        key = "address/{}"
        use_route(
            nodes,
            place.node,
            os.environ["MASTER_ADDR"],
            lambda address: store.set(key.format(place.node), address),
            lambda other: store.get(key.format(other)).decode(),
        )
    return store


def open_room(store: dist.Store, rank: int, world: int) -> dist.Store:
    """Open a part of a store that nobody has used, the same for all ranks.

    torchrun keeps its store when it starts the ranks again, and there they would find addresses of those that
    have gone. The first rank names the room; every other one gives a sign of its own there, and goes in once the
    first one has seen it, so that neither takes what is left of an earlier meeting for an answer.
    """
    if rank == 0:
        room = secrets.token_hex(8)
        store.set("realrl/room", room)
        signs = [store.get(f"realrl/{room}/{other}").decode() for other in range(1, world)]
        for sign in signs:
            store.set(f"realrl/seen/{sign}", room)
    else:
        room = _be_seen(store, rank)
    return dist.PrefixStore(f"realrl/{room}", store)


def _be_seen(store: dist.Store, rank: int) -> str:
    """Give signs in the rooms that the first rank names until it has seen one; return the room that it was in."""
    sign, tried = secrets.token_hex(8), ""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not store.check([f"realrl/seen/{sign}"]):
        room = store.get("realrl/room").decode()
        if room != tried:
            store.set(f"realrl/{room}/{rank}", sign)
            tried = room
        if time.monotonic() > deadline:
            raise RunError(f"rank {rank}: the first rank has not come within {TIMEOUT}")
        time.sleep(_LOOK_EVERY)
    return store.get(f"realrl/seen/{sign}").decode()
