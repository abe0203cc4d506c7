"""What a start opens and asks for, counted on real processes and predicted."""

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.reliability.startup import predict_start
from realrl.runtime.processes.groups import RankPlace, make_gloo_groups
from tests.forked import run_forked

PLACEMENTS = (
    Placement(
        Mesh(0, 4),
        Strategy(
            dp=2,
            tp=2,
        ),
    ),
    Placement(Mesh(0, 4), Strategy(tp=2, pp=2)),
    Placement(
        Mesh(2, 2),
        Strategy(
            dp=2,
        ),
    ),
)
WORLD = 4


class Counting(dist.Store):
    """A store that counts requests for addresses of gloo, and the bytes that answer them."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.requests, self.bytes = inner, Counter[str](), 0

    def set(self, key: str, value: bytes) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.inner.get(key)
        # Addresses are the values that rank numbers lead to.
        if key.rpartition("/")[2].isdigit():
            self.requests["get"] += 1
            self.bytes += len(value)
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.requests["wait"] += sum(key.rpartition("/")[2].isdigit() for key in keys)
        self.inner.wait(keys, *timeout)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)


def _count_sockets() -> int:
    names = [f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd")]
    return sum(os.readlink(name).startswith("socket") for name in names if os.path.islink(name))


def _start(rank: int, scratch: str) -> None:
    """Make the groups of a run on CPUs as a rank does, and note what that took."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before = _count_sockets()
    store = Counting(dist.FileStore(f"{scratch}/store", WORLD))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for _ in ("control", "threads"):
        dist.new_group(backend="gloo")
    place = RankPlace(rank=rank, world=WORLD, node=range(WORLD), device=torch.device("cpu"))
    make_gloo_groups(place, list_rank_sets(PLACEMENTS))
    dist.barrier()
    counts = (sum(store.requests.values()), store.bytes, _count_sockets() - before)
    Path(scratch, f"{rank}.txt").write_text(" ".join(map(str, counts)))
    dist.barrier()


def test_requests_to_the_store_and_sockets_are_as_predicted(tmp_path: Path) -> None:
    run_forked(_start, WORLD, str(tmp_path))
    counted = [tuple(map(int, (tmp_path / f"{rank}.txt").read_text().split())) for rank in range(WORLD)]
    start = predict_start(list_rank_sets(PLACEMENTS), WORLD, gpus=False, efficiency=Efficiency())
    requests, answered, sockets = (sum(values) for values in zip(*counted, strict=True))
    assert requests == start.store_requests - 6 * WORLD
    # A host's name may be some letters longer or shorter than was taken.
    assert answered == pytest.approx(start.store_bytes, rel=0.3)
    assert max(found for *_, found in counted) == start.sockets
    assert sockets > 0
