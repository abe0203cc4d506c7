from hypothesis import given
from hypothesis import strategies as st

from realrl.layout.routing.balance import Capacity, Task, balance

options = st.sets(st.integers(0, 3), min_size=1).map(lambda found: tuple(sorted(found)))
tasks = st.lists(st.builds(Task, st.integers(0, 20).map(float), options), min_size=1, max_size=6)


def loads(given: list[Task], floor: float = 0.0, capacity: Capacity | None = None) -> dict[int, float]:
    result = dict.fromkeys(range(4), 0.0)
    for task, parts in zip(given, balance(given, floor, capacity), strict=True):
        assert abs(sum(parts.values()) - task.work) < 1e-6 and parts.keys() <= {*task.options, *task.others}
        for option, amount in parts.items():
            result[option] += amount
    return result


@given(tasks)
def test_largest_load_equals_the_optimum_of_hall(given: list[Task]) -> None:
    """By Hall's theorem, the optimum is the largest mean load of tasks confined to a set of options."""
    sets = [{o for o in range(4) if mask >> o & 1} for mask in range(1, 16)]
    optimum = max(sum(t.work for t in given if set(t.options) <= s) / len(s) for s in sets)
    assert max(loads(given).values()) <= optimum * 1.001 + 1e-9


def test_second_choices_stay_idle_below_the_floor() -> None:
    assert loads([Task(5.0, (0,), (1,))], floor=5.0) == {0: 5.0, 1: 0.0, 2: 0.0, 3: 0.0}
    assert loads([Task(6.0, (0,), (1,))], floor=4.0) == {0: 4.0, 1: 2.0, 2: 0.0, 3: 0.0}


def test_slow_and_busy_options_get_less_work() -> None:
    found = loads([Task(9.0, (0, 1, 2))], capacity=Capacity(busy={0: 3.0}, speed={1: 0.5}))
    assert [round(found[i], 6) for i in range(3)] == [1.8, 2.4, 4.8]


def test_tasks_with_the_same_options_stay_whole_where_possible() -> None:
    parts = balance([Task(1.0, (0, 1))] * 4, 0.0)
    assert [set(p) for p in parts] == [{0}, {0}, {1}, {1}]


def test_a_task_lost_in_rounding_is_still_assigned() -> None:
    parts = balance([Task(1e15, (0, 1)), Task(1.0, (0, 1))], 0.0)
    assert sum(parts[1].values()) == 1.0
