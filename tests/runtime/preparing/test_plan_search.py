"""`plan: search`: found once, kept, and the same on all ranks."""

import re
from collections.abc import Callable
from dataclasses import fields, make_dataclass, replace
from pathlib import Path

import pytest

from realrl.algorithms.sft import train_graph as sft_graph
from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.config.user_code import UserCode
from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.failures import Failures
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.report.comparison import Comparison
from realrl.planner.search.plan_search import UserConstraints, find_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace
from realrl.planner.workload.strategies import Strategies
from realrl.program.memory import Memory
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.devices import search_spec
from realrl.runtime.prepare.fit import search as fit_search
from realrl.runtime.prepare.fit.plan_cache import (
    cached_plan,
    make_fingerprint,
    make_plan_key,
    plans_directory,
    read_sources,
)
from realrl.runtime.prepare.gpu import Gpu
from realrl.runtime.prepare.job import make_written_plan, open_models
from realrl.runtime.prepare.scenarios import make_scenario
from realrl.testing.compare import compare_runs
from tests.conftest import World, keep_full_precision, read_metrics, thin
from tests.runtime.conftest import Command
from tests.runtime.learning.test_plans import OPTIMIZER
from tests.runtime.processes import end, start


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_full_precision()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The effort allowed to each search so far, all of which are cut short."""
    found: list[float] = []
    search = fit_search.find_best_plan

    def counted(*args: object, effort: float, **more: object) -> object:
        found.append(effort)
        return search(*args, effort=10_000, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(fit_search, "find_best_plan", counted)
    return found


def recipe(world: World, directory: Path, **changes: object) -> Experiment:
    """A recipe of two CPU processes that leaves the plan to a search."""
    more = {"cluster": "1x2", "plan": "search", **changes}
    return load_experiment(str(world.recipe("ppo", directory, **more)))


def planned(experiment: Experiment) -> tuple[Plan, str]:
    """A recipe's plan, and what was said about it."""
    said: list[str] = []
    spec = search_spec(experiment, Cluster(1, 2), "cpu")
    return cached_plan(experiment, spec, said.append), "\n".join(said)


def test_two_processes_run_the_searched_plan_and_reuse_it(
    realrl: Command, world: World, tmp_path: Path
) -> None:
    more = {"cluster": "1x2", "plan": "search", "overwrite": True, "training__steps": 2}
    file = str(world.recipe("sft", tmp_path, **more))
    status, first = realrl("train", file)
    assert status == 0, first
    sentence = (
        r"plan: [\d.]+ s a step predicted, proven (within [\d.]+ % of|to be) the best by these times,"
        r" searched in [\d.]+ s; kept"
    )
    assert re.search(sentence, first)
    (kept,) = plans_directory().glob("*")
    assert f"kept in {kept}" in first
    # All ranks executed the one that was kept.
    graph = build_graph(load_experiment(file))
    used = Plan.load(tmp_path / "run" / "plan.yaml", graph)
    assert used == Plan.load(kept, graph)
    losses = read_metrics(tmp_path / "run")
    status, second = realrl("train", file)
    assert status == 0, second
    assert f"found earlier, kept in {kept}" in second
    assert first.count("s a step predicted") == second.count("s a step predicted") == 1
    assert (
        Plan.load(tmp_path / "run" / "plan.yaml", graph) == used and read_metrics(tmp_path / "run") == losses
    )


def test_under_torchrun_one_rank_searches_for_all(world: World, tmp_path: Path) -> None:
    file = str(world.recipe("sft", tmp_path, plan="search", cluster="auto", training__steps=1))
    arguments = ("--standalone", "--nproc-per-node", "2", "-m", "realrl", "train", file)
    status, error = end(start(*arguments, module="torch.distributed.run"))
    assert status == 0, error
    assert error.count("s a step predicted") == 1
    (kept,) = plans_directory().glob("*")
    graph = build_graph(load_experiment(file))
    assert Plan.load(tmp_path / "run" / "plan.yaml", graph) == Plan.load(kept, graph)


