"""Alternatives to the placements of a plan, with the reasons against them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Kind
from realrl.plan.placement import Placement, Strategy, divides_experts
from realrl.plan.plan import Plan
from realrl.planner.report.report import Alternative
from realrl.planner.report.shortage_text import describe_shortage
from realrl.planner.search.many_plans import PlanEvaluation, Timeline
from realrl.planner.search.shortage import explain_plan_shortage
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace, build_problem
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Assignment, Problem

_PER_CALL = 3
_NOTHING = 5e-4
"""Relative difference in step time below which two plans count as equally fast."""
_WORTH_SAYING, _NAMED = 0.15, 2
"""Least fraction of a difference in seconds for which a term is named, and maximum number of named terms."""


def find_alternatives(
    scenario: Scenario, problem: Problem, assignment: Assignment, step_seconds: float, *, offload: bool
) -> tuple[Alternative, ...]:
    """Find the most informative alternatives for each call.

    They are the fastest candidates that differ in one respect: devices, parallel degrees, data type, ZeRO stage,
    micro-batch size, recomputation, offloading, or kept copies. One further candidate would be faster but does not
    fit. `step_seconds`: predicted step of `assignment`. To predict an alternative's step, the difference of their
    timelines is added. `offload`: whether offloading frees memory.
    """
    alternatives: list[Alternative] = []
    search_space = SearchSpace(micro_batch_tokens=(), offload=offload)
    for call in scenario.graph.order:
        extended = _with_neighbours(scenario, problem, assignment, call, search_space)
        view = _View(
            scenario=scenario,
            problem=extended,
            assignment=dict.fromkeys(assignment, 0),
            call=call,
            step_seconds=step_seconds,
        )
        alternatives += view.alternatives()
    return tuple(alternatives)


def _with_neighbours(
    scenario: Scenario, problem: Problem, assignment: Assignment, call: Call, search_space: SearchSpace
) -> Problem:
    """Restrict all other calls to their chosen candidates, and add neighbours of the chosen candidate to `call`.

    The chosen candidate comes first. Neighbours are added even if they do not fit.
    """
    fixed = {name: (candidate,) for name, candidate in problem.chosen_candidates(assignment).items()}
    plan = problem.plan(assignment)
    plans = [
        replace(plan, placements={**plan.placements, call.name: placement})
        for placement in _neighbours(scenario, call, plan[call.name])
    ]
    extra = build_problem(scenario, search_space=search_space, include=_possible(scenario, plans))
    everything = (*fixed[call.name], *problem.candidates[call.name], *extra.candidates[call.name])
    return replace(problem, candidates={**fixed, call.name: tuple(dict.fromkeys(everything))})


def _possible(scenario: Scenario, plans: Iterable[Plan]) -> Iterator[Plan]:
    """Yield the plans that give every rank at least one record."""
    for plan in plans:
        try:
            for call in scenario.graph.calls:
                scenario.call_cost(call, plan[call.name])
        except UserError:
            continue
        yield plan


def _neighbours(scenario: Scenario, call: Call, placement: Placement) -> Iterator[Placement]:
    """Yield a placement, then variants on the same devices: with one degree halved in favour of DP, or
    fewer virtual stages, or with recomputation toggled, or without a zero bubble."""
    yield placement
    s = placement.strategy
    changes: list[Strategy] = []
    halved = s.degrees.changed({"tp": max(1, s.tp // 2), "dp": 2 * s.dp})
    if call.kind is Kind.TRAIN:
        changes.append(replace(s, recompute=not s.recompute))
        if s.zero_bubble:
            changes.append(replace(s, zero_bubble=False))
    if s.tp % 2 == 0 and divides_experts(halved, s.ep):
        changes.append(
            replace(
                s.with_degrees(tp=s.tp // 2, dp=2 * s.dp), sequence_parallel=s.sequence_parallel and s.tp > 2
            )
        )
    if s.cp % 2 == 0:
        changes.append(s.with_degrees(cp=s.cp // 2, dp=2 * s.dp))
    if s.pp % 2 == 0:
        halved_stages = replace(s, zero_bubble=s.zero_bubble and s.pp > 2)
        changes.append(halved_stages.with_degrees(pp=s.pp // 2, dp=2 * s.dp, vpp=s.vpp if s.pp > 2 else 1))
    if s.vpp % 2 == 0:
        changes.append(s.with_degrees(vpp=s.vpp // 2))
    if s.ep % 2 == 0:
        changes.append(s.with_degrees(ep=s.ep // 2))
    for strategy in changes:
        if call.kind is not Kind.GENERATE or strategy.can_generate(call.portions):
            yield Placement(placement.mesh, strategy)


@dataclass(frozen=True, kw_only=True)
class _View:
    """Candidates of one call, to compare with the chosen candidate, which has index 0."""

    scenario: Scenario
    problem: Problem
    assignment: Assignment
    call: Call
    step_seconds: float

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates of the call."""
        return self.problem.candidates[self.call.name]

    def alternatives(self) -> list[Alternative]:
        """Return the informative alternatives, the fastest first."""
        timeline = Timeline(self.problem)
        calls = [call.name for call in timeline.tables.calls]
        plans = np.array([np.full(len(self.candidates), self.assignment[name]) for name in calls])
        plans[calls.index(self.call.name)] = np.arange(len(self.candidates))
        seconds, fill = timeline(plans)
        picked = _pick(self.candidates, seconds.tolist(), fill.tolist())
        base = timeline.evaluate(self.assignment)
        return [self._alternative(timeline, base, number) for number in picked]

    def _alternative(self, timeline: Timeline, base: PlanEvaluation, number: int) -> Alternative:
        assignment, models = {**self.assignment, self.call.name: number}, self.scenario.models
        other = timeline.evaluate(assignment)
        candidate = self.candidates[number]
        chosen = self.candidates[0]
        own, before = candidate.placement.strategy, chosen.placement.strategy
        slower = other.seconds - base.seconds
        away = {
            "parameters": (chosen.offload, candidate.offload),
            "optimizer": (chosen.offload_optimizer, candidate.offload_optimizer),
        }
        reason = (
            self._where_slower(base, other, candidate)
            if other.fits
            else describe_shortage(self.scenario, explain_plan_shortage(self.problem, assignment, other))
        )
        return Alternative(
            call=self.call.name,
            placement=candidate.placement,
            offload=tuple(name for name, (then, now) in away.items() if now and not then),
            step_seconds=self.step_seconds + slower,
            fits=other.fits,
            reason=reason,
            on_device=tuple(name for name, (then, now) in away.items() if then and not now),
            dtype=None if own.dtype == before.dtype else models[self.call.model_role].dtype_under(own),
            keep=None if candidate.keep == chosen.keep else candidate.keep,
            function=self.call.is_function,
        )

    def _where_slower(self, base: PlanEvaluation, other: PlanEvaluation, candidate: Candidate) -> str:
        slower = other.seconds - base.seconds
        now, before = self._terms(other, candidate), self._terms(base, self.candidates[0])
        terms = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in {**now, **before}}
        # The remaining seconds come from calls that run later, because they now need the same devices or depend on
        # this call.
        terms["waiting"] = slower - sum(terms.values())
        named = [
            f"{name} {_seconds(seconds)}"
            for name, seconds in sorted(terms.items(), key=lambda item: -item[1])
            if seconds > _WORTH_SAYING * slower
        ]
        return f"{_seconds(slower)} slower" + (f": {', '.join(named[:_NAMED])}" if named else "")

    def _terms(self, evaluation: PlanEvaluation, candidate: Candidate) -> dict[str, float]:
        """Seconds of the call, and of all reallocations, by term."""
        terms = dict(self.scenario.call_cost(self.call, candidate.placement).terms)
        captures = evaluation.end[self.call.name] - evaluation.start[self.call.name] - candidate.seconds
        terms["launch"] = terms.get("launch", 0.0) - candidate.capture_seconds + captures
        terms["offload"] = candidate.seconds + captures - sum(terms.values())
        terms["reallocation"] = sum(evaluation.reallocation_seconds.values())
        return terms


