"""Performance metrics of a run: throughput, MFU, bandwidth, packing and idle time."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.engine.model import make_unsharded_model
from realrl.engine.pass_counts import PassCounts
from realrl.families.shape import ModelShape
from realrl.layout.sets import TrainablePart
from realrl.model import attention
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Dtype, Placement
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup, load_cluster
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.profile.profile import CollectiveTime, LayerTimes, Measurement, Profile, ShapeKey
from realrl.program.memory import StoredModel
from realrl.runtime.measure.metric_names import PERFORMANCE
from realrl.runtime.measure.performance import Performance
from realrl.runtime.measure.step_timer import StepTimes, TimedSpan
from realrl.runtime.measure.timing_log import TimingLog
from realrl.runtime.measure.work_done import WorkDone, count_generation, read_passes
from realrl.runtime.supervision.run_end import read_notes
from tests.conftest import PPO_CALLS

SHAPE = ModelShape(
    vocab_size=10, hidden_size=4, intermediate_size=6, layers=3, heads=2, kv_heads=1, head_dim=2
)
LAYER = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6
"""Weights of the matrices of a layer: queries, keys and values, output, and three of the feed-forward network."""
HEAD = 4 * 10
KIND = replace(DEVICES["h100"], fp32_flops=1e6, memory_bytes_per_s=1e5)
SPEC = ClusterSpec(
    "two", (NodeGroup(nodes=1, devices_per_node=2, device=KIND, node_bytes_per_s=KIND.node_bytes_per_s),)
)
GRAPH = DataflowGraph(
    [
        Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), ("sequences",), work=("prompts",)),
        Call("actor.train", "actor", Kind.TRAIN, ("sequences",), work=("sequences",)),
    ],
    [Key("prompts", "int64"), Key("sequences", "int64")],
)
PLAN = Plan(
    Cluster(1, 2),
    {
        "actor.generate": Placement.parse("d2 t1 p1 @0-1 mb=64"),
        "actor.train": Placement.parse("d1 t2 p1 @0-1 mb=64"),
    },
)
MODEL = StoredModel(shape=SHAPE, head="lm", dtype="float32", trained=True)


def make_performance(
    spec: ClusterSpec | None,
    profile: Profile | None = None,
    *,
    model: StoredModel = MODEL,
    dtype: Dtype = "float32",
) -> Performance:
    return Performance(
        graph=GRAPH, plan=PLAN, models={"actor": replace(model, dtype=dtype)}, spec=spec, profile=profile
    )


def compute(
    *ranks: StepTimes, spec: ClusterSpec | None = SPEC, model: StoredModel = MODEL
) -> dict[str, float]:
    performance = Performance(graph=GRAPH, plan=PLAN, models={"actor": model}, spec=spec, profile=None)
    found = performance.compute(ranks, TimingLog().add(ranks, [0.0] * len(ranks)))
    assert all(name.startswith(PERFORMANCE) for name in found)
    return {name.removeprefix(PERFORMANCE): value for name, value in found.items()}


def span(name: str, start: float, end: float, **work: float) -> TimedSpan:
    return TimedSpan(name, start, end, work=WorkDone(**work) if work else None)  # type: ignore[arg-type]


GENERATED = {
    "tokens": 30,
    "scored": 20,
    "squares": 120,
    "decode_steps": 9,
    "decode_rows": 36,
    "decoded": 18,
    "cached": 100,
    "prefill_seconds": 0.5,
}
TRAINED = {"tokens": 96, "scored": 96, "squares": 600, "micro_batches": 2, "padded_tokens": 120}
STEP = (
    StepTimes(
        0.0,
        10.0,
        (
            span("actor.generate", 0.0, 2.0, **GENERATED),
            span("reallocate", 2.0, 6.0),
            span("actor.train", 6.0, 10.0, **TRAINED),
        ),
        copying=0.5,
        tokens=90,
    ),
    StepTimes(
        0.0,
        10.0,
        (
            span("actor.generate", 1.0, 5.0, **GENERATED),
            span("reallocate", 5.0, 6.0),
            span("actor.train", 7.0, 10.0, **TRAINED),
        ),
    ),
)


def test_metrics_of_a_small_step_are_those_computed_by_hand() -> None:
    found = compute(*STEP)
    # From the start on the last rank to the end on the last one; replicas add up, and TP ranks do not.
    assert found["actor.generate/seconds"] == 4.0 and found["actor.train/seconds"] == 3.0
    assert found["actor.generate/tokens_per_s"] == 2 * 20 / 4
    assert found["actor.generate/prompt_tokens_per_s"] == 2 * 10 / 4
    assert found["actor.train/tokens_per_s"] == 96 / 3
    assert found["tokens_per_s"] == 9.0
    forward = 3 * (2 * 96 * LAYER + 2 * 600 * 4) + 2 * 96 * HEAD
    generated = 2 * (3 * (2 * 30 * LAYER + 2 * 120 * 4) + 2 * 20 * HEAD)
    assert found["actor.train/mfu"] == pytest.approx(3 * forward / (3.0 * 2e6), rel=1e-4)
    assert found["actor.generate/mfu"] == pytest.approx(generated / (4.0 * 2e6), rel=1e-4)
    assert found["mfu"] == pytest.approx((3 * forward + generated) / (10.0 * 2e6), rel=1e-4)
    assert found["actor.train/packing"] == 96 / 128 and found["actor.train/padding"] == 96 / 120
    assert found["actor.generate/decode_rows"] == 0.5
    read = 4 * (2 * 9 * (3 * LAYER + HEAD) + 2 * 100 * 2 * 3 * 2)
    assert found["actor.generate/decode_bandwidth"] == pytest.approx(read / (2e5 * 3.5), rel=1e-4)


def test_each_context_parallel_rank_reads_the_weights_but_only_its_part_of_the_cache() -> None:
    placements = {**PLAN.placements, "actor.generate": Placement.parse("d1 c2 t1 p1 @0-1 mb=64")}
    plan = Plan(PLAN.cluster, placements)
    performance = Performance(graph=GRAPH, plan=plan, models={"actor": MODEL}, spec=SPEC, profile=None)
    found = performance.compute(STEP, TimingLog().add(STEP, [0.0, 0.0]))
    # Both ranks report the same work, which is that of one replica.
    read = 4 * (2 * 9 * (3 * LAYER + HEAD) + 100 * 2 * 3 * 2)
    bandwidth = found[f"{PERFORMANCE}actor.generate/decode_bandwidth"]
    assert bandwidth == pytest.approx(read / (2e5 * 3.5), rel=1e-4)
    assert found[f"{PERFORMANCE}actor.generate/tokens_per_s"] == 20 / 4


def test_a_rank_is_idle_while_it_waits_for_others() -> None:
    found = compute(*STEP)
    # Replicas generate each for itself; a reallocation and a TP rank's call begin when the last rank does.
    busy = [0.5 + 2.0 + 1.0 + 3.0, 4.0 + 1.0 + 3.0]
    idle = [1 - seconds / 10 for seconds in busy]
    assert [found["idle/rank-0"], found["idle/rank-1"]] == pytest.approx(idle)
    assert found["idle"] == pytest.approx(0.275) and found["idle_max"] == 0.35


def test_functions_and_waiting_for_them_are_no_work_of_a_rank() -> None:
    spans = (TimedSpan("reward.function", 0.0, 9.0, alone=True), span("actor.train", 9.0, 10.0, **TRAINED))
    assert compute(StepTimes(0.0, 10.0, spans))["idle"] == pytest.approx(0.9)


def test_what_is_not_trained_costs_no_backward_pass() -> None:
    frozen = compute(*STEP, model=replace(MODEL, part=TrainablePart(1, freeze_embeddings=False)))
    forward = 3 * (2 * 96 * LAYER + 2 * 600 * 4) + 2 * 96 * HEAD
    last = 2 * 96 * LAYER + 2 * 600 * 4 + 2 * 96 * HEAD
    assert frozen["actor.train/mfu"] == pytest.approx((forward + 2 * last) / (3.0 * 2e6), rel=1e-4)


@pytest.mark.parametrize("spec", [None, ClusterSpec.parse("cpu:1x2")])
def test_shares_of_an_unknown_peak_are_left_out(spec: ClusterSpec | None) -> None:
    missing = {"mfu", "actor.train/mfu", "actor.generate/mfu", "actor.generate/decode_bandwidth"}
    found = compute(*STEP, spec=spec)
    assert set(compute(*STEP)) - set(found) == missing
    performance = Performance(graph=GRAPH, plan=PLAN, models={"actor": MODEL}, spec=spec, profile=None)
    assert performance.missing is not None and "MFU and decode bandwidth are left out" in performance.missing


def test_peaks_of_a_cpu_come_from_a_profile_or_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "groups: [{nodes: 1, devices_per_node: 2, device: {like: cpu, fp32_tflops: 1, memory_gb_per_s: 20}}]"
    )
    points = [Measurement(kind="product", tokens=n, seconds=s) for n, s in ((100, 1e-5), (1000, 2e-3))]
    profile = Profile(
        device="cpu",
        software={},
        layers=(LayerTimes(shape=ShapeKey.of(SHAPE), dtype="float32", measurements=tuple(points)),),
        collectives=tuple(
            CollectiveTime(kind="copy", ranks=1, bytes=size, seconds=seconds)
            for size, seconds in ((1000, 1e-9), (10**9, 0.1))
        ),
    )
    cpu, mine = ClusterSpec.parse("cpu:1x2"), load_cluster(str(tmp_path / "mine.yaml"))
    for spec, of, flops, bandwidth in ((cpu, profile, 1e12, 2e10), (mine, None, 1e12, 2e10)):
        performance = Performance(
            graph=GRAPH,
            plan=PLAN,
            models={"actor": MODEL},
            spec=spec,
            profile=of,
        )
        assert performance.missing is None
        found = performance.compute(STEP, TimingLog().add(STEP, [0.0, 0.0]))
        reference = compute(*STEP)
        for name, factor in (
            ("actor.train/mfu", 1e6 / flops),
            ("actor.generate/decode_bandwidth", 1e5 / bandwidth),
        ):
            assert found[PERFORMANCE + name] == pytest.approx(factor * reference[name], rel=1e-3)


def test_products_of_mixed_models_are_measured_by_the_peak_of_bfloat16() -> None:
    spec = ClusterSpec("two", (replace(SPEC.groups[0], device=replace(KIND, bf16_flops=8e6)),))
    dtypes: tuple[Dtype, ...] = ("float32", "mixed")
    plain, mixed = (make_performance(spec, dtype=dtype) for dtype in dtypes)
    step = TimingLog().add(STEP, [0.0, 0.0])
    name = f"{PERFORMANCE}actor.train/mfu"
    assert mixed.compute(STEP, step)[name] == pytest.approx(plain.compute(STEP, step)[name] / 8, rel=1e-3)


def test_samples_of_a_prompt_share_its_prefill_and_its_cache() -> None:
    counts = PassCounts(torch.device("cpu"))
    for rows in (3, 3, 1, 1):
        counts.add_decode_step(rows)
    # Two samples of a prompt of 5 tokens, with 2 and 4 tokens of their own, and one of 3 with 1.
    found = count_generation(counts, [[0, 1], [2]], [5, 5, 3], [7, 9, 4])
    assert (found.tokens, found.scored, found.squares) == (5 + 3 + 7, 7, 7**2 + 9**2 - 5**2 + 4**2)
    # The prompt's last token gives the first one, the first one gives the second, and so on.
    assert (found.decode_steps, found.decode_rows, found.decoded) == (4, 8, 2 + 4 + 1)
    assert found.cached == (4 * 5 + 1 * 3) + (0 + 1) + (0 + 1 + 2 + 3) + 0


def test_parts_of_answers_are_prefilled_again_behind_their_shared_prompt() -> None:
    counts = PassCounts(torch.device("cpu"))
    # Two samples of a prompt of 5 tokens: one has 3 tokens and gets 2, the other one begins with 4.
    found = count_generation(counts, [[0, 1]], [5, 5], [10, 9], [3, 0])
    assert (found.tokens, found.scored, found.squares) == (5 + 3 + 2 + 4, 6, 10**2 + 9**2 - 5**2)
    assert found.cached == 4 * 5 + (3 + 4) + (0 + 1 + 2 + 3)


def test_padding_of_attention_is_counted_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(
        vocab_size=32, hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=1, head_dim=8
    )
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    counts, rows = model.counts, Ragged.of([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    batch = Batch((0, 1), {"tokens": rows, "loss_mask": Ragged(torch.ones_like(rows.values), rows.lengths)})
    model.infer(batch, SFTMethod(), 8)
    assert read_passes(counts) == WorkDone(tokens=5, scored=5, squares=13, micro_batches=1)
    monkeypatch.setattr(attention, "on_gpu", lambda _: True)  # in float32 a GPU pads to a multiple of 8
    model.infer(batch, SFTMethod(), 8)
    assert read_passes(counts).padded_tokens == 2 * 8 and read_passes(counts).micro_batches == 2
    counts.reset()
    assert read_passes(counts) == WorkDone(tokens=0, scored=0, squares=0)


def test_prefill_on_a_gpu_is_timed_by_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 250.0))

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.Event", Event)
    counts = PassCounts(torch.device("cuda", 0))
    with counts.prefill():
        pass
    assert counts.prefill_seconds == 0.24


def read_steps(run: Path) -> list[dict[str, float]]:
    """Performance metrics of every training step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


