"""Choice of a cluster by a longest step or a budget."""

import json
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.planner.cluster.cluster_spec import ClusterSpec, load_cluster
from realrl.planner.report.make import choose_cluster, make_report
from realrl.planner.report.report import Wanted
from realrl.planner.search.plan_search import UserConstraints, find_plan
from realrl.planner.simulate.scenario import Scenario
from tests.planner.searching.test_plan_report import scenario

OFFERS = """
groups:
- {device: h100, nodes: 4, devices_per_node: 2, price_per_device_hour: 3}
- {device: l40s, nodes: 8, devices_per_node: 2, price_per_device_hour: 0.8}
"""
EFFORT = 5_000
ROOT = Path(__file__).parents[3]


@pytest.fixture
def offered(tmp_path: Path) -> Scenario:
    file = tmp_path / "offers.yaml"
    file.write_text(OFFERS)
    return scenario("h100:1x2").on(load_cluster(str(file)))


def step(of: Scenario, cluster: str) -> float:
    found = find_plan(of.on(ClusterSpec.parse(cluster)), effort=EFFORT)
    return found.result.evaluation.seconds


def test_the_cheapest_cluster_with_a_short_enough_step_is_found(offered: Scenario) -> None:
    longest = 1.01 * step(offered, "h100:2x2")
    spec, rows = choose_cluster(offered, Wanted(step_seconds=longest), UserConstraints(), effort=EFFORT)
    chosen = next(row for row in rows if row.cluster == spec.name)
    assert chosen.step_seconds <= longest
    for row in rows:
        assert row.step_seconds > longest or row.price_per_hour >= chosen.price_per_hour
    assert {row.kind for row in rows} == {"h100", "l40s"}
    for kind in ("h100", "l40s"):
        enough = [row.nodes for row in rows if row.kind == kind and row.step_seconds <= longest]
        if enough and min(enough) > 1:  # with a node less it takes longer, or was shown to
            assert any(row.nodes == min(enough) - 1 for row in rows if row.kind == kind)


def test_a_target_below_the_first_plan_found_is_searched_for(offered: Scenario) -> None:
    of = offered.on(ClusterSpec.parse("h100:2x2"))
    rough = find_plan(of, effort=EFFORT, tolerance=0.2).result
    best = find_plan(of, effort=EFFORT, tolerance=0.001).result
    assert best.lower_bound > 0.99 * best.evaluation.seconds
    assert rough.lower_bound < best.evaluation.seconds
    # The longest step that the best plan just reaches; simpler plans that take longer are not preferred to it.
    longest = best.evaluation.seconds * (1 + 1e-9)
    report = make_report(of, effort=EFFORT, wanted=Wanted(step_seconds=longest))
    assert (report.scenario.spec.nodes, report.chosen.step_seconds <= longest) == (2, True)


def test_a_budget_buys_the_fastest_cluster(offered: Scenario) -> None:
    spec, rows = choose_cluster(offered, Wanted(price_per_hour=13), UserConstraints(), effort=EFFORT)
    assert {(row.kind, row.nodes) for row in rows} == {("h100", 2), ("l40s", 8)}
    assert all(row.price_per_hour is not None and row.price_per_hour <= 13 for row in rows)
    assert spec.name == min(rows, key=lambda row: row.step_seconds).cluster
    _, rows = choose_cluster(offered, Wanted(price_per_hour=2), UserConstraints(), effort=EFFORT)
    assert [row.refused for row in rows if row.kind == "h100"] == ["costs 6 an hour"]


def test_what_no_cluster_can_do_is_said_with_what_is_nearest(offered: Scenario) -> None:
    with pytest.raises(
        UserError, match=r"--target-step: no step of 0.001 s: the fastest, on h100:4x2, takes"
    ):
        choose_cluster(offered, Wanted(step_seconds=1e-3), UserConstraints(), effort=EFFORT)
    with pytest.raises(
        UserError, match=r"--budget 1: no cluster will do: h100:1x2 costs 6 an hour; l40s:1x2 costs 1.6"
    ):
        choose_cluster(offered, Wanted(price_per_hour=1), UserConstraints(), effort=EFFORT)
    bare = offered.on(ClusterSpec.parse("h100:1x2+l40s:1x2"))
    with pytest.raises(UserError, match="has no prices; give price_per_device_hour"):
        choose_cluster(bare, Wanted(step_seconds=9), UserConstraints(), effort=EFFORT)
    twice = offered.on(ClusterSpec("two", (offered.spec.groups[0],) * 2))
    with pytest.raises(UserError, match="different kinds of devices"):
        choose_cluster(twice, Wanted(step_seconds=9), UserConstraints(), effort=EFFORT)


def test_the_chosen_cluster_is_planned_and_shown(offered: Scenario) -> None:
    alone = offered.on(ClusterSpec.parse("h100:4x2"))
    longest = 1.01 * step(alone, "h100:2x2")
    report = make_report(alone, wanted=Wanted(step_seconds=longest), effort=EFFORT)
    assert report.scenario.spec.name == "h100:2x2" and report.objective == "step"
    assert report.chosen.step_seconds <= longest
    assert [row.step_seconds for row in report.sizes if row.nodes == 2] == [report.chosen.step_seconds]


@pytest.mark.exhaustive
def test_the_command_chooses_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "offers.yaml"
    file.write_text(OFFERS)
    recipe = str(ROOT / "recipes/reference/ppo.yaml")
    roles = [f"models.{role}.shape=llama-3.2-1b" for role in ("actor", "critic", "ref", "reward")]
    plan = ["plan", recipe, *roles, "--cluster", str(file), "--effort", str(EFFORT)]
    page = tmp_path / "page.html"
    assert run_app([*plan, "--budget", "13", "--html", str(page)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "→ fastest within the budget, shown below" in said and "an hour" in said
    assert "The rest of this page shows the fastest within the budget" in page.read_text()
    assert run_app([*plan, "--target-step", "10min", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    chosen = next(row for row in found["nodes"] if row["cluster"] == found["cluster"]["name"])
    assert chosen["step_seconds"] <= 600
    assert chosen["price_per_hour"] == min(row["price_per_hour"] for row in found["nodes"] if row["fits"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--target-step", "soon"],
            "--target-step: 'soon' is not a time above 0; write seconds, 60s or 2min",
        ),
        (["--target-step", "0"], "is not a time above 0"),
        (["--budget", "0"], "--budget: 0 must be a price per hour above 0"),
        (["--budget", "inf"], "--budget: inf must be"),
        (["--budget", "5", "--target-step", "5"], "give only one of them"),
        (["--budget", "5", "--nodes", "1"], "give only one of them"),
        (["--budget", "5"], "has no prices"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    recipe = str(ROOT / "recipes/reference/ppo.yaml")
    assert run_app(["plan", recipe, "--cluster", "h100:1x2+l40s:1x2", *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
