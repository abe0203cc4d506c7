"""Messages that ranks send each other in a step besides rows, counted and predicted."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from realrl.data.batch import Batch, Ragged
from realrl.plan.cluster import Cluster, Links
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.planner.moves.exchange import ExchangeModel
from realrl.program.instructions import ShareLengths
from realrl.program.lower import home_placements, lower
from realrl.runtime.costs import StepReports
from realrl.runtime.measure.step_timer import StepTimes
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.exchange import Exchange
from realrl.runtime.worker.store import Store
from tests.forked import run_forked
from tests.planner.simulating.test_simulate import A_CHAIN

WORLD, ITEMS = 4, 6
PLANS = {
    "apart": ("d2 t1 p1 @0-1", "d1 t1 p1 @2", "d1 t1 p1 @3"),
    "together": ("d4 t1 p1 @0-3", "d2 t2 p1 @0-3", "d4 t1 p1 @0-3"),
    "some": ("d1 t1 p1 @0", "d1 t1 p1 @1", "d1 t1 p1 @0"),
}


def make_plan(name: str) -> Plan:
    names = [call.name for call in A_CHAIN.calls]
    places = [Placement.parse(f"{text} mb=9") for text in PLANS[name]]
    return Plan(Cluster(1, WORLD), dict(zip(names, places, strict=True)))


def share_of(plan: Plan, rank: int) -> ShareLengths | None:
    program = lower(A_CHAIN, plan, home_placements(A_CHAIN, plan))[rank]
    return next((one for one in program.instructions if isinstance(one, ShareLengths)), None)


def _send_control_messages(rank: int, name: str, scratch: str) -> None:
    """Share lengths and report times as a rank of a run does, and count what it sends."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{scratch}/store", WORLD), rank=rank, world_size=WORLD
    )
    sent: list[int] = []
    isend = dist.isend

    def count(tensor: torch.Tensor, *where: Any, **more: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *where, **more)

    dist.isend = count
    process = Process(rank, WORLD, torch.device("cpu"), dist.group.WORLD)
    plan = make_plan(name)
    store = Store(A_CHAIN, plan, {})
    rows = Ragged.of([torch.arange(3)] * ITEMS)
    store.feed(Batch(tuple(range(ITEMS)), {"x": rows}))
    share = share_of(plan, rank)
    if share is not None:
        exchange = Exchange(process)
        call = A_CHAIN.call(share.call)
        if rank in share.output_ranks:
            ids = store.items(call, share.output_ranks.index(rank))
            store.put(share.key, ids, Ragged.of([torch.arange(i + 1) for i in ids]))
        exchange.share_lengths(share, store)
        exchange.finish()
        assert store.lengths[share.key] == tuple(range(1, ITEMS + 1))
    lengths = [len(sent), sum(sent)]
    reports = StepReports(process)
    everyone = reports.exchange(StepTimes(0.0, 1.0, ()))
    assert (everyone is None) == (rank != 0)
    Path(scratch, f"{rank}.txt").write_text(" ".join(map(str, [*lengths, len(sent) - lengths[0]])))
    dist.barrier()


@pytest.mark.parametrize("name", PLANS)
def test_lengths_and_reports_are_as_many_messages_as_predicted(name: str, tmp_path: Path) -> None:
    run_forked(_send_control_messages, WORLD, name, str(tmp_path))
    counts = [[*map(int, (tmp_path / f"{rank}.txt").read_text().split())] for rank in range(WORLD)]
    share = share_of(make_plan(name), 0)
    assert share is not None
    ranks = len({*share.output_ranks, *share.readers})
    # A message of the model takes one second, a byte none.
    each = ExchangeModel(Links(1e18, 1e18, 1.0), WORLD, items=ITEMS)
    predicted = float(each.lengths_seconds(len(share.output_ranks), ranks))
    assert sum(messages for messages, _, _ in counts) == pytest.approx(predicted)
    # The first output rank tells all others the lengths of all items.
    free = ExchangeModel(Links(1.0, 1.0, 0.0), WORLD, items=ITEMS)
    assert counts[share.output_ranks[0]][1] == free.lengths_seconds(len(share.output_ranks), ranks)
    assert sum(reports for *_, reports in counts) == pytest.approx(each.reports_seconds(WORLD), abs=0.01)
    assert counts[0][2] == 0
