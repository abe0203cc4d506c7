"""Instruction durations of a plan's programs, from the cost model."""

from collections.abc import Mapping

import numpy as np

from realrl.plan.plan import Plan
from realrl.planner.moves.transfers import Layouts
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.strategies import Strategies
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Receive, Run, ShareLengths
from realrl.program.lower import home_placements, kept_copies
from realrl.program.order import changed_sets, changes


class Durations:
    """Duration of each instruction, once all its participants have arrived.

    Feeding inputs, releasing memory and collecting metrics count no time, because they move a few kilobytes at
    most, between few ranks.
    """

    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        self._scenario = scenario
        self._plan = plan
        graph = scenario.graph
        self._homes = home_placements(graph, plan)
        self._copies = kept_copies(graph, plan, self._homes)
        self._exchange = scenario.cost.exchange(graph, scenario.workload)
        self._changing = {
            (role, name)
            for call in graph.calls
            for role in changes(graph, call)
            for name in changed_sets(graph, call, role, scenario.parts)
        }
        """Parameter sets that a step changes, by role and name."""

    def __call__(self, instruction: Instruction) -> float:
        match instruction:
            case Run(call):
                return sum(self.terms(call).values())
            case Reallocate(role, source, target, parameter_set=name):
                return self._scenario.cost.reallocation(self._scenario.models[role], source, target, name)
            case Receive(_, _, producer, consumer):
                pair = (Layouts.of([self._plan[call]]) for call in (producer, consumer))
                return float(self._exchange.seconds(producer, consumer, *pair)[0])
            case ShareLengths(_, _, output_ranks, readers):
                ranks = len({*output_ranks, *readers})
                return float(self._exchange.lengths_seconds(np.array(len(output_ranks)), np.array(ranks)))
            case Load() | Offload():
                return self._copy(instruction)
            case _:
                return 0.0

    @property
    def reporting(self) -> float:
        """Seconds that the writing rank needs between two steps to receive the times of all ranks."""
        return self._exchange.reports_seconds(self._plan.cluster.size)

    def terms(self, call: str) -> Mapping[str, float]:
        """Return the seconds of a call by term. Its CUDA graphs are captured again only if its parameters have
        moved."""
        cost = self._scenario.call_cost(self._scenario.graph.call(call), self._plan[call])
        if cost.captures and self._scenario.keeps_graphs and self._stays(call):
            return {**cost.terms, "launch": cost.terms["launch"] - cost.captures}
        return cost.terms

    def _stays(self, name: str) -> bool:
        """Check whether the parameters of a call stay in device memory, in the call's layout, from step to step."""
        role, layout = self._scenario.graph.call(name).model_role, self._plan[name].layout
        if layout == self._homes[role].layout:
            return role not in self._plan.offload
        return layout in [copy.layout for copy in self._copies.get(role, ())]

    def _copy(self, instruction: Load | Offload) -> float:
        """Return the seconds of a copy between device and host. Unchanged parameters are not copied back."""
        role = instruction.role
        name = instruction.parameter_set
        placement = instruction.placement
        if isinstance(instruction, Offload) and (role, name) not in self._changing:
            return 0.0
        scenario = self._scenario
        model = scenario.models[role]
        strategies = Strategies.of([placement.strategy])
        if instruction.state == "optimizer":
            _, (size,) = scenario.memory.states(model, strategies)
        else:
            (size,) = scenario.memory.largest_sets(model, strategies)[name]
        return float(scenario.cost.offload(size, placement.mesh.first))
