"""Parameters arrive whole, bit for bit, from any layout in any other; in eight processes started once."""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realrl.engine.buffers import FlatBuffer
from realrl.families.shape import ModelShape
from realrl.huggingface import shards
from realrl.layout.layout import Layout, build_layout
from realrl.layout.limits import CPU_MESSAGES, GPU_MESSAGES, MessageLimits
from realrl.layout.routing.chunks import group_tensors
from realrl.layout.routing.routes import reallocate
from realrl.layout.sets import QUANTISED, TrainablePart, build_parameter_sets
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process, wait_to_be_scheduled
from realrl.runtime.worker.reallocation import ReallocationError, Reallocator, Staging
from tests.conftest import EVERY_RUN
from tests.forked import run_forked

RANKS = 8
CPU = torch.device("cpu")
SHAPE = ModelShape(
    family="qwen2",
    vocab_size=67, hidden_size=24, intermediate_size=50, layers=8, heads=8, kv_heads=2, head_dim=4,
    tied_embeddings=True,
)  # fmt: skip
CLUSTERS = (Cluster(1, 8), Cluster(2, 4), Cluster(4, 2))


def place(first: int, dp: int, tp: int, pp: int, zero: int = 1) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp, zero=zero))


EVERYWHERE = [place(0, *s) for s in product(range(1, 9), repeat=3) if s[0] * s[1] * s[2] == RANKS]
SOMEWHERE = [
    *(place(first, 1, 1, 1) for first in (0, 5)),
    *(place(first, *s) for first, s in ((0, (2, 1, 1)), (2, (1, 2, 1)), (6, (1, 1, 2)))),
    *(place(first, *s) for first, s in ((0, (2, 2, 1)), (4, (1, 2, 2)), (2, (1, 4, 1)))),
    *(place(first, *s) for first, s in ((0, (3, 2, 1)), (2, (1, 3, 2)), (1, (2, 1, 3)))),
    *(
        SHARDED := [
            place(first, *s, 3)
            for first, s in ((0, (8, 1, 1)), (2, (3, 2, 1)), (0, (2, 1, 2)), (0, (2, 4, 1)))
        ]
    ),
]
PLACEMENTS = EVERYWHERE + SOMEWHERE


def whole(scale: float = 1.0) -> dict[str, Tensor]:
    """Global tensors whose elements are all different."""
    tensors, first = {}, 1
    for spec in build_layout(SHAPE, "lm", place(0, 1, 1, 1)).specs:
        values = torch.arange(first, first + spec.numel, dtype=torch.float32)
        tensors[spec.name] = (values * scale).view(spec.shape)
        first += spec.numel
    return tensors


def empty(held: Layout, rank: int, dtype: torch.dtype = torch.float32) -> FlatBuffer | None:
    tensors = [tensor.stored for tensor in held.tensors(rank)]
    return FlatBuffer(tensors, dtype, CPU) if tensors else None


