"""Rendezvous of ranks that torchrun or srun has started, in the store of torchrun or of rank 0."""

import os
import secrets
import time
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from realrl.config.errors import RunError
from realrl.runtime.processes.network import find_node_place, use_loopback, use_route

TIMEOUT = timedelta(minutes=30)
"""Maximum time that ranks wait for each other at the start."""

_LOOK_EVERY = 0.05


def meet_ranks(rank: int, world: int) -> dist.Store:
    """Wait for all ranks, and choose the network that gloo uses between them. Returns a store for this start."""
    place = find_node_place()
    nodes = place.nodes
    if nodes == 1:
        use_loopback()
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    store = open_new_store(_open_shared_store(address, rank, world), rank, world)
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


@cache
def _open_shared_store(address: str, rank: int, world: int) -> dist.Store:
    """Open the store of all ranks at `address`. Rank 0 serves it, unless torchrun does.

    A process that trains twice keeps its store. Otherwise, a fast rank could connect for the second run to the
    server that rank 0 is about to close after the first one. Raises RunError if the ranks cannot meet.
    """
    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=TIMEOUT))
    except dist.DistNetworkError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise RunError(
            f"rank {rank}: the ranks cannot meet at {address}: {reason}; check the network, or set MASTER_PORT to a"
            " free port"
        ) from None
    return store


def open_new_store(store: dist.Store, rank: int, world: int) -> dist.Store:
    """Open a part of a store that no earlier start has used. All ranks open the same part.

    torchrun keeps its store after a restart, so ranks could find addresses of processes that no longer exist. To
    prevent this, rank 0 chooses a new prefix. Every other rank writes a random word below the prefix, and uses the
    prefix after rank 0 has confirmed the word. An entry of an earlier start cannot confirm this word.
    """
    if rank == 0:
        prefix = secrets.token_hex(8)
        store.set("realrl/prefix", prefix)
        words = [store.get(f"realrl/{prefix}/{other}").decode() for other in range(1, world)]
        for word in words:
            store.set(f"realrl/confirmed/{word}", prefix)
    else:
        prefix = _wait_for_prefix(store, rank)
    return dist.PrefixStore(f"realrl/{prefix}", store)


def _wait_for_prefix(store: dist.Store, rank: int) -> str:
    """Write a word below every prefix that rank 0 chooses, until rank 0 confirms the word.

    Returns the confirmed prefix.
    """
    word, tried = secrets.token_hex(8), ""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not store.check([f"realrl/confirmed/{word}"]):
        prefix = store.get("realrl/prefix").decode()
        if prefix != tried:
            store.set(f"realrl/{prefix}/{rank}", word)
            tried = prefix
        if time.monotonic() > deadline:
            raise RunError(f"rank {rank}: rank 0 has not come within {TIMEOUT}")
        time.sleep(_LOOK_EVERY)
    return store.get(f"realrl/confirmed/{word}").decode()
