"""The search and its bound against every plan that is enumerated, candidates that others dominate included."""

from dataclasses import replace

import numpy as np
import pytest

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import Mixture, ModelShape
from realrl.families.sizes import SHAPES
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.search.bound import Bound
from realrl.planner.search.many_plans import Timeline
from realrl.planner.search.search import SearchBudget, prune_candidates, search_plans, select_core
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space import build
from realrl.planner.space.candidate import count_bytes_alone
from realrl.planner.space.problem import Problem
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.planner.searching.test_search_build import MODELS, scenario

PAIR = DataflowGraph(
    [
        Call("a.generate", "a", Kind.GENERATE, ("x",), ("s",), work=("x",)),
        Call("a.train", "a", Kind.TRAIN, ("s",), (), work=("s",)),
    ],
    (Key("x", "float32", "own"), Key("s", "float32", "own")),
)


MIXTURE = SHAPES["llama-3.2-1b"].model_copy(
    update={"family": "mixtral", "intermediate_size": 1024, "mixture": Mixture(experts=8, per_token=2)}
)


def small_scenario(gibibytes: int, shape: ModelShape) -> Scenario:
    spec = ClusterSpec.parse("l40s:1x4")
    (group,) = spec.groups
    spec = replace(spec, groups=(replace(group, device=replace(group.device, memory_bytes=gibibytes << 30)),))
    return Scenario(
        graph=PAIR,
        models={"a": StoredModel(shape, "lm", "bfloat16", True)},
        spec=spec,
        workload=Workload(64, (300,), (500,), 500),
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )


def find_fastest(problem: Problem) -> float:
    """Seconds of the fastest of all plans that fit."""
    timeline, best = Timeline(problem), np.inf
    count = int(timeline.tables.sizes.prod())
    for start in range(0, count, 20_000):
        numbers = np.arange(start, min(start + 20_000, count))
        seconds, fill = timeline(np.stack(np.unravel_index(numbers, timeline.tables.sizes)))
        best = min(best, float(np.where(fill <= 1, seconds, np.inf).min()))
    return best


@pytest.mark.parametrize(
    ("gibibytes", "shape"),
    [*((n, SHAPES["llama-3.2-1b"]) for n in (8, 10, 14, 20, 40)), (12, MIXTURE), (20, MIXTURE)],
    ids=lambda of: of.family if isinstance(of, ModelShape) else of,
)
def test_the_best_of_all_enumerated_plans_is_found_and_bounded(
    gibibytes: int, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = small_scenario(gibibytes, shape)
    kept = build.build_problem(of)
    monkeypatch.setattr(build, "drop_dominated", lambda ways: ways)
    everything = build.build_problem(of)
    divided = any(one.placement.strategy.ep > 1 for found in everything.candidates.values() for one in found)
    assert divided == (shape.mixture is not None)
    for name, candidates in everything.candidates.items():
        # With 8 GiB only what needs little memory is left, of which nothing dominates anything.
        assert {*kept.candidates[name]} <= {*candidates}
        assert gibibytes == 8 or len(kept.candidates[name]) < len(candidates)
    fastest = find_fastest(everything)
    result = search_plans(kept, tolerance=0.0, budget=SearchBudget(plans=0))
    assert result.evaluation.seconds == pytest.approx(fastest, rel=1e-9)
    assert result.lower_bound <= fastest * (1 + 1e-9)


def test_the_core_has_fast_and_lean_candidates_of_each_size_of_mesh() -> None:
    pruned, _ = prune_candidates(build.build_problem(scenario(ClusterSpec.parse("a100-80g:2x8"))))
    timeline = Timeline(pruned)
    core, kept = select_core(pruned, Bound(timeline.tables).groups)
    assert set(MODELS) == set(pruned.graph.roles)
    for c, call in enumerate(pruned.graph.order):
        candidates, chosen = pruned.candidates[call.name], core.candidates[call.name]
        assert chosen == tuple(candidates[i] for i in kept[c])
        assert len(chosen) < len(candidates)
        for size in {o.placement.mesh.size for o in candidates}:
            every = [o for o in candidates if o.placement.mesh.size == size]
            some = [o for o in chosen if o.placement.mesh.size == size]
            assert min(o.seconds + o.load_seconds * o.offload for o in some) == min(
                o.seconds + o.load_seconds * o.offload for o in every
            )
            needs = [min(count_bytes_alone(o, is_home=True) for o in of) for of in (some, every)]
            assert needs[0] == needs[1]