def filled(
    held: Layout, rank: int, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> FlatBuffer | None:
    """What a rank holds of global tensors: the regions of its layout, and zeros as padding."""
    buffer = empty(held, rank, dtype)
    for local in held.tensors(rank):
        assert buffer is not None
        buffer[local.region.tensor][: local.region.size[0]] = tensors[local.region.tensor][
            local.region.slices
        ]
    return buffer


def same(got: FlatBuffer | None, expected: FlatBuffer | None) -> bool:
    if got is None or expected is None:
        return got is expected
    return torch.equal(got.data, expected.data)


Dtypes = tuple[torch.dtype, torch.dtype]
SINGLE: Dtypes = (torch.float32, torch.float32)


LIMITS = replace(CPU_MESSAGES, message_bytes=3000, alone_bytes=700)
GPU_LIMITS = replace(GPU_MESSAGES, message_bytes=5000, alone_bytes=900)


class Bench:
    """One of the processes, and what it finds out: a line per failure, by test."""

    def __init__(self, process: Process) -> None:
        self.process, self.rank = process, process.rank
        self.staging = Staging(CPU, LIMITS)
        self.failures: dict[str, list[str]] = {}

    def reallocator(
        self, a: Placement, b: Placement, *, cluster: Cluster = CLUSTERS[0], dtypes: Dtypes = SINGLE,
        groups: int | None = None, verify: bool = False, limits: MessageLimits | None = None,
    ) -> Reallocator:  # fmt: skip
        source, target = build_layout(SHAPE, "lm", a), build_layout(SHAPE, "lm", b)
        return Reallocator(
            reallocate(source, target, cluster), self.process, label="actor", dtypes=dtypes,
            groups=None if groups is None else group_tensors(target, 4, groups), verify=verify,
            staging=self.staging if limits is None else Staging(CPU, limits),
        )  # fmt: skip


def takes_part(rank: int, *placements: Placement) -> bool:
    return any(rank in placement.ranks for placement in placements)


def every_layout_reaches_a_share_of_all(bench: Bench) -> Iterator[str]:
    tensors, nth = whole(), 3 if EVERY_RUN else 8
    # tests/layout computes the parts of all of them, in one process.
    pairs = [(a, b) for i, a in enumerate(PLACEMENTS) for b in PLACEMENTS[2 * i % nth :: nth]]
    for number, (a, b) in enumerate(pairs):
        if not takes_part(bench.rank, a, b):
            continue
        cluster = CLUSTERS[number % 3]
        reallocator = bench.reallocator(
            a, b, cluster=cluster, verify=number % 2 == 0, limits=None if number % 4 else GPU_LIMITS
        )
        target = empty(build_layout(SHAPE, "lm", b), bench.rank)
        reallocator.run(filled(build_layout(SHAPE, "lm", a), bench.rank, tensors), target)
        if not same(target, filled(build_layout(SHAPE, "lm", b), bench.rank, tensors)):
            yield f"{a.layout} -> {b.layout} on {cluster}"


def the_narrower_type_is_sent(bench: Bench) -> Iterator[str]:
    """The narrower type is sent, so what arrives in either is what a bfloat16 can hold."""
    tensors = whole(1 / 3)
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    types = (torch.float32, torch.bfloat16)
    for a, b in ((EVERYWHERE[2], EVERYWHERE[5]), (SOMEWHERE[5], SOMEWHERE[9]), (SHARDED[1], EVERYWHERE[5])):
        for dtypes in (types, types[::-1]):
            if takes_part(bench.rank, a, b):
                target = empty(build_layout(SHAPE, "lm", b), bench.rank, dtypes[1])
                source = filled(build_layout(SHAPE, "lm", a), bench.rank, tensors, dtypes[0])
                bench.reallocator(a, b, dtypes=dtypes, verify=True, cluster=CLUSTERS[1]).run(source, target)
                if not same(target, filled(build_layout(SHAPE, "lm", b), bench.rank, narrow, dtypes[1])):  # type: ignore[arg-type]
                    yield f"{a.layout} -> {b.layout}, {dtypes}"


def groups_of_tensors_can_go_one_by_one(bench: Bench) -> Iterator[str]:
    tensors = whole()
    for a, b in ((EVERYWHERE[4], EVERYWHERE[8]), (SOMEWHERE[9], SOMEWHERE[5])):
        if not takes_part(bench.rank, a, b):
            continue
        reallocator = bench.reallocator(a, b, groups=5000, cluster=CLUSTERS[1])
        target = filled(build_layout(SHAPE, "lm", b), bench.rank, tensors)
        source = filled(build_layout(SHAPE, "lm", a), bench.rank, tensors)
        for i, names in enumerate(reallocator.groups):
            local = [
                t.stored for t in build_layout(SHAPE, "lm", b).tensors(bench.rank) if t.region.tensor in names
            ]
            part = FlatBuffer(local, torch.float32, CPU) if target is not None else None
            reallocator.run(source, part, i)
            if target is not None and part is not None:
                wrong = [t.name for t in local if not torch.equal(part[t.name], target[t.name])]
                yield from (f"{a.layout} -> {b.layout}: {name}" for name in wrong)


def rows_of_tensors_can_go_one_by_one(bench: Bench) -> Iterator[str]:
    """As they do to the process that saves a model, in portions of a few hundred bytes."""
    tensors, shards.PORTION_BYTES = whole(), 700
    for a, b in ((EVERYWHERE[4], SOMEWHERE[0]), (EVERYWHERE[-1], SOMEWHERE[1]), (SOMEWHERE[9], SOMEWHERE[0])):
        if not takes_part(bench.rank, a, b):
            continue
        source, target = build_layout(SHAPE, "lm", a), build_layout(SHAPE, "lm", b)
        parts = shards.list_portions(target.specs, torch.float32)
        groups = [{part.spec.name: part.region for part in portion} for portion in parts]
        reallocator = Reallocator(
            reallocate(source, target, CLUSTERS[1]), bench.process, label="actor", dtypes=SINGLE,
            groups=groups, verify=True, staging=bench.staging,
        )  # fmt: skip
        held = filled(source, bench.rank, tensors)
        for number, portion in enumerate(parts):
            mine = bench.rank in b.ranks
            buffer = FlatBuffer([part.stored for part in portion], torch.float32, CPU) if mine else None
            reallocator.run(held, buffer, number)
            for part in portion if buffer is not None else ():
                if not torch.equal(buffer[part.spec.name], tensors[part.spec.name][part.region.slices]):
                    yield f"{a.layout} -> {b.layout}: {part.region}"


def averages_are_elementwise(bench: Bench) -> Iterator[str]:
    ours, theirs = whole(), whole(-0.5)
    pairs = (
        (EVERYWHERE[4], EVERYWHERE[8]),
        (SOMEWHERE[9], SOMEWHERE[5]),
        (EVERYWHERE[4], SHARDED[1]),
        SHARDED[:2],
    )
    for factor, (a, b) in product((0.125, 1.0), pairs):
        if not takes_part(bench.rank, a, b):
            continue
        target = filled(build_layout(SHAPE, "lm", b), bench.rank, ours)
        source = filled(build_layout(SHAPE, "lm", a), bench.rank, theirs)
        bench.reallocator(a, b, groups=5000, cluster=CLUSTERS[2]).mix(source, target, factor)
        mixed = {name: (1 - factor) * ours[name] + factor * theirs[name] for name in ours}
        expected = filled(build_layout(SHAPE, "lm", b), bench.rank, mixed)
        if target is not None and expected is not None and not torch.allclose(target.data, expected.data):
            yield f"{a.layout} -> {b.layout} by {factor}"


def a_corrupted_message_is_noticed(bench: Bench) -> Iterator[str]:
    """One element of one message changes on its way from rank 1: its receiver notices, nobody else does."""
    a, b = EVERYWHERE[3], EVERYWHERE[-1]
    tensors, post = whole(), dist.batch_isend_irecv
    spoiled: list[Tensor] = []

    def faulty(operations: list[dist.P2POp]) -> list[dist.Work]:
        for operation in operations:
            if operation.op is dist.isend and not spoiled:
                spoiled.append(operation.tensor.clone())
                spoiled[0][-1] += 1
                operation.tensor = spoiled[0]
        return post(operations)

    reallocator = bench.reallocator(a, b, verify=True)
    if bench.rank == 1:
        dist.batch_isend_irecv = faulty
    source, error = filled(build_layout(SHAPE, "lm", a), bench.rank, tensors), ""
    try:
        reallocator.run(source, empty(build_layout(SHAPE, "lm", b), bench.rank))
    except ReallocationError as problem:
        error = str(problem)
    finally:
        dist.batch_isend_irecv = post
    told = bench.process.gather(error)
    complaints = [text for text in told if text]
    if len(complaints) != 1 or "what arrived from rank 1 is not what was sent: model." not in complaints[0]:
        yield str(told)


def ranks_that_disagree_are_named(bench: Bench) -> Iterator[str]:
    """Rank 2 believes that the cluster has other nodes, rank 3 that messages are shorter."""
    a, b = EVERYWHERE[0], EVERYWHERE[-1]
    try:
        bench.reallocator(a, b, cluster=CLUSTERS[2 if bench.rank == 2 else 0])
        yield "no error"
    except ReallocationError as problem:
        others = "0, 1, 3, 4, 5, 6, 7" if bench.rank == 2 else "2"
        if f"rank {bench.rank} and ranks {others} have different schedules" not in str(problem):
            yield str(problem)
    error = ""
    try:
        bench.reallocator(a, b, limits=replace(LIMITS, message_bytes=100) if bench.rank == 3 else LIMITS)
    except ReallocationError as problem:
        error = str(problem)
    if bench.rank == 3 and "into different messages" not in error:
        yield f"rank 3: {error!r}"


def twenty_round_trips_leak_nothing(bench: Bench) -> Iterator[str]:
    """Twenty round trips with a buffer that would show."""
    shape = SHAPE.model_copy(update={"vocab_size": 60_000})
    a, b = (build_layout(shape, "lm", p) for p in (EVERYWHERE[-1], EVERYWHERE[3]))
    options = {"label": "actor", "dtypes": SINGLE, "verify": True,
               "staging": Staging(CPU, replace(LIMITS, message_bytes=1 << 20))}  # fmt: skip
    there = Reallocator(reallocate(a, b, CLUSTERS[1]), bench.process, **options)  # type: ignore[arg-type]
    back = Reallocator(reallocate(b, a, CLUSTERS[1]), bench.process, **options)  # type: ignore[arg-type]
    home = empty(a, bench.rank)
    assert home is not None
    home.data.copy_(torch.arange(len(home.data)) + 0.5)
    expected, sizes = home.data.clone(), []
    for _ in range(20):
        away = empty(b, bench.rank)
        there.run(home, away)
        home.data.zero_()
        back.run(away, home)
        del away
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    if not torch.equal(home.data, expected):
        yield "not what was sent"
    if sizes[-1] - sizes[4] > home.data.nbytes:
        yield f"resident bytes {sizes}"


def no_more_buffers_are_kept_than_the_planner_counts(bench: Bench) -> Iterator[str]:
    """After all that the scenarios before this one have sent."""
    if not 0 < bench.staging.nbytes <= LIMITS.staging_bytes:
        yield f"{bench.staging.nbytes} bytes"


def quantised_matrices_go_there_and_back(bench: Bench) -> Iterator[str]:
    shape = SHAPE.model_copy(update={"quantised": "int8"})
    subset = build_parameter_sets(shape, "lm", TrainablePart(quantised=True), trained=False)[
        QUANTISED
    ].tensors
    generator = torch.Generator().manual_seed(0)
    tensors = {
        spec.name: torch.randint(256, spec.shape, dtype=torch.uint8, generator=generator) for spec in subset
    }
    layouts = [
        build_layout(shape, "lm", place(0, *s), subset)
        for s in ((1, 3, 2), (2, 2, 1), (1, 1, 8), (4, 2, 1, 3), (1, 8, 1))
    ]
    for source, target in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        held = filled(source, bench.rank, tensors, torch.uint8)
        for a, b in ((source, target), (target, source)):
            if takes_part(bench.rank, a.placement, b.placement):
                moved = Reallocator(
                    reallocate(a, b, CLUSTERS[0]), bench.process, label="ref", staging=bench.staging, verify=True,
                    dtypes=(torch.uint8, torch.uint8),
                )  # fmt: skip
                arrived = empty(b, bench.rank, torch.uint8)
                moved.run(held, arrived)
                held = arrived
                if not same(held, filled(b, bench.rank, tensors, torch.uint8)):
                    yield f"{a.placement.layout} -> {b.placement.layout}"


SCENARIOS: dict[str, Callable[[Bench], Iterator[str]]] = {
    f.__name__: f
    for f in (
        every_layout_reaches_a_share_of_all,
        the_narrower_type_is_sent,
        groups_of_tensors_can_go_one_by_one,
        rows_of_tensors_can_go_one_by_one,
        averages_are_elementwise,
        no_more_buffers_are_kept_than_the_planner_counts,
        a_corrupted_message_is_noticed,
        ranks_that_disagree_are_named,
        twenty_round_trips_leak_nothing,
        quantised_matrices_go_there_and_back,
    )
}


def run_rank(rank: int, directory: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    bench = Bench(Process(rank, RANKS, CPU, dist.new_group(backend="gloo")))
    failures = {}
    for name, scenario in SCENARIOS.items():
        failures[name] = list(scenario(bench))
        dist.barrier()
    torch.save(failures, f"{directory}/{rank}")
    dist.destroy_process_group()
    leave(0)


@pytest.fixture(scope="module")
def failures() -> dict[str, list[str]]:
    """What went wrong, by scenario, on any rank."""
    with tempfile.TemporaryDirectory() as directory:
        run_forked(run_rank, RANKS, directory)
        ranks = [torch.load(f"{directory}/{rank}") for rank in range(RANKS)]
    return {
        name: [f"rank {i}: {x}" for i, found in enumerate(ranks) for x in found[name]] for name in SCENARIOS
    }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_reallocated_parameters_equal_the_target_shards(
    failures: dict[str, list[str]], scenario: str
) -> None:
    assert failures[scenario] == []
