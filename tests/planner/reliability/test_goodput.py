"""Plans under failures: what is written and read, how they are compared, and bounds."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.families.registry import model_tensors
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec, load_cluster
from realrl.planner.cluster.failures import Failures
from realrl.planner.reliability.goodput import (
    bound_expected_seconds,
    compute_expected_seconds,
    predict_goodput,
)
from realrl.planner.reliability.storage import count_saved_bytes, count_traffic
from realrl.planner.report.make import choose_cluster, make_report
from realrl.planner.report.report import Wanted
from realrl.planner.search.plan_search import UserConstraints, find_best_plan, find_plan
from realrl.planner.search.variants import Variants
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.candidate import count_bytes_alone
from realrl.program.lower import home_placements
from tests.nccl.programs import random_placement
from tests.planner.searching.test_plan_report import GRAPH, SHAPE, scenario

EFFORT = 5_000
RARE, OFTEN = Failures(per_device_day=419 / 54 / 16_384), Failures(per_device_day=20.0)
PARAMETERS = {
    role: sum(tensor.numel for tensor in model_tensors(SHAPE, "lm" if role == "actor" else "scalar"))
    for role in ("actor", "critic")
}
RECIPE = Path(__file__).parents[3] / "recipes/reference/ppo.yaml"


def failing(cluster: str, failures: Failures = OFTEN) -> Scenario:
    return replace(scenario(cluster), failures=failures)


def random_plan(of: Scenario, seed: int) -> Plan:
    """A plan of small meshes, which has all records it needs."""
    rng = random.Random(seed)
    return Plan(of.spec.cluster, {call.name: random_placement(of.spec.cluster, rng) for call in GRAPH.calls})


@pytest.mark.parametrize("seed", range(15))
def test_every_trained_parameter_is_written_once(seed: int) -> None:
    of = failing("h100:2x4")
    plan = random_plan(of, seed)
    traffic = count_traffic(of, home_placements(GRAPH, plan))
    # A parameter and two moments in float32; uneven shards count as the largest.
    least = 12 * sum(PARAMETERS.values())
    assert least <= traffic.written.sum() <= 1.35 * least
    assert count_saved_bytes(of) == pytest.approx(least, rel=1e-6)
    writers = {rank for name in ("actor.train", "critic.train") for rank in plan[name].ranks}
    assert {*np.flatnonzero(traffic.written)} == writers
    assert np.all(traffic.read >= traffic.written)


def test_nodes_write_side_by_side_and_the_slowest_counts(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    group = "{device: h100, nodes: 1, devices_per_node: 4, storage_gb_per_s: %s}"
    file.write_text(f"groups:\n- {group % 2}\n- {group % 0.5}\n")
    of = failing("h100:2x4").on(load_cluster(str(file)))
    traffic = count_traffic(of, {})
    written = np.array([4e9, 0, 0, 0, 1e9, 1e9, 0, 0])
    assert replace(traffic, written=written).write_seconds == pytest.approx(4.0)
    assert replace(traffic, written=written[::-1]).write_seconds == pytest.approx(8.0)


def test_a_checkpoint_is_waited_for_where_training_begins_before_it_is_written() -> None:
    of = failing("h100:1x4")
    estimate = estimate_plan(of, find_plan(of, effort=EFFORT).plan)
    first = min(call.start for name, call in estimate.calls.items() if name.endswith("train"))
    found = predict_goodput(of, estimate)
    waiting = predict_goodput(replace(of, failures=replace(OFTEN, asynchronous=False)), estimate)
    assert found is not None and waiting is not None
    assert found.of.stop == pytest.approx(max(0.0, found.of.write - first))
    assert waiting.of.stop == waiting.of.write > first
    assert waiting.step_seconds > found.step_seconds


def test_plans_without_failures_are_what_they_were() -> None:
    plain = make_report(scenario("h100:2x2"), effort=EFFORT)
    rare = make_report(failing("h100:2x2", Failures(per_device_day=1e-9)), effort=EFFORT)
    assert plain.goodput is None and plain.expected_gap == plain.gap
    assert rare.goodput is not None and rare.chosen.plan == plain.chosen.plan
    assert rare.goodput.step_seconds == pytest.approx(plain.chosen.step_seconds, rel=1e-3)
    assert rare.expected_gap == pytest.approx(plain.gap, abs=1e-3)


def test_goodput_falls_with_failures_and_with_known_restarts() -> None:
    estimate = estimate_plan(of := failing("h100:2x2"), random_plan(failing("h100:2x2"), 1))
    rates = [
        predict_goodput(replace(of, failures=Failures(per_device_day=r)), estimate) for r in (0.1, 1, 10)
    ]
    shares = [found.share for found in rates if found is not None]
    assert len(shares) == 3 and 1 > shares[0] > shares[1] > shares[2] > 0
    known = replace(of, failures=replace(OFTEN, restart_seconds=7200.0))
    assert compute_expected_seconds(known, estimate) > compute_expected_seconds(of, estimate)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("failures", [RARE, OFTEN, replace(OFTEN, restart_seconds=5.0)])
def test_no_plan_is_expected_to_be_faster_than_the_bound(seed: int, failures: Failures) -> None:
    of = failing("h100:2x4", failures)
    estimate = estimate_plan(of, random_plan(of, seed))
    assert bound_expected_seconds(of, estimate.step_seconds) <= compute_expected_seconds(of, estimate)


def test_plans_are_compared_by_the_expected_step() -> None:
    of = failing("h100:2x4")
    best = find_best_plan(of, effort=EFFORT)
    fitting = [e for e in best.presets.values() if isinstance(e, Estimate) and e.fits]
    others = [*fitting, *best.searched]
    assert compute_expected_seconds(of, best.fastest) == min(compute_expected_seconds(of, e) for e in others)
    report = make_report(of, effort=EFFORT)
    assert report.goodput is not None and report.expected_bound_seconds is not None
    assert report.expected_bound_seconds <= compute_expected_seconds(of, best.fastest)
    assert report.goodput.step_seconds == compute_expected_seconds(of, report.chosen)


def test_trained_roles_move_to_where_checkpoints_are_written_sooner() -> None:
    of = failing("h100:4x2", Failures(per_device_day=100.0))
    slow = [replace(group, storage_bytes_per_s=1e8) for group in of.spec.groups]
    of = of.on(ClusterSpec(of.spec.name, tuple(slow)))
    found = find_plan(of, effort=EFFORT)
    trains = found.problem.candidates["actor.train"]
    narrow = min(
        (i for i, one in enumerate(trains) if count_bytes_alone(one, is_home=True) < 60e9),
        key=lambda i: (trains[i].placement.mesh.size, trains[i].seconds),
    )
    chosen = {**found.result.assignment, "actor.train": narrow}
    before = compute_expected_seconds(of, estimate_plan(of, found.problem.plan(chosen)))
    variants, failures = Variants(found.problem), of.failures
    assert failures is not None
    better = found.problem.plan(variants.find_better_home(of, failures, chosen))
    assert better["actor.train"].mesh.size > trains[narrow].placement.mesh.size
    assert compute_expected_seconds(of, estimate_plan(of, better)) < before
    # The plan that was searched for is the best of its neighbours, or one of them is found.
    plan = found.problem.plan(variants.find_better_home(of, failures, found.result.assignment))
    searched = compute_expected_seconds(of, estimate_plan(of, found.plan))
    assert plan == found.plan or compute_expected_seconds(of, estimate_plan(of, plan)) < searched


def test_fewer_nodes_are_chosen_where_more_of_them_fail() -> None:
    calm = make_report(scenario("l40s:4x2"), nodes=(1, 2, 4), effort=EFFORT)
    stormy = failing("l40s:4x2", Failures(per_device_day=400.0, restart_seconds=60.0))
    report = make_report(stormy, nodes=(1, 2, 4), effort=EFFORT)
    assert report.scenario.spec.nodes < calm.scenario.spec.nodes
    by_nodes = {size.nodes: size for size in report.sizes}
    assert min(by_nodes, key=lambda nodes: by_nodes[nodes].step_seconds) == report.scenario.spec.nodes
    assert all(size.device_hours * 3600 > size.step_seconds for size in report.sizes)


def test_a_longest_step_counts_failures() -> None:
    stormy = failing("l40s:4x2", Failures(per_device_day=150.0, restart_seconds=60.0))
    best = min(
        make_report(stormy.on(stormy.spec.with_nodes(n)), effort=EFFORT).goodput.step_seconds  # type: ignore[union-attr]
        for n in (1, 2)
    )
    spec, rows = choose_cluster(stormy, Wanted(step_seconds=1.05 * best), UserConstraints(), effort=EFFORT)
    # All four nodes would not do, but fewer do.
    assert next(row for row in rows if row.nodes == 4).step_seconds > 1.05 * best
    assert spec.nodes < 4 and next(row for row in rows if row.nodes == spec.nodes).goodput is not None
    with pytest.raises(UserError, match="--target-step: no step of"):
        choose_cluster(stormy, Wanted(step_seconds=0.5 * best), UserConstraints(), effort=EFFORT)


def plan_command(*options: str) -> int:
    roles = [f"models.{role}.shape=llama-3.2-1b" for role in ("actor", "critic", "ref", "reward")]
    return run_app(["plan", str(RECIPE), *roles, "--cluster", "h100:1x4", "--effort", str(EFFORT), *options])


def test_the_command_says_what_failures_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert plan_command("--failures-per-day", "3", "--html", str(page)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "With 3 failures a day, one in 8 hours, the expected time of a step is" in said
    every = re.search(r"The best interval is checkpoint\.every=(\d+)", said)
    assert every is not None and every[0] in page.read_text()
    assert plan_command("--failures-per-day", "750/1000", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"]["per_day"] == pytest.approx(3)
    assert found["failures"]["checkpoint_every"] == int(every[1])
    assert found["failures"]["step_seconds"] > found["step_seconds"]
    assert sum(found["failures"]["restart"].values()) == pytest.approx(found["failures"]["restart_seconds"])
    assert plan_command("--json") == 0
    assert "failures" not in json.loads(capsys.readouterr().out)


def test_failures_without_progress_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command("--failures-per-day", "10000", "--restart-seconds", "99999") == 0
    assert "no step ever ends: a restart takes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--failures-per-day", "-1"],
            "--failures-per-day: '-1' is not a number above 0; write 3 for the whole",
        ),
        (["--failures-per-day", "0"], "is not a number above 0"),
        (["--failures-per-day", "3/100"], "or 0.47/1000 per 1,000 devices"),
        (["--failures-per-day", "inf"], "is not a number above 0"),
        (["--failures-per-day", "3", "--restart-seconds", "-1"], "--restart-seconds: -1 must be at least 0"),
        (["--restart-seconds", "60"], "give --failures-per-day too"),
    ],
)
def test_failures_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert plan_command(*options) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_storage_without_bandwidth_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("groups:\n- {device: h100, nodes: 1, devices_per_node: 4, storage_gb_per_s: 0}\n")
    with pytest.raises(UserError, match=r"group 1: storage_gb_per_s"):
        load_cluster(str(file))
