"""A further axis is one entry in `plan.axes`: everything that a plan decides works with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.layout.layout import build_layout
from realrl.layout.routing.routes import reallocate
from realrl.plan import axes
from realrl.plan.cluster import Cluster
from realrl.plan.communicators import list_own_rank_sets, list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.search.plan_search import find_plan
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.workload import Workload
from realrl.program.lower import home_placements, lower
from realrl.program.memory import StoredModel
from realrl.program.text import format_program, parse_program
from realrl.program.validate import validate
from realrl.testing.compare import compare_runs
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World
from tests.layout.test_routes import check as check_reallocation
from tests.plan.rep_axis import REP, add_axis
from tests.runtime.checkpoints.interrupted import interrupt

GRAPH = train_graph(minibatches=2)
ENTRIES = {
    "actor.generate": {"mesh": "0-3", "dp": 1, "tp": 2, "rep": 2},
    "reward.inference": {"mesh": "0-1", "dp": 1, "rep": 2},
    "ref.inference": {"mesh": "1-2", "dp": 2},
    "critic.inference": {"mesh": "0-3", "dp": 2, "rep": 2, "zero": 3},
    "actor.train": {"mesh": "0-3", "dp": 2, "rep": 2, "zero": 2},
    "critic.train": {"mesh": "0-3", "dp": 1, "pp": 2, "rep": 2},
}
SHAPE = ModelShape(
    vocab_size=50, hidden_size=16, intermediate_size=30, layers=4, heads=4, kv_heads=2, head_dim=4
)


@pytest.fixture
def _rep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(axes, "AXES", (*axes.AXES, REP))
    return None


def write_plan(directory: Path) -> Path:
    file = directory / "plan.yaml"
    file.write_text(yaml.safe_dump({"cluster": "1x4", "calls": ENTRIES}))
    return file


def test_plan_files_and_text_do_not_know_the_axis_unless_it_is_added(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"actor.generate: .*rep"):
        Plan.load(write_plan(tmp_path), GRAPH)
    with pytest.raises(UserError, match="not understood"):
        Placement.parse("d1 t2 p1 r2 @0-3 mb=64")
    with pytest.raises(KeyError):
        Strategy(dp=2, rep=2)


@pytest.mark.usefixtures("_rep")
def test_plan_files_and_text_have_the_axis(tmp_path: Path) -> None:
    plan = Plan.load(write_plan(tmp_path), GRAPH)
    plan.check(GRAPH)
    plan.save(tmp_path / "again.yaml", GRAPH)
    assert Plan.load(tmp_path / "again.yaml", GRAPH) == plan
    generate = plan["actor.generate"]
    assert str(generate) == "d1 t2 p1 r2 @0-3 mb=8192"
    assert Placement.parse(str(generate)) == generate
    assert str(plan["ref.inference"]) == "d2 t1 p1 @1-2 mb=8192"  # as without the axis


@pytest.mark.usefixtures("_rep")
def test_groups_keep_replicas_apart() -> None:
    placement = Placement(Mesh(0, 16), Strategy(dp=2, tp=2, pp=2, rep=2))
    own = list_own_rank_sets(placement, 7)  # stage 0, second replica
    assert own == {
        "data": (5, 7),
        "context": (7,),
        "copies": (5, 7),
        "tensor": (6, 7),
        "experts": (7,),
        "expert_copies": (5, 7),
        "pipeline": (7, 15),
        "reverse_pipeline": (15, 7),
        "mesh": (4, 5, 6, 7, 12, 13, 14, 15),
        "embedding": (7, 15),
    }
    everyone = {
        ranks: role
        for rank in placement.ranks
        for role, ranks in list_own_rank_sets(placement, rank).items()
        if len(ranks) > 1
    }
    assert {*list_rank_sets([placement])} == {*everyone}
    assert placement.output_ranks == (8, 10)


@pytest.mark.usefixtures("_rep")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("d2 t1 p1 r2", "d1 t2 p1 r2"),
        ("d2 t1 p1 r2 z3", "d1 t4 p1"),
        ("d1 t2 p2", "d1 t1 p2 r2"),
        ("d1 t1 p1 r4", "d2 t1 p1 r2 z3"),
    ],
)
def test_parameters_are_reallocated_to_every_replica(source: str, target: str) -> None:
    placements = [Placement.parse(f"{text} @0-3 mb=64") for text in (source, target)]
    before, after = (build_layout(SHAPE, "lm", placement) for placement in placements)
    check_reallocation(reallocate(before, after, Cluster(2, 2)))


@pytest.mark.usefixtures("_rep")
def test_programs_are_valid_and_have_text(tmp_path: Path) -> None:
    plan = Plan.load(write_plan(tmp_path), GRAPH)
    homes = home_placements(GRAPH, plan)
    programs = lower(GRAPH, plan, homes)
    validate(programs, GRAPH, homes)
    assert [parse_program(format_program(program)) for program in programs] == programs


def make_scenario(devices: str) -> Scenario:
    spec = ClusterSpec.parse(devices)
    models = {
        role: StoredModel(SHAPES["qwen2.5-0.5b"], PPO_SPEC.heads[role], "bfloat16", GRAPH.trained(role))
        for role in GRAPH.roles
    }
    workload = Workload(64, (256,), (256,), 256)
    return Scenario(
        graph=GRAPH,
        models=models,
        spec=spec,
        workload=workload,
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )


def make_plan(devices: str, strategy: Strategy) -> Plan:
    spec = ClusterSpec.parse(devices)
    place = Placement(Mesh(0, spec.size), strategy)
    return Plan(spec.cluster, {call.name: place for call in GRAPH.calls})


@pytest.mark.usefixtures("_rep")
def test_replicas_take_the_time_and_memory_of_one() -> None:
    once = Strategy(dp=2, tp=2)
    one = estimate_plan(make_scenario("h100:1x4"), make_plan("h100:1x4", once))
    two = estimate_plan(make_scenario("h100:1x8"), make_plan("h100:1x8", once.with_degrees(rep=2)))
    for name, call in one.calls.items():
        assert two.calls[name].seconds == pytest.approx(call.seconds, rel=1e-9), name
    assert two.peak_device.peak.bytes == one.peak_device.peak.bytes
    # Only the exchange of lengths and times with twice as many ranks takes longer.
    assert one.step_seconds <= two.step_seconds < 1.02 * one.step_seconds


@pytest.mark.usefixtures("_rep")
def test_the_search_finds_a_plan_without_replicas() -> None:
    found = find_plan(make_scenario("h100:1x4")).plan
    assert all(place.strategy.degrees["rep"] == 1 for place in found.placements.values())


def test_a_run_with_replicas_learns_like_one_process_and_is_resumed_without_them(
    world: World, tmp_path: Path
) -> None:
    recipes = {}
    for name, changes in {
        "alone": {"cluster": "1x1"},
        "replicated": {"cluster": "1x4", "plan": str(write_plan(tmp_path))},
        "resumed": {"cluster": "1x1"},
    }.items():
        (tmp_path / name).mkdir()
        recipes[name] = world.recipe(
            "ppo", tmp_path / name, **{"checkpoint__every": 2, "checkpoint__keep": 3, **changes}
        )
    runs = {name: recipe.parent / "run" for name, recipe in recipes.items()}
    run_on_ranks(1, [recipes["alone"]])
    run_on_ranks(4, [recipes["replicated"]], prepare=add_axis)
    compare_runs(runs["replicated"], runs["alone"], name="replicated", than="on one process", tolerance=1e-4)
    interrupt(runs["replicated"], 2, tmp_path / "resumed")
    run_on_ranks(1, [recipes["resumed"]])
    compare_runs(runs["resumed"], runs["alone"], name="resumed", than="without replicas", tolerance=1e-4)
