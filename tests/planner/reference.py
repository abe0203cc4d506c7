"""Reference costs of plans, from a slow walk through the programs of every rank."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.sets import BASE, WHOLE, TrainablePart
from realrl.plan.axes import Degrees
from realrl.plan.cluster import Cluster, Links
from realrl.plan.placement import Dtype, Placement, Strategy, divides_experts, function_placement
from realrl.planner.moves.exchange import ExchangeModel
from realrl.planner.moves.links import LinkTransfers, ParameterBytes
from realrl.planner.moves.transfers import Layouts, name_mixing, name_refreshing
from realrl.planner.simulate.simulator import simulate
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Assignment, Problem
from realrl.program.instructions import (
    Instruction,
    Load,
    Offload,
    Program,
    Reallocate,
    Receive,
    Release,
    Run,
    ShareLengths,
)
from realrl.program.lower import home_placements, kept_copies, lower
from realrl.program.order import TrainableParts, changed_sets, changes, producers, set_names
from tests.plan.meshes import list_tidy
from tests.planner.exhaustive import connected, host_fill, shared
from tests.planner.sampled_graphs import sampled_graph


class Walk:
    """Simulation of a plan's programs with the costs of its candidates."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self.problem, self.graph = problem, problem.graph
        self.candidates = problem.chosen_candidates(assignment)
        self.plan = problem.plan(assignment)
        self.homes = home_placements(self.graph, self.plan)
        self.home = {role: self.candidates[problem.home(role).name] for role in self.graph.roles}
        self.copies = kept_copies(self.graph, self.plan, self.homes)
        self.programs = lower(self.graph, self.plan, self.homes, self.copies, problem.parts)
        self.seconds = simulate(self.programs, self.duration, steps=3).step_seconds
        self.fill = max(host_fill(problem, self.home), *(self.held(program) for program in self.programs))

    def duration(self, instruction: Instruction) -> float:
        match instruction:
            case Run(call, role, place):
                candidate = self.candidates[call]
                return candidate.seconds + candidate.capture_seconds * self.moved(role, place.layout)
            case Reallocate(role, source, target, _, _, name):
                pair = Layouts.of([source]), Layouts.of([target])
                number = set_names(role, self.problem.parts).index(name)
                model = self.problem.transfers
                one, half = ({role: (of[role][number],)} for of in (model.weights, model.halves))
                return float(replace(model, weights=one, halves=half).seconds(role, *pair)[0])
            case Receive(_, _, producer, consumer):
                pair = Layouts.of([self.plan[producer]]), Layouts.of([self.plan[consumer]])
                return float(self.problem.exchange.seconds(producer, consumer, *pair)[0])
            case ShareLengths(_, _, senders, readers):
                # A message from each other sender to the first, and one from there to everyone else.
                told = len({*senders, *readers}) - 1
                links, items = self.problem.exchange.links, self.problem.exchange.items
                messages = len(senders) - 1 + told
                return messages * links.latency_s + 8 * items * told / links.node_bytes_per_s
            case Load(role, _, "parameters", name) if name == BASE:  # with all that the role has
                return self.home[role].load_seconds
            case Offload(role, _, "parameters", name) if name == BASE:
                return self.home[role].unload_seconds
            case _:
                return 0.0

    def moved(self, role: str | None, layout: str) -> bool:
        """Whether parameters come into the layout in a step, other than into a copy that is kept."""
        kept = [copy.layout for copy in self.copies.get(role or "", ())]
        for instruction in (i for program in self.programs for i in program.instructions):
            match instruction:
                case Reallocate(_, _, target, into, _, _) if instruction.role == role and into is None:
                    if target.layout == layout and layout not in kept:
                        return True
                case Load(_, placement, "parameters", _) if instruction.role == role:
                    if placement.layout == layout:
                        return True
        return False

    def held(self, program: Program) -> float:
        """Largest fraction of its memory that a rank uses."""
        held = sum(o.resident_bytes for o in self.home.values() if program.rank in o.placement.ranks)
        held += connected(self.problem, self.candidates, program.rank)
        held -= shared(self.problem, self.home, program.rank)
        kept = [(role, place) for role, places in self.copies.items() for place in places]
        held += sum(self.weights(role, place) for role, place in kept if program.rank in place.ranks)
        most = held
        for instruction in program.instructions:
            match instruction:
                case Reallocate(role, _, target, None, _, name) if program.rank in target.ranks:
                    transient = target not in self.copies.get(role, ())
                    held += self.weights(role, target) * (name == BASE and transient)
                case Load(role, placement, "parameters", name):
                    held += self.weights(role, placement) * (name == BASE)
                case Run(call):
                    most = max(most, held + self.candidates[call].working_bytes)
            most = max(most, held)
            match instruction:
                case Release(role, placement, name) | Offload(role, placement, "parameters", name):
                    held -= self.weights(role, placement) * (name == BASE)
        return most / self.problem.memory_bytes[self.problem.cluster.node(program.rank)]

    def weights(self, role: str, placement: Placement) -> float:
        calls = [self.candidates[c.name] for c in self.graph.role_calls(role)]
        return next(o.weights_bytes for o in calls if o.placement.layout == placement.layout)


