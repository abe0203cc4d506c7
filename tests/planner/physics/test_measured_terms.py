"""Terms of calls whose parts were measured: sums of what a profile says, each part as often as it occurs."""

from dataclasses import replace

import pytest

from realrl.dataflow.call import Kind
from realrl.families.adapters import LowRank
from realrl.families.shape import ModelShape
from realrl.layout.sets import TrainablePart
from realrl.plan.placement import Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.profile import CollectiveTime, LayerTimes, Measurement, Profile, ShapeKey
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.planner.unit_device import SHAPE, make_call, make_cluster, make_efficiency, place, store

STEP = Workload(6, (32,))
TOKENS, LAYERS = 6 * 32, 4
PARTS = (
    "embed",
    "embed_backward",
    "forward",
    "backward",
    "head",
    "head_backward",
    "scalar",
    "scalar_backward",
)
SECONDS = {name: 10.0**i for i, name in enumerate(PARTS)}
"""Of a micro-batch: digits of a sum say how often each part has been counted."""
PARAMETERS = LAYERS * (256 * 64 + 64 * 128 + 320 * 64 + 64 * 160 + 2 * 64) + 64 + 2 * 960 * 64
CACHE = (6 * 1 + 6 * 2 + 1) * 16 * LAYERS * 2 * 64 * 2
"""Bytes of the cache of six prompts of 8 tokens and continuations of 24, and a scratch block."""
GENERATE = Workload(6, (8,), (24,), 24)


