"""The best of all plans of a small problem, by costing each of them with loops over calls and devices."""

import itertools
import math

from realrl.dataflow.call import Call, Kind
from realrl.planner.problem import Option, Problem
from realrl.planner.transfers import Layouts
from realrl.program.order import changes, length_readers, sharing, waves


def cheapest(problem: Problem) -> float:
    """Seconds of the fastest plan that fits; infinite if none does."""
    names = [call.name for call in problem.graph.calls]
    transfers: dict[tuple, float] = {}
    best = math.inf
    for numbers in itertools.product(*(range(len(problem.options[name])) for name in names)):
        seconds, fill = cost(problem, dict(zip(names, numbers, strict=True)), transfers)
        if fill <= 1:
            best = min(best, seconds)
    return best


def cost(problem: Problem, choice: dict[str, int], transfers: dict[tuple, float]) -> tuple[float, float]:
    """Seconds and the largest part of a device's memory that is used. `transfers`: those known already."""
    return _Step(problem, choice, transfers).run()


class _Step:
    def __init__(self, problem: Problem, choice: dict[str, int], transfers: dict[tuple, float]) -> None:
        self.problem, self.graph, self.transfers = problem, problem.graph, transfers
        self.options = problem.chosen(choice)
        self.plan = problem.plan(choice)
        self.homes = {role: self.options[problem.home(role).name] for role in self.graph.roles}
        self.free = [0.0] * problem.cluster.size
        self.end: dict[Call, float] = {}
        self.kept = [
            sum(home.resident_bytes for home in self.homes.values() if rank in home.placement.ranks)
            for rank in range(problem.cluster.size)
        ]
        self.copies: dict[tuple, Option] = {}
        self.fill = 0.0

    def run(self) -> tuple[float, float]:
        order = waves(self.graph, self.plan)
        for wave in order:
            for call in wave:
                group = sharing(self.graph, self.plan, order, call)
                self.bring(call, first=group[0] == call)
            for call in wave:
                self.work(call)
            for call in wave:
                self.tell(call)
            for call in wave:
                self.follow(call)
                group = sharing(self.graph, self.plan, order, call)
                if group[-1] == call:
                    self.copies.pop((call.role, self.options[call.name].layout), None)
        return max(self.free), self.fill

    def bring(self, call: Call, *, first: bool) -> None:
        option, home = self.options[call.name], self.homes[call.role]
        borrowed = option.layout != home.layout
        if borrowed and call.kind is Kind.TRAIN:
            self.fill = math.inf
        if borrowed and not first:
            return
        seconds = home.load_seconds if home.offload else 0.0
        if borrowed:
            seconds += self.transfer(call.role, home, option)
            self.copies[call.role, option.layout] = option
            if home.offload:
                for rank in {*home.placement.ranks, *option.placement.ranks}:
                    more = home.weights_bytes if rank in home.placement.ranks else 0.0
                    more += option.weights_bytes if rank in option.placement.ranks else 0.0
                    self.note(rank, self.kept[rank] + more)
        if seconds > 0:
            self.occupy({*home.placement.ranks, *option.placement.ranks}, seconds)

    def work(self, call: Call) -> None:
        option, home = self.options[call.name], self.homes[call.role]
        ready = 0.0
        for other in self.graph.dependencies(call):
            ready = max(ready, self.end[other] + self.problem.exchange.get((other.name, call.name), 0.0))
        self.end[call] = self.occupy(set(option.placement.ranks), option.seconds, ready)
        loaded = option.weights_bytes if home.offload and option.layout == home.layout else 0.0
        for rank in option.placement.ranks:
            copies = sum(o.weights_bytes for o in self.copies.values() if rank in o.placement.ranks)
            self.note(rank, self.kept[rank] + copies + loaded + option.working_bytes)

    def tell(self, call: Call) -> None:
        for key in call.outputs:
            if self.graph.keys[key].length == "own":
                for rank in length_readers(self.graph, self.plan, key):
                    self.free[rank] = max(self.free[rank], self.end[call])

    def follow(self, call: Call) -> None:
        for average in self.graph.averages if changes(self.graph, call) else ():
            if average.source != call.role:
                continue
            source, target = self.homes[average.source], self.homes[average.role]
            seconds = self.transfer(average.source, source, target)
            seconds += target.load_seconds if target.offload else 0.0
            ranks = {*source.placement.ranks, *target.placement.ranks}
            self.occupy(ranks, seconds)
            for rank in ranks:
                loaded = [h for h in (source, target) if h.offload and rank in h.placement.ranks]
                self.note(rank, self.kept[rank] + sum(h.weights_bytes for h in loaded))

    def transfer(self, role: str, source: Option, target: Option) -> float:
        key = (role, source.layout, target.layout)
        if key not in self.transfers:
            layouts = Layouts.of([source.placement]), Layouts.of([target.placement])
            self.transfers[key] = float(self.problem.transfers.seconds(role, *layouts)[0])
        return self.transfers[key]

    def occupy(self, ranks: set[int], seconds: float, ready: float = 0.0) -> float:
        end = max(ready, *(self.free[rank] for rank in ranks)) + seconds
        for rank in ranks:
            self.free[rank] = end
        return end

    def note(self, rank: int, held: float) -> None:
        self.fill = max(self.fill, held / self.problem.memory_bytes[self.problem.cluster.node(rank)])