def test_every_step_of_a_run_on_two_processes_has_them(finished_on_two: Path) -> None:
    steps = read_steps(finished_on_two)
    assert len(steps) == 5
    for metrics in steps:
        for call in PPO_CALLS:
            assert metrics[f"perf/{call}/tokens_per_s"] > 0 and metrics[f"perf/{call}/seconds"] > 0
            assert call == "actor.generate" or 0 < metrics[f"perf/{call}/packing"] <= 1
        assert 0 < metrics["perf/actor.generate/decode_rows"] <= 1
        assert 0 <= metrics["perf/idle"] <= metrics["perf/idle_max"] < 1
        assert metrics["perf/idle"] == pytest.approx(
            (metrics["perf/idle/rank-0"] + metrics["perf/idle/rank-1"]) / 2, abs=1e-3
        )
        generated = metrics["perf/actor.generate/tokens_per_s"] * metrics["perf/actor.generate/seconds"]
        assert generated == pytest.approx(16 * metrics["actor.train/response_tokens"], rel=1e-3)


def test_tokens_hardly_depend_on_the_number_of_processes(
    finished: Mapping[str, Path], finished_on_two: Path
) -> None:
    for alone, together in zip(read_steps(finished["ppo"]), read_steps(finished_on_two), strict=True):
        for call in PPO_CALLS:
            counted = [m[f"perf/{call}/tokens_per_s"] * m[f"perf/{call}/seconds"] for m in (alone, together)]
            # Rows that begin alike are computed together only if they are neighbours on a rank.
            generates = call == "actor.generate"
            assert counted[0] == pytest.approx(counted[1], rel=1e-3 if generates else 0.05)


def test_that_mfu_is_left_out_is_said_once(finished_on_two: Path) -> None:
    said = read_notes(finished_on_two)
    assert sum("MFU and decode bandwidth are left out" in text for text in said) == 1
