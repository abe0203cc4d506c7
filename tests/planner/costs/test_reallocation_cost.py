import pytest

from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cost.cost_model import CostModel
from tests.planner.executed_routes import time_routes
from tests.planner.problems import LARGE, NODES, SMALL, stored

MODEL = CostModel(NODES)


def at(first: int, dp: int, tp: int, pp: int) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


PAIRS = [
    (at(0, 8, 1, 1), at(8, 1, 8, 1)),
    (at(0, 1, 8, 4), at(0, 4, 8, 1)),
    (at(0, 1, 8, 4), at(0, 32, 1, 1)),
    (at(0, 1, 1, 1), at(0, 4, 8, 1)),
    (at(0, 4, 2, 4), at(0, 2, 8, 2)),
    (at(8, 2, 4, 1), at(0, 1, 4, 8)),
    (at(3, 1, 1, 1), at(0, 1, 4, 2)),
    (at(16, 1, 2, 8), at(0, 3, 8, 1)),
    (at(0, 1, 8, 3), at(0, 4, 2, 4)),
]


@pytest.mark.parametrize("shape", [SMALL, LARGE, SHAPES["llama-3.2-1b"]], ids=["7b", "70b", "tied"])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda p: p.layout)
def test_the_search_estimate_is_near_the_time_of_the_routes(
    shape, source: Placement, target: Placement
) -> None:
    figure = MODEL.reallocation(stored(shape), source, target)
    exact = time_routes(MODEL, stored(shape), source, target)
    assert figure == pytest.approx(exact, rel=0.08, abs=1e-3)


def test_reallocation_to_an_equal_layout_costs_nothing() -> None:
    same = Placement(Mesh(0, 8), Strategy(dp=4, tp=2, micro_batch_tokens=5))
    assert MODEL.reallocation(stored(SMALL), at(0, 4, 2, 1), same) == 0


def test_replicated_parameters_cost_no_reallocation() -> None:
    assert MODEL.reallocation(stored(SMALL), at(0, 32, 1, 1), at(0, 1, 8, 4)) == 0


def test_reallocation_time_is_invariant_under_shifts_by_nodes() -> None:
    first = MODEL.reallocation(stored(LARGE), at(0, 2, 4, 1), at(8, 1, 8, 2))
    assert MODEL.reallocation(stored(LARGE), at(8, 2, 4, 1), at(16, 1, 8, 2)) == first


def test_wider_elements_take_longer() -> None:
    narrow, wide = (
        MODEL.reallocation(stored(LARGE, "lm", dtype), at(0, 1, 8, 1), at(8, 1, 8, 1))
        for dtype in ("bfloat16", "float32")
    )
    assert wide == pytest.approx(2 * narrow, rel=0.01)
