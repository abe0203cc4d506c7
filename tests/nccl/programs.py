"""What ranks post through whole programs: calls as recorded, reallocations as scheduled, messages between hosts."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from realrl.dataflow.graph import DataflowGraph
from realrl.layout.layout import build_layout
from realrl.layout.limits import GPU_MESSAGES
from realrl.layout.routing.chunks import RankScheduler, group_messages
from realrl.layout.routing.routes import reallocate
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.program.instructions import (
    Instruction,
    Load,
    Offload,
    Program,
    Reallocate,
    Receive,
    Report,
    Run,
    Send,
    ShareLengths,
)
from tests.nccl.calls import SHAPE, record_call
from tests.nccl.simulator import COMPUTE, Action, Collective, HostReceive, HostSend, Launch, Messages, Sync

LIMITS = replace(GPU_MESSAGES, message_bytes=600, alone_bytes=100)
"""As small beside this model as those of GPUs are beside others."""


def random_plan(graph: DataflowGraph, cluster: Cluster, random: Random) -> Plan:
    """Make a plan with a random placement for every call."""
    return Plan(cluster, {call.name: random_placement(cluster, random) for call in graph.calls})


def random_placement(cluster: Cluster, random: Random) -> Placement:
    size = random.choice(
        [n for n in range(1, cluster.size + 1) if cluster.size % n == 0 or random.random() < 0.3]
    )
    mesh = Mesh(random.randrange(0, cluster.size - size + 1), size)
    tp = random.choice([n for n in (1, 2, 4) if size % n == 0])
    pp = random.choice([n for n in (1, 2, 4) if size // tp % n == 0])
    strategy = Strategy(dp=size // tp // pp, tp=tp, pp=pp, micro_batch_tokens=random.choice([20, 30]))
    mesh.check(cluster)
    return Placement(mesh, strategy)


def post_program(graph: DataflowGraph, cluster: Cluster, program: Program) -> list[Action]:
    """List what a rank posts in a step."""
    poster = _Poster(graph, cluster, program.rank)
    for instruction in program.instructions:
        poster.post(instruction)
    return poster.actions


class _Poster:
    def __init__(self, graph: DataflowGraph, cluster: Cluster, rank: int) -> None:
        self._graph, self._cluster, self._rank = graph, cluster, rank
        self._launched = 0
        self.actions: list[Action] = []

    def post(self, instruction: Instruction) -> None:
        """Add what an instruction posts."""
        match instruction:
            case Run(call, role, placement):
                assert role is not None, "no functions here"
                self._call(
                    record_call(
                        self._graph.call(call).kind, placement.strategy, self._rank - placement.mesh.first
                    ),
                    placement,
                )
            case Reallocate():
                self._reallocate(instruction)
            case Load() | Offload():
                self.actions.append(Sync())
            case Send(number, _, _, _, receivers):
                self.actions.append(Sync())
                self._send(receivers, f"rows {number}")
            case Receive(number, _, _, _, senders):
                self._receive(senders, f"rows {number}")
            case ShareLengths(key, _, outputs, readers):
                self._gather(outputs, sorted({*outputs, *readers}), f"lengths of {key}")
            case Report(call, senders, receiver):
                if self._rank in senders:
                    self._send((receiver,), f"metrics of {call}")
                else:
                    self._receive(senders, f"metrics of {call}")

    def _call(self, recorded: tuple[Action, ...], placement: Placement) -> None:
        """Add a recorded call, with the ranks of its mesh."""
        first, base = placement.mesh.first, self._launched
        for action in recorded:
            assert isinstance(action, Launch)
            self._launch(_moved(action, first, base))

    def _reallocate(self, instruction: Reallocate) -> None:
        source, target = (
            build_layout(SHAPE, "lm", placement) for placement in (instruction.source, instruction.target)
        )
        ranks = sorted({*source.placement.ranks, *target.placement.ranks})
        self._gather(ranks, ranks, f"digests of {instruction.role}")
        moved = reallocate(source, target, self._cluster)
        schedule = RankScheduler(moved, self._rank, 4, limits=LIMITS).schedule()
        comm = "-".join(map(str, range(self._cluster.size)))
        for group in group_messages(schedule.messages, LIMITS):
            sends, receives = (
                tuple((m.peer, m.numel) for m in group if m.sends == sent) for sent in (True, False)
            )
            self._launch(Launch(comm, Messages(comm, sends, receives), self._computed()))
            self._launch(Launch(COMPUTE, None, (self._launched - 1,)))

    def _computed(self) -> tuple[int, ...]:
        launches = [action for action in self.actions if isinstance(action, Launch)]
        return tuple(i for i, action in enumerate(launches) if action.stream == COMPUTE)[-1:]

    def _launch(self, launch: Launch) -> None:
        self.actions.append(launch)
        self._launched += 1

    def _send(self, peers: Iterator[int] | tuple[int, ...], tag: str) -> None:
        self.actions += [HostSend(peer, tag) for peer in peers if peer != self._rank]

    def _receive(self, peers: tuple[int, ...], tag: str) -> None:
        self.actions += [HostReceive(peer, tag) for peer in peers if peer != self._rank]

    def _gather(self, senders: "tuple[int, ...] | list[int]", readers: list[int], tag: str) -> None:
        """Gather something on the first sender, which then sends it to all readers."""
        first = senders[0]
        if self._rank == first:
            self._receive(tuple(senders), tag)
            self._send(tuple(readers), f"all {tag}")
        else:
            if self._rank in senders:
                self._send((first,), tag)
            self._receive((first,), f"all {tag}")


def _moved(launch: Launch, first: int, base: int) -> Launch:
    """Move a launch to a mesh that starts at rank `first`, after `base` launches."""

    def comm(name: str) -> str:
        return "-".join(str(int(rank) + first) for rank in name.split("-"))

    operation = launch.operation
    if isinstance(operation, Collective):
        root = operation.name
        if "from" in root:
            *text, rank = root.split()
            root = " ".join([*text, str(int(rank) + first)])
        members = tuple(rank + first for rank in operation.members)
        operation = Collective(comm(operation.comm), members, root)
    elif isinstance(operation, Messages):
        sends, receives = (
            tuple((peer + first, size) for peer, size in some)
            for some in (operation.sends, operation.receives)
        )
        operation = Messages(comm(operation.comm), sends, receives)
    stream = launch.stream if launch.stream == COMPUTE else comm(launch.stream)
    return Launch(stream, operation, tuple(number + base for number in launch.after))
