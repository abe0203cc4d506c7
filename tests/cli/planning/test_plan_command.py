"""`realrl plan`: its output, its files and its error messages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.cli.app import run_app
from realrl.cli.planning.input import read_lengths
from realrl.config.errors import UserError
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.report import make
from realrl.planner.search.plan_search import FoundPlan, find_plan
from realrl.planner.search.shortage import DoesNotFit, Shortage
from realrl.planner.simulate.scenario import Scenario

ROOT = Path(__file__).parents[3]
REFERENCE = str(ROOT / "recipes" / "reference" / "ppo.yaml")
SMALL = (
    "models.actor.shape=qwen2.5-0.5b",
    "models.reward.shape=qwen2.5-0.5b",
    "data.batch=32",
    "ppo.minibatches=2",
)
QUICK = ("--effort", "30000")
KEYS = {
    "plan",
    "step_seconds",
    "repeated_seconds",
    "fits",
    "peak_bytes",
    "tokens_per_second",
    "utilisation",
    "mfu",
    "calls",
    "reallocations",
    "memory",
}
SEARCHED = {
    "lower_bound_seconds",
    "gap",
    "search_seconds",
    "evaluations",
    "interval",
    "contenders",
    "presets",
    "alternatives",
    "cluster",
    "workload",
}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed."""
    assert run_app(["plan", REFERENCE, *SMALL, *QUICK, *arguments]) == 0
    return capsys.readouterr().out


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object that is printed."""
    found = json.loads(plan(capsys, "--effort", "10000", *arguments, "--json"))
    assert isinstance(found, dict)
    return found


def priced(folder: Path, *prices: float) -> str:
    """A cluster file of groups of nodes with these prices."""
    groups = [
        f"- {{device: a100-40g, nodes: 2, devices_per_node: 2, price_per_device_hour: {price}}}\n"
        for price in prices
    ]
    (folder / "cluster.yaml").write_text("groups:\n" + "".join(groups))
    return str(folder / "cluster.yaml")


def test_json_output_is_one_object_with_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--cluster", "a100-40g:1x4")
    assert found.keys() >= KEYS | SEARCHED
    assert found["lower_bound_seconds"] <= found["step_seconds"] and found["fits"]
    low, high = found["interval"]
    assert low < found["step_seconds"] < high and found["level"] == 0.9
    # A preset may be the chosen plan.
    distinct = {json.dumps(other["plan"]): other["fastest"] for other in found["contenders"]}
    assert sum(distinct.values()) == pytest.approx(1.0)
    call = found["calls"]["actor.train"]
    assert call["dp"] * call["tp"] * call["pp"] <= 4
    assert sum(call["terms"].values()) == pytest.approx(call["seconds"])
    assert found["presets"]["heuristic"].keys() >= KEYS


def test_the_plan_that_is_written_is_the_one_that_was_printed_and_can_be_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "made" / "plan.yaml"
    found = planned(capsys, "--cluster", "a100-40g:1x4", "--out", str(file))
    loaded = Plan.load(file, train_graph(minibatches=1))
    assert {name: str(place.mesh) for name, place in loaded.placements.items()} == {
        name: call["mesh"] for name, call in found["calls"].items()
    }
    assert run_app(["show", REFERENCE, *SMALL, "cluster=1x4", "--plan", str(file)]) == 0


def test_page_and_timeline_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    plan(capsys, "--cluster", "a100-40g:1x2", "--html", str(page), "--trace", str(trace))
    assert "</html>" in page.read_text()
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("actor.train" in name for name in names)


def test_tables_fit_a_hundred_columns_and_need_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--cluster", "a100-40g:2x2", "--nodes", "1,2")
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    for words in ("One step takes", "90 %:", "proven", "actor.generate", "Compared with", "Not chosen", "█"):
        assert words in out


def test_asynchronous_plans_are_compared_and_the_fastest_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({"answers": [10 + i**4 // 19000 for i in range(46)]}))  # up to 225 tokens
    options = ("data.batch=256", "--cluster", "a100-40g:1x4", "--lengths", str(lengths), "--staleness", "2")
    found = planned(capsys, *options)
    rows = found["staleness"]
    assert [tuple(row["asynchrony"].values()) for row in rows] == [
        (0, False, True, 1),
        (1, False, True, 1),
        (1, True, False, 1),
        (2, False, True, 1),
        (2, True, True, 1),
        (2, True, False, 1),
    ]
    seconds = [row["step_seconds"] for row in rows]
    # Every synchronous plan is also a plan of whole answers, and long answers are rare.
    assert max(seconds[1], seconds[3]) <= seconds[0] * (1 + 1e-9) and min(seconds) < 0.9 * seconds[0]
    assert found["step_seconds"] <= min(seconds) * 1.01 and found["step_seconds"] in seconds
    out = plan(capsys, *options)
    assert "it needs asynchrony.staleness=" in out and max(map(len, out.splitlines())) <= 100


def test_settings_that_do_not_fit_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(scenario: Scenario, **options: Any) -> FoundPlan:
        if scenario.graph.ahead == 1:
            raise misfit
        return find_plan(scenario, **options)

    place = Placement(Mesh(0, 1), Strategy(dp=1))
    misfit = DoesNotFit(
        Shortage(
            rank=0,
            limit_bytes=1 << 30,
            needed_bytes=2 << 30,
            call="actor.train",
            placement=place,
            resident_bytes={"actor": 1 << 30},
        )
    )
    monkeypatch.setattr(make, "find_plan", find)
    options = ("data.batch=256", "--cluster", "a100-40g:1x4", "--staleness", "1")
    rows = planned(capsys, *options)["staleness"]
    assert [row.get("step_seconds") is None for row in rows] == [False, True, True]
    assert "no plan: " in plan(capsys, *options)


def test_portions_are_compared_if_the_algorithm_can_train_on_them(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "a100-40g:1x4", "--effort", "1000", "--staleness", "1", "--json"]
    model = ["models.actor.path=null", "models.actor.shape=qwen2.5-0.5b"]
    recipe = str(ROOT / "recipes" / "grpo.yaml")
    for minibatches in (1, 4):
        given = ["plan", recipe, *model, f"policy.minibatches={minibatches}", *options]
        assert run_app(given) == 0
        printed = capsys.readouterr()
        rows = [row["asynchrony"] for row in json.loads(printed.out)["staleness"]]
        assert [row["portions"] for row in rows][:2] == ([1, 8] if minibatches == 1 else [1, 1])
        assert ("actor.train makes 4 optimizer steps" in printed.err) is (minibatches == 4)


def test_other_comparisons_exclude_asynchronous_ones(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cluster", "a100-40g:2x2", "--nodes", "1,2", "--staleness", "1"]
    assert run_app(["plan", REFERENCE, *SMALL, *arguments]) == 2
    assert "--staleness compares plans for the whole cluster; leave out --nodes" in capsys.readouterr().err


def test_planning_without_a_cluster_is_for_this_machine_and_noted(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "cluster=1x2", "device_memory=40GiB")
    assert found["cluster"]["groups"][0]["device"] == "cpu" and found["cluster"]["devices"] == 2
    assert (
        "without --cluster, this plan is for CPU processes" in found["source"]
        and "cpu:1x2" in found["source"]
    )


def test_plans_for_several_numbers_of_nodes_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--cluster", "a100-40g:1x2", "--nodes", "1, 2,4")
    assert [size["nodes"] for size in found["nodes"]] == [1, 2, 4]
    steps = [size["step_seconds"] for size in found["nodes"]]
    assert steps == sorted(steps, reverse=True)
    assert found["plan"]["cluster"] == "4x2" and found["step_seconds"] == steps[-1]


def test_a_too_small_number_of_nodes_shows_its_shortfall(capsys: pytest.CaptureFixture[str]) -> None:
    large = ("models.actor.shape=llama-2-13b", "--cluster", "a100-40g:1x4", "--nodes", "1,4")
    found = planned(capsys, *large)
    assert [size["fits"] for size in found["nodes"]] == [False, True]
    assert "GiB of 38." in found["nodes"][0]["refused"]


def test_the_objective_cost_takes_as_many_nodes_as_are_cheapest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = planned(capsys, "--cluster", priced(tmp_path, 1.0, 9.0), "--objective", "cost")
    prices = {size["nodes"]: size["price"] for size in found["nodes"]}
    assert list(prices) == [1, 2, 3, 4]
    assert int(found["plan"]["cluster"][0]) == min(prices, key=lambda nodes: prices[nodes]) <= 2


def test_a_plan_file_of_ones_own_is_compared_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    found = planned(capsys, "--cluster", "a100-40g:1x4", "--out", str(file))
    again = planned(capsys, f"plan={file}", "--cluster", "a100-40g:1x4")
    assert again["presets"][str(file)]["step_seconds"] == pytest.approx(found["step_seconds"])
    assert again["step_seconds"] <= found["step_seconds"] * (1 + 1e-9)
    elsewhere = planned(capsys, f"plan={file}", "--cluster", "a100-40g:1x2")
    assert "it is for cluster 1x4; this is 1x2" in elsewhere["presets"][str(file)]["refused"]
    file.write_text("cluster: 1x4\ncals: {}\n")
    file.unlink()
    written = planned(capsys, f"plan={file}", "--cluster", "a100-40g:1x4", "--out", str(file))
    assert file.exists() and str(file) not in written["presets"]


def test_a_plan_that_offloads_is_refused_where_that_frees_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    names = [call.name for call in train_graph(minibatches=2).calls]
    entries = "".join(f"  {name}: {{mesh: 0-3, dp: 4, micro_batch_tokens: 1024}}\n" for name in names)
    file.write_text(f"cluster: 1x4\ncalls:\n{entries}offload: [ref]\n")
    found = planned(capsys, f"plan={file}", "--cluster", "cpu:1x4")
    assert "it offloads, which frees nothing" in found["presets"][str(file)]["refused"]
    found = planned(capsys, f"plan={file}", "--cluster", "a100-40g:1x4")
    assert found["presets"][str(file)]["fits"]


def test_device_memory_of_the_recipe_counts_on_any_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "device_memory=24GiB", "--cluster", "a100-80g:1x4")
    assert found["cluster"]["groups"][0]["memory_bytes"] == 24 * 2**30


def test_device_hours_stand_in_for_prices(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--cluster", "a100-40g:2x2", "--objective", "cost")
    hours = {size["nodes"]: size["device_hours"] for size in found["nodes"]}
    assert all(size["price"] is None for size in found["nodes"])
    assert found["cluster"]["devices"] == 2 * min(hours, key=lambda nodes: hours[nodes])


@pytest.mark.parametrize("in_a_run", [True, False])
def test_measured_lengths_replace_the_longest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, in_a_run: bool
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"prompts": [10, 20, 30], "answers": [1, 100]}))
    found = planned(capsys, "--cluster", "a100-40g:1x2", "--lengths", str(tmp_path if in_a_run else file))
    assert found["workload"]["prompts"] == {"mean": 20, "least": 10, "most": 30}
    assert found["workload"]["answers"]["most"] == 100


def test_the_times_of_an_environment_change_the_prediction(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    game = tmp_path / "game.py"
    game.write_text("class Game: ...")
    settings = (f"environment={game}:Game", "generation.min_new_tokens=0")
    with_environment = ("--cluster", "a100-40g:1x2", *settings)
    alone = planned(capsys, *with_environment)
    assert "environment counts as 0 s" in alone["source"] and "environment" not in alone["workload"]
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"environment": {"seconds": [1.5, 2.5], "turns": [3], "given": [20]}}))
    found = planned(capsys, *with_environment, "--lengths", str(file))
    assert "environment counts" not in found["source"]
    assert found["workload"]["environment"]["seconds"] == {"mean": 2.0, "least": 1.5, "most": 2.5}
    assert found["step_seconds"] > alone["step_seconds"] + 5


def test_the_times_of_an_environment_need_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"environment": {"seconds": [1], "turns": [3], "given": [20]}}))
    assert run_app(["plan", REFERENCE, *SMALL, *QUICK, "--lengths", str(file)]) == 2
    assert "the recipe has none" in capsys.readouterr().err


def test_a_profile_of_another_device_is_noted_as_unused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    from realrl.planner.profile.profile import Profile

    Profile(device="h100", software={}).save(file)
    found = planned(capsys, "--cluster", "a100-40g:1x2", "--profile", str(file))
    assert "is of h100, so it was not used" in found["source"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cluster", "h100:1x8+l40s:1x8", "--nodes", "4"], "has 2 nodes that differ"),
        (["--lengths", "."], "lengths.json: no such file"),
        (
            ["models.actor.shape=null", "models.actor.path=./gone"],
            "models.actor: planning needs the size of the model: ./gone: no such model directory",
        ),
        (
            ["models.actor.shape=null", "models.actor.path=mixtral-8x7b"],
            "models.actor.path=null and models.actor.shape to a size, for example mixtral-8x7b",
        ),
        (["--cluster", "rtx-4090:1x2", "models.actor.shape=llama-2-7b"], "no plan fits llama-2-7b"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: 1 / 0)  # no network
    assert run_app(["plan", REFERENCE, *SMALL, *QUICK, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("realrl: ") and captured.err.count("\n") == 1
    assert sentence in captured.err


def test_a_plan_that_does_not_fit_is_reported_for_the_given_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = ("models.actor.shape=llama-2-13b", "--cluster", "a100-40g:4x4", "--nodes", "1")
    assert run_app(["plan", REFERENCE, *SMALL, *QUICK, *large]) == 2
    assert "on a100-40g:1x4, even with" in capsys.readouterr().err


def test_devices_without_memory_to_use_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("groups:\n- {device: {like: h100, memory: 1GiB}, nodes: 1, devices_per_node: 8}\n")
    assert run_app(["plan", REFERENCE, *SMALL, *QUICK, "--cluster", str(file)]) == 2
    assert "h100: 1.00 GiB is less than drivers" in capsys.readouterr().err


def test_answers_are_not_longer_than_generation_lets_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"answers": [5, 5000]}))
    found = planned(capsys, "--cluster", "a100-40g:1x2", "--lengths", str(file))
    assert found["workload"]["answers"]["most"] == 128


@pytest.mark.parametrize("content", ['{"prompts": [0]}', '{"prompts": [129]}', '{"answers": [0, 5]}'])
def test_lengths_that_the_recipe_cannot_have_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (tmp_path / "lengths.json").write_text(content)
    assert run_app(["plan", REFERENCE, *SMALL, *QUICK, "--lengths", str(tmp_path)]) == 2
    assert "--lengths: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        '{"prompts": 3}',
        '{"prompts": [1.5]}',
        '{"answers": [-1]}',
        '{"length": []}',
        "{",
        '{"environment": 3}',
        '{"environment": {"seconds": [1]}}',
        '{"environment": {"seconds": [-1], "turns": [2], "given": [3]}}',
        '{"environment": {"seconds": [1], "turns": [0], "given": [3]}}',
        '{"environment": {"seconds": [], "turns": [2], "given": [3]}}',
        '{"prompts": [1], "longest": 4}',
        '{"answers": [1], "longest": "4"}',
    ],
)
def test_lengths_of_another_form_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "lengths.json").write_text(content)
    with pytest.raises(UserError, match="lengths"):
        read_lengths(str(tmp_path))


def test_planning_loads_no_torch() -> None:
    script = (
        "import sys; from realrl.cli.app import run_app; "
        f"status = run_app(['plan', {REFERENCE!r}, *{SMALL!r}, *{QUICK!r}, '--cluster', 'cpu:1x4']); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=ROOT).returncode == 0
