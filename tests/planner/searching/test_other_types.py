"""Data types of parameters as a choice of the search."""

from dataclasses import replace

import numpy as np
import pytest

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import Kind, MovingAverage
from realrl.plan.cluster import Cluster, Links
from realrl.plan.placement import Dtype, Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.moves.links import LinkTransfers
from realrl.planner.moves.transfers import Layouts
from realrl.planner.search.search import search_plans
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace, build_problem
from realrl.program.memory import StoredModel
from tests.planner.reference import halve
from tests.planner.searching.test_search_build import scenario
from tests.planner.searching.test_search_transfers import SHAPE, WEIGHTS, list_placements


def wide_scenario(dtype: Dtype = "float32") -> Scenario:
    """PPO of models in one data type."""
    of = scenario(ClusterSpec.parse("a100-80g:1x4"))
    return replace(of, models={role: replace(model, dtype=dtype) for role, model in of.models.items()})


def types(of: Scenario, **space: object) -> dict[str, set[Dtype | None]]:
    """Types that the candidates of each call have."""
    problem = build_problem(of, search_space=SearchSpace(**space))
    return {
        name: {o.placement.strategy.dtype for o in candidates}
        for name, candidates in problem.candidates.items()
    }


def test_calls_have_the_types_of_their_models_unless_others_are_allowed() -> None:
    assert all(found == {None} for found in types(wide_scenario()).values())
    for name, found in types(wide_scenario(), dtypes=("bfloat16",)).items():
        assert found == ({None} if name.endswith("train") else {None, "bfloat16"}), name
    # The model's own type is no other one.
    assert all(found == {None} for found in types(wide_scenario("bfloat16"), dtypes=("bfloat16",)).values())


def test_training_moving_averages_and_exact_runs_keep_their_types() -> None:
    of = wide_scenario()
    follows = train_graph(minibatches=4, averages=[MovingAverage("ref", "actor", 0.1)])
    assert types(replace(of, graph=follows), dtypes=("bfloat16",))["ref.inference"] == {None}
    exact = {role: replace(model, exact=True) for role, model in of.models.items()}
    assert all(found == {None} for found in types(replace(of, models=exact), dtypes=("bfloat16",)).values())


def test_wide_models_generate_from_rounded_parameters_where_that_is_allowed() -> None:
    of, found = wide_scenario(), {}
    for dtypes in ((), ("bfloat16",)):
        problem = build_problem(of, search_space=SearchSpace(dtypes=dtypes))
        result = search_plans(problem, effort=60_000)
        found[dtypes] = result.evaluation.seconds
        plan = problem.plan(result.assignment)
        assert estimate_plan(of, plan).step_seconds == pytest.approx(result.evaluation.seconds, rel=1e-9)
    assert found["bfloat16",] < 0.8 * found[()]
    chosen = {call.kind: plan[call.name].strategy.dtype for call in of.graph.calls}
    assert chosen[Kind.GENERATE] == "bfloat16" and chosen[Kind.TRAIN] is None


def test_parameters_travel_in_the_narrower_type() -> None:
    cluster, links = Cluster(1, 4), (Links(170e6, 20e6, 0.0),)
    (wide,) = WEIGHTS["actor"]
    half = halve(wide)
    transfers = LinkTransfers(cluster, {"actor": (wide,)}, links, {"actor": (half,)})

    def seconds(before: Dtype | None, after: Dtype | None) -> np.ndarray:
        source = Placement(Mesh(0, 2), Strategy(dp=2, dtype=before))
        target = Placement(Mesh(2, 2), Strategy(tp=2, dtype=after))
        pair = Layouts.of([source]), Layouts.of([target])
        least = transfers.at_least("actor", *pair)
        found = transfers.seconds("actor", *pair)
        assert (least <= found).all()
        return found

    assert seconds(None, "bfloat16") == seconds("bfloat16", None) == seconds("float32", "bfloat16")
    assert seconds(None, "bfloat16") == pytest.approx(0.5 * seconds(None, None))
    assert seconds(None, "float32") == seconds(None, None)


def test_layouts_of_other_types_are_other_layouts() -> None:
    model = StoredModel(SHAPE, "lm", "float32", trained=True)
    places = [
        Placement(Mesh(0, 2), Strategy(dp=2, dtype=dtype)) for dtype in (None, "float32", "mixed", "bfloat16")
    ]
    layouts = Layouts.of(places)
    assert len({*layouts.codes.tolist()}) == 4 and list_placements(layouts) == places
    assert [Placement.parse(str(place)) for place in places] == places
    assert [model.width(place.strategy) for place in places] == [4, 4, 4, 2]