def test_under_torchrun_a_search_replaces_a_plan_file_for_nodes_that_have_gone(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    searches: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "plan.yaml"
    two = world.recipe("sft", tmp_path, cluster="1x2")
    loaded = load_experiment(str(two))
    make_written_plan(loaded, Cluster(1, 2), open_models(loaded)).save(file, build_graph(loaded))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    given = ["train", str(world.recipe("sft", tmp_path, cluster="auto", plan=str(file)))]
    assert run_app([*given, "training.steps=1"]) == 2
    assert "is for cluster 1x2; this run has 1x1" in capsys.readouterr().err, "a run that begins"
    assert run_app([*given, "training.steps=1", "plan=symmetric"]) == 0
    assert run_app([*given, "training.steps=2", "launch.shrink=false"]) == 2
    capsys.readouterr()
    assert run_app([*given, "training.steps=2"]) == 0
    said = capsys.readouterr().err
    assert f"{file} is for other devices; a plan is searched for cluster=1x1" in " ".join(said.split())
    assert len(read_metrics(tmp_path / "run")) >= 2 and searches


def test_two_processes_run_a_plan_found_under_zero_3_in_the_memory_that_is_predicted(
    realrl: Command, world: World, tmp_path: Path
) -> None:
    changes = {f"models__{role}__optimizer": OPTIMIZER for role in ("actor", "critic")} | {
        "training__steps": 2
    }
    whole, found = tmp_path / "whole", tmp_path / "found"
    for directory in (whole, found):
        directory.mkdir()
    scenario = make_scenario(recipe(world, found), search_spec(recipe(world, found), Cluster(1, 2), "cpu"))
    constraints = UserConstraints(search_space=SearchSpace(zero=(3,)))
    plan = find_plan(scenario, effort=10_000, constraints=constraints, presets={}).plan
    homes = {role: plan[f"{role}.train"] for role in ("actor", "critic")}
    assert all(home.strategy.zero == 3 for home in homes.values())
    plan.save(found / "plan.yaml", scenario.graph)
    file = world.recipe("ppo", found, cluster="1x2", plan=str(found / "plan.yaml"), **changes)
    status, screen = realrl("train", str(file))
    assert status == 0, screen
    assert run_app(["train", str(world.recipe("ppo", whole, **changes))]) == 0
    compare_runs(found / "run", whole / "run", name="found", than="in one process", tolerance=1e-4)
    costs = Comparison.load(found / "run")
    for role, home in homes.items():
        model = scenario.models[role]
        # As the engine allocates them: tests/engine/test_memory_estimate.py.
        held = [sum(Memory({role: model}, {role: home}, (), {}).at_rest(rank).values()) for rank in range(2)]
        freed, _ = scenario.memory.states(model, Strategies.of([home.strategy]))
        assert max(held) == scenario.memory.parameters(model, home) + freed
    for call in costs.calls:
        assert call.bytes == pytest.approx(call.predicted_bytes, rel=0.3), call.call.name


def test_one_process_runs_a_searched_plan(world: World, tmp_path: Path, searches: list[float]) -> None:
    assert run_app(["train", str(world.recipe("sft", tmp_path, plan="search"))]) == 0
    assert len(searches) == 1


def test_show_draws_the_plan_that_is_found(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], searches: list[float]
) -> None:
    file = str(world.recipe("ppo", tmp_path, cluster="1x2"))
    for _ in range(2):
        assert run_app(["show", file, "--plan", "search"]) == 0
        captured = capsys.readouterr()
        assert (
            "search: a plan that the planner found" in captured.out and "s a step predicted" in captured.err
        )
    assert len(searches) == 1


@pytest.mark.parametrize(
    "change",
    thin(
        [
            {"data__batch": 32},
            {"generation__max_new_tokens": 13},
            {"models__ref": {"dtype": "bfloat16"}},
            {"device_memory": "3GiB"},
            {"ppo__minibatches": 4},
            {"micro_batch_tokens": 128},
        ],
        2,
    ),
)
def test_every_input_of_a_plan_changes_the_cache_key(
    world: World, tmp_path: Path, searches: list[float], change: dict[str, object]
) -> None:
    planned(recipe(world, tmp_path))
    planned(recipe(world, tmp_path, seed=7, run_dir=str(tmp_path / "elsewhere")))
    assert len(searches) == 1
    planned(recipe(world, tmp_path, **change))
    assert len(searches) == 2