def _pick(candidates: tuple[Candidate, ...], seconds: list[float], fill: list[float]) -> list[int]:
    """Choose the indices of informative candidates. In each respect, this is the fastest candidate that is slower
    than candidate 0. One further candidate does not fit. It is nearest to fitting among the candidates that would
    be much faster."""
    others = range(1, len(candidates))
    slower = seconds[0] * (1 + _NOTHING)
    faster = seconds[0] * (1 - _NOTHING)
    best: dict[str, int] = {}
    for number in others:
        respect = _respect(candidates[0], candidates[number])
        if fill[number] <= 1 and seconds[number] > slower and respect is not None:
            best[respect] = min(best.get(respect, number), number, key=lambda i: seconds[i])
    tempting = [number for number in others if fill[number] > 1 and seconds[number] < faster]
    gain = seconds[0] - min((seconds[number] for number in tempting), default=0.0)
    worth = [number for number in tempting if seconds[0] - seconds[number] >= gain / 2]
    nearest = [min(worth, key=lambda number: fill[number])] if worth else []
    return sorted([*best.values(), *nearest], key=lambda number: seconds[number])[:_PER_CALL]


_RESPECTS: Mapping[str, Callable[[Candidate], object]] = {
    "size": lambda one: one.placement.mesh.size,
    "place": lambda one: one.placement.mesh,
    "degrees": lambda one: one.placement.strategy.all_degrees,
    "type": lambda one: one.placement.strategy.dtype,
    "stage of ZeRO": lambda one: one.placement.strategy.zero,
    "recomputation": lambda one: one.placement.strategy.recompute,
    "zero bubble": lambda one: one.placement.strategy.zero_bubble,
    "offload": lambda one: (one.offload, one.offload_optimizer),
    "copies": lambda one: one.keep,
}
"""Respects in which candidates differ, the most important first."""


def _respect(chosen: Candidate, other: Candidate) -> str | None:
    """Find the most important respect in which a candidate differs. Returns None if it only offloads more."""
    differs = (name for name, find in _RESPECTS.items() if find(chosen) != find(other))
    respect = next(differs, "micro-batch")
    more = other.offload > chosen.offload or other.offload_optimizer > chosen.offload_optimizer
    return None if respect == "offload" and more else respect


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if abs(seconds) >= 0.9995 else f"{1e3 * seconds:.3g} ms"
