"""Instruction durations of a plan's programs, from the cost model."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from realrl.dataflow.call import Kind
from realrl.plan.plan import Plan
from realrl.planner.moves.exchange import ExchangeModel
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
            case Run(call, portion=portion):
                return sum(self.terms(call, portion).values())
            case Reallocate(role, source, target, parameter_set=name):
                return self._scenario.cost.reallocation(self._scenario.models[role], source, target, name)
            case Receive(_, _, producer, consumer, portion=portion):
                pair = (Layouts.of([self._plan[call]]) for call in (producer, consumer))
                return float(self._exchange_of(portion).seconds(producer, consumer, *pair)[0])
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

    def terms(self, call: str, portion: int = 0) -> Mapping[str, float]:
        """Return the seconds of a call by term, or those of its work on a portion.

        CUDA graphs are captured again only if parameters have moved.
        """
        streaming = self._scenario.graph.streaming
        if streaming is not None and call != streaming.name:
            return self._terms_of_portions(call, streaming.portions, portion)
        cost = self._scenario.call_cost(self._scenario.graph.call(call), self._plan[call])
        terms = cost.terms
        if cost.captures and self._scenario.keeps_graphs and self._stays(call):
            terms = {**terms, "launch": terms["launch"] - cost.captures}
        if portion:
            share = self._sampling_shares[portion - 1]
            terms = {name: share * seconds for name, seconds in terms.items()}
        return terms

    @cached_property
    def _sampling_shares(self) -> list[float]:
        """Share of the time of sampling in which each portion is sampled."""
        scenario, call = self._scenario, self._scenario.graph.streaming
        assert call is not None, "the step has portions"
        model = scenario.models[call.model_role]
        return scenario.cost.portions(call, model, self._plan[call.name], scenario.workload)

    def _terms_of_portions(self, name: str, portions: int, portion: int) -> Mapping[str, float]:
        """Return the seconds by term of a call that works on portions, for one portion, or, if `portion` is 0, for
        all of them."""
        if not portion:
            total: defaultdict[str, float] = defaultdict(float)
            for number in range(1, portions + 1):
                for term, seconds in self._terms_of_portions(name, portions, number).items():
                    total[term] += seconds
            return total
        call, place = self._scenario.graph.call(name), self._plan[name]
        workload = self._scenario.workload.portion(portion, portions)
        # A portion may have fewer items than data-parallel ranks. Some ranks then have nothing to do.
        workload = replace(workload, items=max(workload.items, place.strategy.dp))
        cost = self._scenario.cost.call(call, self._scenario.model(call), place, workload)
        if call.kind is not Kind.TRAIN or portion == portions:
            return cost.terms
        # Only the last portion ends with an optimizer step. ZeRO-2 and ZeRO-3 communicate in every micro-batch.
        later = ("optimizer", "data") if place.strategy.zero == 1 else ("optimizer",)
        return {term: seconds for term, seconds in cost.terms.items() if term not in later}

    def _exchange_of(self, portion: int) -> ExchangeModel:
        """Return the time model of the rows of a portion, or of all rows."""
        scenario, streaming = self._scenario, self._scenario.graph.streaming
        if not portion or streaming is None:
            return self._exchange
        return scenario.cost.exchange(scenario.graph, scenario.workload.portion(portion, streaming.portions))

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
