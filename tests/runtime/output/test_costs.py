"""What a run says of its own costs: what is measured, and what becomes of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from realrl.cli.app import run_app
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.profile import Profile
from realrl.planner.report.calibrate import calibrate_profile
from realrl.planner.report.comparison import Comparison
from realrl.program.instructions import Load, Run
from realrl.program.memory import Memory
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.costs import lengths
from realrl.runtime.measure.step_timer import (
    Allocations,
    StepTimer,
    StepTimes,
    TimedSpan,
    count_allocations,
    estimate_offset,
)
from realrl.runtime.measure.timing_log import KEPT_STEPS, TimingLog
from realrl.runtime.observer import MetricsRecord
from realrl.runtime.train import train
from realrl.runtime.worker.store import Store
from realrl.testing.ranks import Silent
from tests.conftest import World
from tests.runtime.conftest import changes, run

CPU = torch.device("cpu")
PLACE = Placement(Mesh(0, 1), Strategy())
KIB = 1024


def kib(number: int) -> torch.Tensor:
    return torch.empty(number * KIB, dtype=torch.uint8)


def test_allocations_are_counted_exactly_at_their_peak() -> None:
    before = kib(500)
    with count_allocations() as found:
        a, b = kib(10), kib(20)
        del a, before
        c = kib(15)
        view = b[:KIB]
        del b
        d = kib(4)
        del c, d, view
    assert found.peak == 39 * KIB


def test_folding_allocations_does_not_change_the_peak() -> None:
    with count_allocations() as found:
        a = kib(10)
        found.fold()
        b = kib(20)
        del a
        found.fold()
        assert found.peak == 30 * KIB
        c = kib(11)
    assert found.peak == 31 * KIB and len(b) + len(c) == 31 * KIB


def test_a_reused_address_counts_as_released() -> None:
    found = Allocations()
    for address, size in ((100, 50), (200, 30), (230, 20), (400, 7), (140, 80), (230, -20), (230, -20)):
        found.count(address, size)
    # The fifth block lies where the first two did; the third and the fourth are still there.
    assert found.peak == 80 + 20 + 7
    found.count(500, 20)
    assert found.peak == 107
    found.count(520, 1)
    assert found.peak == 108


def test_allocations_of_the_backward_pass_count() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    with count_allocations() as found:
        loss = (weight * weight).sum()
        forward = found
        loss.backward()
    # The product goes before the backward pass, the sum stays, and so does the gradient.
    assert forward.peak >= 4 * KIB + 4 and weight.grad is not None


def measured(*sizes: int) -> list[TimedSpan]:
    """Spans of calls that hold so many KiB of parameters, and need the double of it on top."""
    held = 0
    timer = StepTimer(CPU, held=lambda: held, staged=lambda: 7)
    with timer.step():
        for size in sizes:
            held = size * KIB
            with timer.instruction(Run("actor.train", "actor", PLACE)):
                needed = kib(2 * size)
                timer.fold_allocations()
                del needed
    (step,) = timer.take()
    return list(step.spans)


def test_memory_of_a_call_is_buffers_held_plus_allocations() -> None:
    assert [span.bytes for span in measured(5, 3)] == [15 * KIB, 9 * KIB]


def test_memory_moved_before_a_call_counts_to_the_call() -> None:
    held = 100
    timer = StepTimer(CPU, held=lambda: held, staged=lambda: 0)
    with timer.step():
        with timer.instruction(Load("actor", PLACE, "parameters")):
            held = 900
        held = 200
        for _ in range(2):
            with timer.instruction(Run("actor.train", "actor", PLACE)):
                pass
    assert [span.bytes for span in timer.take()[0].spans] == [900, 200]


def test_clocks_are_compared_by_when_messages_are_exchanged() -> None:
    ahead, came, their_came = 1000.0, [1.0, 2.0, 3.0], [1.2, 1.9, 3.5]
    met = [max(pair) for pair in zip(came, their_came, strict=True)]
    went, their_went = [t + 0.01 for t in met], [t + 0.02 for t in met]
    shifted = ([t + ahead for t in their_came], [t + ahead for t in their_went])
    assert estimate_offset(came, went, *shifted) == pytest.approx(ahead, abs=0.02)


def test_waiting_for_others_is_no_part_of_a_call() -> None:
    log = TimingLog()
    early = StepTimes(0.0, 9.0, (TimedSpan("actor.train", 1.0, 8.0, 50), TimedSpan("move", 8.0, 8.5)))
    late = StepTimes(
        102.0, 110.0, (TimedSpan("move", 108.0, 109.5), TimedSpan("actor.train", 106.0, 108.5, 70))
    )
    log.add([early, late], [0.0, 100.0])
    assert log.spans["actor.train"].seconds == [2.5] and log.spans["actor.train"].bytes == 70
    assert log.spans["move"].seconds == [1.5] and log.step.seconds == [10.0]


def test_a_reallocation_that_is_done_twice_counts_twice() -> None:
    log = TimingLog()
    spans = (TimedSpan("move", 1.0, 2.0), TimedSpan("move", 5.0, 7.0))
    log.add([StepTimes(0.0, 9.0, spans)], [0.0])
    assert log.spans["move"].seconds == [3.0]


def test_step_times_start_at_the_end_of_the_step_before_and_skip_the_first() -> None:
    log = TimingLog()
    times = [(0.0, 9.0), (8.0, 12.0), (12.0, 15.5), (20.0, 22.0)]
    for start, end in times:
        log.add([StepTimes(start, end, ())], [0.0])
    assert log.step.seconds == [9.0, 3.0, 3.5, 2.0]
    assert log.step.counted == [3.0, 3.5, 2.0]


def test_long_runs_keep_their_last_step_times() -> None:
    log = TimingLog()
    count = KEPT_STEPS + 5
    for n in range(count):
        log.add([StepTimes(2.0 * n, 2.0 * n + 1, (TimedSpan("move", n, n + 0.5),))], [0.0])
    for times in (log.step, log.spans["move"]):
        assert len(times.seconds) == KEPT_STEPS and len(times.counted) == KEPT_STEPS - 1


def check(costs: Comparison, run_dir: Path) -> None:
    """Every call has figures, and memory holds at least what lies there."""
    experiment = load_experiment(str(run_dir / "config.yaml"))
    assert [of.call for of in costs.calls] == list(build_graph(experiment).order)
    homes = {of.call.role: Placement.parse(of.placement) for of in costs.calls}
    resting = sum(Memory(costs.models, homes, (), {}).at_rest(0).values())
    for of in costs.calls:
        assert 0 < of.seconds.least <= of.seconds.median <= of.seconds.most < costs.step.most * 2
        assert of.seconds.steps == 4
        assert of.predicted_seconds == pytest.approx(sum(of.terms.values()))
        assert of.bytes is not None and of.predicted_bytes is not None
        assert of.bytes > resting and of.predicted_bytes > resting
        assert of.bytes == pytest.approx(of.predicted_bytes, rel=0.3)
    assert sum(of.seconds.median for of in costs.calls) < costs.step.most
    assert costs.predicted_step_seconds is not None and costs.reserved_bytes is None


@pytest.mark.parametrize("algorithm", ["sft", "reward", "ppo"])
def test_a_run_leaves_the_costs_of_every_call(finished: Mapping[str, Path], algorithm: str) -> None:
    check(Comparison.load(finished[algorithm]), finished[algorithm])


def test_a_run_on_two_processes_leaves_the_costs_of_every_call(finished_on_two: Path) -> None:
    check(Comparison.load(finished_on_two), finished_on_two)


def test_lengths_are_those_of_sequences_to_learn_where_nothing_is_generated() -> None:
    keys = [Key("question", "int64"), Key("tokens", "int64")]
    look = Call("ref.look", "ref", Kind.INFERENCE, ("question",), work=("question",))
    learn = Call("actor.learn", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))
    graph = DataflowGraph([look, learn], keys)
    assert graph.order[0] is look
    store = SimpleNamespace(graph=graph, lengths={"question": [1, 2], "tokens": [5, 6]})
    assert lengths(cast(Store, store)) == ([5, 6], [])


def test_costs_hold_the_lengths_that_occurred(finished: Mapping[str, Path], finished_on_two: Path) -> None:
    found = {name: json.loads((path / "lengths.json").read_text()) for name, path in finished.items()}
    assert all(len(lengths["prompts"]) == 64 for lengths in found.values())
    assert max(found["ppo"]["answers"]) == 12 and min(found["ppo"]["answers"]) >= 1
    assert max(found["ppo"]["prompts"]) < min(max(found[name]["prompts"]) for name in ("sft", "reward"))
    assert json.loads((finished_on_two / "lengths.json").read_text()) == found["ppo"]


def test_costs_include_measured_reallocations(world: World, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    others = ("reward.inference", "ref.inference", "critic.inference", "critic.train")
    calls = dict.fromkeys(others, "dp: 2") | {"actor.generate": "dp: 1, tp: 2", "actor.train": "dp: 1, pp: 2"}
    lines = [f"  {name}: {{mesh: 0-1, {degrees}}}" for name, degrees in calls.items()]
    plan.write_text("\n".join(["cluster: 1x2", "calls:", *lines]))
    costs = Comparison.load(run(world, "ppo", tmp_path, cluster="1x2", plan=str(plan), training__steps=2))
    (move,) = costs.reallocations
    assert move.instruction.startswith("reallocate actor: d1 t1 p2 @0-1")
    assert move.seconds.median > 0 and move.predicted_seconds is not None and move.predicted_seconds > 0


def test_costs_are_there_before_the_run_ends(world: World, tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    class Looking(Silent):
        def record(self, record: MetricsRecord) -> None:  # type: ignore[override]
            if record.kind == "eval":
                seen.append((record.step, (tmp_path / "run" / "costs.json").exists()))

    train(load_experiment(str(world.recipe("sft", tmp_path, **changes(world, "sft", tmp_path)))), Looking())
    assert seen == [(0, False), (2, True), (4, True), (5, True)]


def test_comparisons_are_rare_enough_to_cost_little(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.runtime.costs._REST", 1e9)
    seen: list[tuple[int, int]] = []

    class Looking(Silent):
        def record(self, record: MetricsRecord) -> None:  # type: ignore[override]
            if record.kind == "eval" and record.step > 0:
                seen.append((record.step, Comparison.load(tmp_path / "run").step.steps))

    train(load_experiment(str(world.recipe("sft", tmp_path, **changes(world, "sft", tmp_path)))), Looking())
    assert seen == [(2, 1), (4, 1), (5, 1)]
    assert Comparison.load(tmp_path / "run").step.steps == 4


def test_a_prediction_that_fails_costs_no_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("nothing by nothing")

    monkeypatch.setattr("realrl.runtime.measure.compare.estimate_plan", fail)
    costs = Comparison.load(run(world, "sft", tmp_path))
    assert costs.predicted_step_seconds is None and costs.step.steps == 4
    error = capsys.readouterr().err
    assert error.count("steps are compared without a prediction: ZeroDivisionError: nothing by nothing") == 1


def test_a_run_calibrates_the_prediction_of_its_own_calls(finished: Mapping[str, Path]) -> None:
    costs = Comparison.load(finished["ppo"])
    assert costs.spec is not None
    model = CostModel(costs.spec, calibrate_profile(None, costs))
    for of in costs.calls:
        place = Placement.parse(of.placement)
        found = model.call(of.call, costs.models[of.call.role], place, costs.workload)
        assert found.seconds == pytest.approx(of.seconds.median)


def test_a_missing_profile_is_noted(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = world.recipe("sft", tmp_path, profile=str(tmp_path / "none.json"))
    assert run_app(["train", str(recipe)]) == 2
    assert "none.json: no such file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_prediction_from_data_sheets_is_noted_once(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(world, "sft", tmp_path, training__steps=2)
    said, first = capsys.readouterr().err, "on a CPU without a profile, predicted times are rough"
    assert said.count(first) == 1 and said.index(first) < said.index("step ")


def test_a_profile_of_other_devices_is_noted_as_unused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Profile(device="h100", software={}).save(tmp_path / "p.json")
    run(world, "sft", tmp_path, profile=str(tmp_path / "p.json"), training__steps=1)
    assert "p.json is of h100, so it was not used" in capsys.readouterr().err


def test_a_calibrated_profile_predicts_the_run(
    world: World, tmp_path: Path, finished: Mapping[str, Path]
) -> None:
    before = Comparison.load(finished["sft"])
    calibrate_profile(None, before).save(tmp_path / "profile.json")
    costs = Comparison.load(run(world, "sft", tmp_path, profile=str(tmp_path / "profile.json")))
    assert costs.calls[0].predicted_seconds == pytest.approx(before.calls[0].seconds.median)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_is_read_from_the_allocator() -> None:
    device = torch.device("cuda", 0)
    timer = StepTimer(device, held=lambda: 0, staged=lambda: KIB)
    before = torch.cuda.memory_allocated(device)
    with timer.step():
        for size in (8, 2):
            with timer.instruction(Run("actor.train", "actor", PLACE)):
                torch.empty(size << 20, dtype=torch.uint8, device=device)
    found = [span.bytes for span in timer.take()[0].spans]
    assert found == [before + (size << 20) - KIB for size in (8, 2)]
    assert timer.reserved >= before + (8 << 20)
