"""Variants of a searched plan: simpler plans that are nearly as fast, runners-up, and better homes of roles if
nodes fail."""

import numpy as np

from realrl.plan.axes import Degrees
from realrl.planner.cluster.failures import Failures
from realrl.planner.reliability.goodput import predict_plan_goodput
from realrl.planner.search.local import change_calls, list_moves
from realrl.planner.search.many_plans import Facts, Timeline
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.problem import Assignment, Problem
from realrl.program.arrays import Floats, Ints

_NEAREST = 8
"""Number of other candidates per train call whose expected step is computed. They are those with the shortest
steps."""
_AT_ONCE = 4096
"""Number of plans whose parts are counted at once."""


class Variants:
    """Finds plans near a given plan. Neighbours differ in one call, or in the layout of one role."""

    def __init__(self, problem: Problem) -> None:
        self._timeline = Timeline(problem)
        self._tables = self._timeline.tables
        self._moves = list_moves(self._tables)
        self._candidates = [problem.candidates[call.name] for call in self._tables.calls]
        self._models = [c for c, call in enumerate(self._tables.calls) if not call.is_function]

    def simplify(self, assignment: Assignment, most_seconds: float) -> Assignment:
        """Make a plan simpler, change by change, as long as its step takes at most `most_seconds`.

        Each change leads to the plan with the fewest parts (`count_parts`). Among equally simple plans, it leads to
        the one with the shortest step.
        """
        current = self._read(assignment)
        parts = int(self._count_parts(current[:, None])[0])
        while True:
            plans = self._neighbours(current)
            counts = self._count_parts(plans)
            plans, counts = plans[:, counts < parts], counts[counts < parts]
            seconds = self._seconds(plans)
            fast = np.flatnonzero(seconds <= most_seconds)
            if not len(fast):
                return self._name(current)
            best = min(fast, key=lambda i: (counts[i], seconds[i]))
            current, parts = plans[:, best], int(counts[best])

    def find_runners_up(self, assignment: Assignment, count: int) -> list[Assignment]:
        """Find the fastest neighbours of a plan whose degrees of parallelism differ from the plan's and from each
        other's.

        Plans that differ only in the position of a mesh count as the same plan.
        """
        begin = self._read(assignment)
        plans = self._neighbours(begin)
        seconds = self._seconds(plans)
        seen = {self._degrees(begin)}
        found: list[Assignment] = []
        for i in np.argsort(seconds, kind="stable"):
            if len(found) == count or not np.isfinite(seconds[i]):
                break
            degrees = self._degrees(plans[:, i])
            if degrees not in seen:
                seen.add(degrees)
                found.append(self._name(plans[:, i]))
        return found

    def find_better_home(self, scenario: Scenario, failures: Failures, assignment: Assignment) -> Assignment:
        """Find the plan with the shortest expected step under failures, among a plan and plans that differ from it
        in one train call.

        The search minimises the step without failures. But the placement of trained roles also decides how long it
        takes to write checkpoints and to restart. For each train call, only the `_NEAREST` fastest plans are tried.
        """

        def expect(choice: Assignment) -> float:
            found = self._timeline.evaluate(choice)
            plan = self._timeline.problem.plan(choice)
            return predict_plan_goodput(scenario, failures, plan, found.seconds, found.start).step_seconds

        others: list[Assignment] = []
        for role in (role for role in scenario.graph.roles if scenario.graph.trained(role)):
            call = self._tables.number[scenario.graph.home(role).name]
            candidates = np.delete(
                np.arange(self._tables.sizes[call]), assignment[self._tables.calls[call].name]
            )
            plans = change_calls(self._read(assignment), [call], candidates[None])
            seconds = self._seconds(plans)
            nearest = np.argsort(seconds, kind="stable")[:_NEAREST]
            others += [self._name(plans[:, i]) for i in nearest if np.isfinite(seconds[i])]
        return min([assignment, *others], key=expect)

    def _neighbours(self, current: Ints) -> Ints:
        """List the plans that are one change away, [calls, plans]."""
        return np.concatenate([change_calls(current, *move) for move in self._moves], axis=1)

    def _seconds(self, plans: Ints) -> Floats:
        """Return the step seconds of plans, [plans]. They are infinite if a plan does not fit."""
        if not plans.shape[1]:
            return np.zeros(0)
        seconds, fill = self._timeline(plans)
        return np.where(fill <= 1, seconds, np.inf)

    def _count_parts(self, plans: Ints) -> Ints:
        """Count the parts of each plan as `ranking.count_parts` does, [plans]."""
        parts = range(0, plans.shape[1], _AT_ONCE)
        return np.concatenate([self._count_parts_at_once(plans[:, i : i + _AT_ONCE]) for i in parts])

    def _count_parts_at_once(self, plans: Ints) -> Ints:
        columns = self._tables.gather(plans)
        codes = np.sort(columns.code[self._models], axis=0)
        layouts = 1 + (np.diff(codes, axis=0) != 0).sum(axis=0)
        facts = Facts(self._tables, columns)
        copies = sum(facts.uses_first(c).astype(np.int64) for c in self._models)
        offloaded = columns.offload.sum(axis=0) + columns.offload_optimizer.sum(axis=0)
        counts: Ints = layouts + facts.away.sum(axis=0) + copies + offloaded
        return counts

    def _degrees(self, plan: Ints) -> tuple[Degrees, ...]:
        return tuple(self._candidates[c][i].placement.strategy.all_degrees for c, i in enumerate(plan))

    def _read(self, assignment: Assignment) -> Ints:
        return np.array([assignment[call.name] for call in self._tables.calls])

    def _name(self, plan: Ints) -> Assignment:
        return {call.name: int(i) for call, i in zip(self._tables.calls, plan, strict=True)}