def function_table(call: Call, cluster: Cluster, seconds: float) -> list[Candidate]:
    """All meshes."""
    return [
        Candidate(
            placement=function_placement(mesh),
            seconds=seconds / mesh.size,
            weights_bytes=0.0,
            resident_bytes=0.0,
            working_bytes=0.0,
        )
        for mesh in list_tidy(cluster)
    ]


def strategy_table(
    call: Call,
    parameters: float,
    cluster: Cluster,
    *,
    home: bool,
    trained: bool,
    keeps: bool,
    dtypes: tuple[Dtype | None, ...],
) -> list[Candidate]:
    """List all candidates of a call by a crude model with the effects of a real one.

    TP communicates, pipelines have bubbles, decoding is memory-bound, small shards are inefficient,
    recomputation and offloading cost time. `keeps`: whether other calls of the role may use copies that are kept.
    """
    candidates = []
    for mesh in list_tidy(cluster):
        parts = [devices for _, devices in mesh.nodes(cluster).runs]
        for tp in (t for t in range(1, mesh.size + 1) if all(part % t == 0 for part in parts)):
            for pp in (p for p in range(1, mesh.size // tp + 1) if mesh.size // tp % p == 0):
                for recompute in (False, True) if call.kind is Kind.TRAIN else (False,):
                    for offload, dtype in product((False, True) if home else (False,), dtypes):
                        dp = mesh.size // tp // pp
                        # Only some strategies divide tokens, because all of them would be too many candidates.
                        cp = 2 if dp % 4 == 2 and recompute else 1
                        ep = 2 if dp % 4 == 0 and not recompute and call.kind is not Kind.GENERATE else 1
                        ep = ep if divides_experts(Degrees.of({"dp": dp, "tp": tp}), ep) else 1
                        plain = Strategy(
                            dp=dp // cp, cp=cp, tp=tp, pp=pp, ep=ep, recompute=recompute, dtype=dtype
                        )
                        interleaves = 1 < pp <= 4 and not (recompute or offload)
                        several = interleaves and call.kind is not Kind.GENERATE
                        for vpp in (1, 2) if several else (1,):
                            place = Placement(mesh, plain.with_degrees(vpp=vpp))
                            found = _cost_candidate(call, parameters, place, offload, trained)
                            candidates += [found, replace(found, keep=True)] if keeps else [found]
    return candidates


def _cost_candidate(
    call: Call, parameters: float, placement: Placement, offload: bool, trained: bool
) -> Candidate:
    s = placement.strategy
    part = parameters / (s.tp * s.pp)
    weights = 2 * part / (2 if s.dtype else 1)
    work = {Kind.GENERATE: 1.0, Kind.INFERENCE: 1.0, Kind.TRAIN: 4.0 if s.recompute else 3.0}[call.kind]
    seconds = work * parameters / s.size * (1 + 0.15 * math.log2(s.tp)) * (1 + (s.pp - 1) / 8 / s.vpp)
    if call.kind is Kind.GENERATE:
        seconds += 0.2 * weights * (1 + 0.3 * s.pp)
    if call.kind is Kind.TRAIN:
        seconds += 0.05 * part * (s.dp > 1)
    states = 4 * part + 12 * part / s.dp if trained else 0.0
    working = (0.9 + 0.1 * s.vpp) * (0.5 if s.recompute else 2.0) * parameters / (s.size * s.tp) + 0.3
    return Candidate(
        placement=placement,
        seconds=seconds,
        weights_bytes=weights,
        resident_bytes=states if offload else states + weights,
        working_bytes=working,
        communicator_bytes=1.0 * (s.dp > 1) + 2.0 * (s.tp > 1) + (s.pp > 1),
        host_bytes=weights * offload,
        offload=offload,
        load_seconds=0.2 * weights,
        unload_seconds=0.2 * weights * trained,
        capture_seconds=0.3 * (call.kind is Kind.GENERATE and s.tp == 1),
    )


def _weights(rng: random.Random, parameters: float, part: TrainablePart) -> tuple[ParameterBytes, ...]:
    """A model of one parameter set, or of two, of which the second one has the last layers."""
    layer, experts, tied = 0.25 * parameters, 0.1 * parameters, rng.random() < 0.3
    embedding, end = 0.3 * parameters, 0.1 * parameters

    def make(held: range, embedding: float, end: float) -> ParameterBytes:
        return ParameterBytes(
            layers=tuple(layer * (n in held) for n in range(8)),
            embedding=embedding,
            end=end,
            tied=tied,
            experts=tuple(experts * (n in held) for n in range(8)),
        )

    if part == WHOLE:
        return (make(range(8), embedding, end),)
    first = 8 - (part.last_layers or 0)
    return make(range(first), embedding, 0.0), make(range(first, 8), 0.0, end)


def halve(weights: ParameterBytes) -> ParameterBytes:
    """The same parameters in a type of half the width."""
    experts = weights.experts
    return replace(
        weights,
        layers=tuple(layer / 2 for layer in weights.layers),
        experts=None if experts is None else tuple(layer / 2 for layer in experts),
        embedding=weights.embedding / 2,
        end=weights.end / 2,
    )


def _part(rng: random.Random) -> TrainablePart:
    return WHOLE if rng.random() < 0.7 else TrainablePart(last_layers=rng.randrange(1, 8))


def _moving(
    graph: DataflowGraph, parts: TrainableParts, weights: dict[str, tuple[ParameterBytes, ...]]
) -> dict[str, tuple[ParameterBytes, ...]]:
    """What moves of roles whose parameter sets are `weights`: all, what follows, and what calls change."""

    def chosen(role: str, names: Iterable[str]) -> tuple[ParameterBytes, ...]:
        every = set_names(role, parts)
        return tuple(weights[role][every.index(name)] for name in names)

    moving = dict(weights)
    for call in graph.calls:
        for role in changes(graph, call):
            names = changed_sets(graph, call, role, parts)
            moving[name_refreshing(graph, call, role, parts)] = chosen(role, names)
            if role != call.role:
                moving[name_mixing(role, call.model_role)] = chosen(call.model_role, names)
    return moving


def _halve(weights: dict[str, tuple[ParameterBytes, ...]]) -> dict[str, tuple[ParameterBytes, ...]]:
    return {what: tuple(map(halve, sets)) for what, sets in weights.items()}


def _share(
    rng: random.Random, candidates: dict[str, tuple[Candidate, ...]], homes: dict[str, str]
) -> tuple[tuple[str, ...], ...]:
    """Give some roles the same frozen weights, of a size that their layout alone decides."""
    roles = [role for role in homes if rng.random() < 0.5]
    if len(roles) < 2:
        return ()
    least = min(o.weights_bytes * _parts(o) for role in roles for o in candidates[homes[role]])
    for role in roles:
        candidates[homes[role]] = tuple(
            replace(o, base_bytes=0.0 if o.offload else 0.9 * least / _parts(o))
            for o in candidates[homes[role]]
        )
    return (tuple(roles),)


def _parts(candidate: Candidate) -> int:
    strategy = candidate.placement.strategy
    return strategy.tp * strategy.pp


def sampled_problem(rng: random.Random, combinations: int = 3000, *, offload: bool = True) -> Problem:
    """Sample a step on 2 to 8 devices with about `combinations` plans, sometimes short of memory."""
    graph = sampled_graph(rng)
    cluster = rng.choice(
        [Cluster.parse(text) for text in ("1x2", "1x4", "2x2", "1x8", "2x4", "4x2", "1x3+1x2", "1x2+2x1+1x4")]
    )
    parameters = {role: rng.choice([1.0, 2.0, 7.0, 13.0]) for role in graph.roles}
    most = max(2, int(combinations ** (1 / len(graph.calls))))
    homes = {max(graph.role_calls(r), key=lambda c: c.kind is Kind.TRAIN) for r in graph.roles}
    candidates = {}
    for call in graph.calls:
        if call.role is None:
            table = function_table(call, cluster, rng.choice([0.0, 2.0, 10.0, 50.0]))
        else:
            home, trained = call in homes, graph.trained(call.role)
            keeps = home and len(graph.role_calls(call.role)) > 1
            own = call.kind is Kind.TRAIN or (home and call.role in {a.role for a in graph.averages})
            table = strategy_table(
                call,
                parameters[call.role],
                cluster,
                home=home,
                trained=trained,
                keeps=keeps,
                dtypes=(None,) if own else (None, "bfloat16"),
            )
        table = [candidate for candidate in table if offload or not candidate.offload]
        chosen = rng.sample(table, min(most, len(table)))
        candidates[call.name] = tuple(chosen)
    transfer_speed = rng.choice([2.0, 2.0, 20.0])
    links = Links(3 * transfer_speed, transfer_speed, 1e-3)
    parts = {role: _part(rng) if graph.trained(role) else WHOLE for role in graph.roles}
    for average in graph.averages:
        parts[average.role] = parts[average.source]
    weights = _moving(graph, parts, {role: _weights(rng, p, parts[role]) for role, p in parameters.items()})
    transfers = LinkTransfers(cluster, weights, (links,) * cluster.nodes, _halve(weights))
    memory = rng.choice([30.0, 60.0, 1000.0]) * sum(parameters.values()) / cluster.size
    volumes = {(p.name, c.name): rng.choice([0.0, 0.3]) for c in graph.calls for p in producers(graph, c)}
    sharers = _share(rng, candidates, {role: graph.home(role).name for role in graph.roles})
    # Without a limit, and with one that sometimes forbids to offload.
    hosts = rng.choice([0.0, 0.0, 3.0]) * sum(parameters.values())
    exchange = ExchangeModel(links, cluster, volumes, items=rng.choice([0, 0, 1]))
    return Problem(
        host_memory_bytes=(hosts,) * cluster.nodes if hosts else (),
        sharers=sharers,
        graph=graph,
        cluster=cluster,
        candidates=candidates,
        transfers=transfers,
        memory_bytes=(memory,) * cluster.nodes,
        exchange=exchange,
        parts=parts,
    )