def measure(shape: ModelShape = SHAPE, *, tp: int = 1, threads: int | None = None) -> Profile:
    layers = [Measurement(kind=k, tp=tp, tokens=TOKENS, context=32, seconds=s) for k, s in SECONDS.items()]
    layers += [
        Measurement(kind="optimizer", tokens=PARAMETERS, seconds=3.0),
        Measurement(kind="optimizer", tokens=PARAMETERS // 2, seconds=2.0),
        Measurement(kind="start", tp=tp, tokens=42, context=7, seconds=1.0),
        Measurement(kind="prefill", tp=tp, tokens=42, context=7, seconds=10.0),
        *(Measurement(kind="decode", tp=tp, sequences=n, context=20, seconds=100.0) for n in (6, 8)),
        *(Measurement(kind="decode_overhead", tp=tp, sequences=n, seconds=1e4) for n in (6, 8)),
        *(Measurement(kind="sample", tp=tp, sequences=n, seconds=1e6) for n in (6, 8)),
    ]
    copies = {"copy": 4 * PARAMETERS, "clear": 4 * PARAMETERS, "allocate": CACHE}
    seconds = {"copy": 1e2, "clear": 1e4, "allocate": 1e8}
    return Profile(
        device="unit",
        software={},
        threads=threads,
        layers=(LayerTimes(shape=ShapeKey.of(shape), dtype="bfloat16", measurements=tuple(layers)),),
        collectives=tuple(
            CollectiveTime(kind=k, ranks=1, bytes=size, seconds=seconds[k])  # type: ignore[arg-type]
            for k, size in copies.items()
        ),
    )


def charge(
    kind: Kind,
    *,
    step: Workload = STEP,
    placement: Placement | None = None,
    model: StoredModel | None = None,
    profile: Profile | None = None,
    cluster: ClusterSpec | None = None,
    **efficiency: float,
) -> dict[str, float]:
    costs = CostModel(cluster or make_cluster(), profile or measure(), make_efficiency(**efficiency))
    return dict(costs.call(make_call(kind), model or store(), placement or place(), step).terms)


def test_train_calls_are_made_of_their_measured_parts() -> None:
    terms = charge(Kind.TRAIN)
    assert terms["compute"] == 114411  # four layers forward and backward, and once the ends
    assert terms["optimizer"] == 3 + 1e4 + 1e2  # on one rank, gradients are copied
    slow, uncopied = make_cluster(memory_bytes_per_s=1.0), measure().model_copy(update={"collectives": ()})
    found = charge(Kind.TRAIN, profile=uncopied, cluster=slow)["optimizer"]
    assert found == 3 + 2 * 4 * PARAMETERS  # read and written in float32
    assert charge(Kind.TRAIN, placement=place(recompute=True))["compute"] == 114811
    assert charge(Kind.TRAIN, model=store(head="scalar"))["compute"] == 11004411
    shared = charge(Kind.TRAIN, step=Workload(12, (32,)), placement=place(2))
    assert shared["compute"] == 114411 and shared["optimizer"] == 2 + 1e4


def test_parts_of_a_model_are_differentiated_alone() -> None:
    last = store(part=TrainablePart(last_layers=1))
    assert charge(Kind.TRAIN, model=last)["compute"] == 111401 and 111401 == 1 + 4 * 100 + 1000 + 110000


def test_inference_calls_are_made_of_their_measured_parts() -> None:
    assert charge(Kind.INFERENCE)["compute"] == 10401
    assert charge(Kind.INFERENCE, model=store(head="scalar"))["compute"] == 1000401
    exact = replace(store(), exact=True)
    # What comes before the layers is the same.
    assert charge(Kind.INFERENCE, model=exact, exact_forward=1.5)["compute"] == 1 + 1.5 * 10400


def test_generate_calls_are_made_of_their_measured_parts() -> None:
    """The last layer of a prefill counts in its start. Rows that a graph has besides take what all of them take."""
    terms = charge(Kind.GENERATE, step=GENERATE, cluster=make_cluster(cpu=True))
    assert terms["compute"] - 1e8 == pytest.approx(1 + 3 * 10)
    assert terms["decode"] == pytest.approx(24 * (4 * 100 + 1e4 + 1e6))
    exact = charge(
        Kind.GENERATE,
        step=GENERATE,
        cluster=make_cluster(cpu=True),
        model=replace(store(), exact=True),
        exact_forward=2.0,
    )
    assert exact["decode"] == pytest.approx(24 * (4 * 200 + 1e4 + 2e6))


def test_two_decode_batches_prefill_in_two_passes_and_share_a_cache() -> None:
    terms = charge(Kind.GENERATE, step=GENERATE, placement=place(pp=2), cluster=make_cluster(cpu=True))
    # The slower stage packs prompts and has two layers. Half of a cache takes as long as the least one measured.
    assert terms["compute"] - 1e8 == pytest.approx(2 * (1 + 20))


def test_measured_times_are_those_of_the_tp_degree() -> None:
    profile = measure(tp=2)
    assert charge(Kind.INFERENCE, placement=place(tp=2), profile=profile)["compute"] == 10401
    assert charge(Kind.INFERENCE, profile=profile)["compute"] == 0


def test_more_threads_of_a_process_are_faster() -> None:
    cpu = make_cluster(cpu=True)
    group = cpu.groups[0]
    two = ClusterSpec("unit", (replace(group, device=replace(group.device, threads=2)),))
    profile = measure(threads=1)
    terms = charge(Kind.TRAIN, profile=profile, cluster=two)
    assert terms["compute"] == pytest.approx(114411 * 1.05 / 2)
    assert terms["optimizer"] == pytest.approx((3 + 1e4 + 1e2) * 1.05 / 2)
    assert charge(Kind.TRAIN, profile=measure(threads=2), cluster=two)["compute"] == 114411


def test_adapters_are_added_to_measured_layers() -> None:
    """A backward pass was measured with all gradients: of frozen matrices, arithmetic has that of inputs alone."""
    shape = SHAPE.model_copy(update={"lora": LowRank(rank=4, targets=("q_proj",))})
    model = store(shape, part=TrainablePart(adapters=True))
    slow = make_cluster(bf16_flops=1.0)
    products, attention = 2 * TOKENS * (256 * 64 + 64 * 128 + 320 * 64 + 64 * 160), 2 * 32**2 * 128 * 6
    adapters = 2 * TOKENS * 4 * (64 + 128)
    share = (products + 2.5 * attention) / (2 * products + 2.5 * attention)
    inferred, trained = (
        charge(k, model=model, cluster=slow)["compute"] for k in (Kind.INFERENCE, Kind.TRAIN)
    )
    assert inferred == pytest.approx(10401 + 4 * adapters)
    # The embedding is frozen.
    assert trained == pytest.approx(110401 + 4 * (3 * adapters + 1000 * share))


def test_collectives_and_copies_are_those_that_were_measured() -> None:
    sums = {"all_reduce": 7.0, "all_gather": 11.0, "reduce_scatter": 13.0, "send": 17.0}
    profile = Profile(
        device="unit",
        software={},
        collectives=tuple(
            CollectiveTime(kind=kind, ranks=2, bytes=1000, seconds=seconds)  # type: ignore[arg-type]
            for kind, seconds in sums.items()
        ),
    )
    # Each is longer than what was measured, and extrapolated in proportion.
    inferred = charge(Kind.INFERENCE, profile=profile, placement=place(tp=2))
    states, rows = 2 * TOKENS * 64 / 1000, max(1.0, 4 * TOKENS / 1000)
    assert inferred["tensor"] == pytest.approx(7 * (9 * states + 3 * rows))
    trained = charge(Kind.TRAIN, profile=profile, placement=place(2))
    assert trained["data"] == pytest.approx(PARAMETERS / 1000 * (4 * 13 + 2 * 11) + 3 * 7)
    piped = charge(Kind.INFERENCE, profile=profile, placement=place(pp=2, tokens=32))
    assert piped["pipeline"] == pytest.approx(17 * 2 * 32 * 64 / 1000)


def test_measured_decode_steps_of_cp_ranks_merge_outputs_besides() -> None:
    """Profiles measure whole caches: a rank attends as long as to as many keys, then reads the outputs of all."""
    slow = make_cluster(memory_bytes_per_s=1.0)
    one, two = (
        charge(Kind.GENERATE, step=GENERATE, placement=place(cp=cp), cluster=slow)["decode"] for cp in (1, 2)
    )
    output = 8 * 4 * (128 + 8)  # of eight rows in float32, with a log-sum-exp per head
    assert two - one == pytest.approx(32 * LAYERS * (3 * 2 + 5) * output)