def damaged(text: str) -> bytes:
    return text.encode()[: len(text) // 2]


@pytest.mark.parametrize(
    "damage",
    [
        damaged,
        lambda text: b"",
        lambda text: b"\xff\xfe\x00",
        lambda text: b"someone: else's\n",
        lambda text: text.partition("\n")[2].encode(),
        lambda text: text.replace("cluster: 1x2", "cluster: 1x4").encode(),
        lambda text: text.replace("actor.train", "actor.trian").encode(),
    ],
)
def test_an_unusable_cached_plan_is_searched_again(
    world: World, tmp_path: Path, searches: list[float], damage: Callable[[str], bytes]
) -> None:
    planned(recipe(world, tmp_path))
    (kept,) = plans_directory().glob("*")
    kept.write_bytes(damage(kept.read_text()))
    plan, said = planned(recipe(world, tmp_path))
    assert "found earlier" not in said and len(searches) == 2
    graph = build_graph(recipe(world, tmp_path))
    assert Plan.load(kept, graph) == plan and [kept] == list(plans_directory().glob("*"))


def test_an_unwritable_plan_cache_is_no_error(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[float]
) -> None:
    of = recipe(world, tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    plan, said = planned(of)
    assert plan.cluster == Cluster(1, 2) and "not kept" in said


def test_a_gpu_that_is_not_known_needs_a_cluster_file(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"knows no device like Voodoo 2; write a cluster YAML file .*`like`"):
        search_spec(recipe(world, tmp_path), Cluster(1, 2), Gpu("Voodoo 2", 12 << 30))
    (tmp_path / "mine.yaml").write_text(
        "groups: [{device: {like: rtx-4090, name: voodoo, memory: 4GiB}, nodes: 1, devices_per_node: 2}]"
    )
    named = recipe(world, tmp_path, cluster=str(tmp_path / "mine.yaml"))
    spec = search_spec(named, Cluster(1, 2), Gpu("Voodoo 2", 12 << 30))
    assert (spec.groups[0].device.name, spec.groups[0].device.memory_bytes) == ("voodoo", 12 << 30)


@pytest.mark.parametrize("command", thin(["train", "show"], 2))
def test_a_search_without_a_fitting_plan_is_one_error_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = str(world.recipe("ppo", tmp_path, cluster="1x2", plan="search", device_memory="65832KiB"))
    assert run_app([command, file]) == 2
    error = capsys.readouterr().err
    assert error.startswith("realrl: no plan fits models (actor, critic, ref, reward) on cpu:1x2, even with")
    assert "times what it has; " in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def make_key(scenario: Scenario) -> str:
    return make_plan_key(scenario, UserConstraints())


def test_every_field_of_a_scenario_is_part_of_the_key(world: World, tmp_path: Path) -> None:
    spec = search_spec(recipe(world, tmp_path), Cluster(1, 2), "cpu")
    scenario = make_scenario(recipe(world, tmp_path), spec)
    other = ClusterSpec.parse("h100:1x2")
    changes: dict[str, object] = {
        "graph": sft_graph(),
        "models": dict.fromkeys(scenario.models, scenario.models["actor"]),
        "spec": other,
        "workload": replace(scenario.workload, epochs=7),
        "cost": CostModel(spec, efficiency=replace(scenario.cost.efficiency, overlap=0.123)),
        "memory": MemoryModel(other),
        "failures": Failures(per_device_day=0.001),
    }
    assert changes.keys() == {field.name for field in fields(Scenario)}
    keys = {make_key(replace(scenario, **{name: value})) for name, value in changes.items()}  # type: ignore[arg-type]
    assert len(keys | {make_key(scenario)}) == len(changes) + 1
    again = make_scenario(recipe(world, tmp_path), search_spec(recipe(world, tmp_path), Cluster(1, 2), "cpu"))
    assert make_key(again) == make_key(scenario)


def test_a_field_that_is_added_to_a_scenario_is_part_of_the_key(world: World, tmp_path: Path) -> None:
    spec = search_spec(recipe(world, tmp_path), Cluster(1, 2), "cpu")
    scenario = make_scenario(recipe(world, tmp_path), spec)
    extended = make_dataclass("Extended", [("humidity", float)], bases=(Scenario,), frozen=True)
    given = {field.name: getattr(scenario, field.name) for field in fields(scenario)}
    keys = {make_key(extended(**given, humidity=value)) for value in (0.5, 0.25)}
    assert len(keys) == 2


class Thermometer:
    """Something that is made with what it does not keep under that name."""

    def __init__(self, degrees: float) -> None:
        self._kelvin = degrees + 273.15


def test_a_value_of_which_not_all_is_known_has_no_fingerprint() -> None:
    with pytest.raises(TypeError, match="Thermometer keeps no degrees"):
        make_fingerprint({"inside": [Thermometer(20.0)]})


def test_a_users_module_and_what_it_imports_are_part_of_the_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = search_spec(recipe(world, tmp_path), Cluster(1, 2), "cpu")
    scenario = make_scenario(recipe(world, tmp_path), spec)
    for name, text in (("users_algorithm", "import users_helper"), ("users_helper", "WIDTH = 3")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    UserCode("algorithm", str(tmp_path / "users_algorithm.py"))
    before = make_key(scenario)
    (tmp_path / "users_helper.py").write_text("WIDTH = 4")
    assert make_key(scenario) != before


def test_tables_of_operators_are_among_what_a_kept_plan_depends_on() -> None:
    assert sum("aiconfigurator-core" in text and text.startswith("{") for text in read_sources()) == 5
