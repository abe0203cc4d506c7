"""A dry run of the pipeline schedule, with interleaved stages or without."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from realrl.engine.pass_schedule import Action


class Pass(NamedTuple):
    """Forward or backward pass of a micro-batch on a stage in one turn."""

    kind: Literal["F", "B"]
    turn: int
    micro_batch: int


def list_groups(micro_batches: int, pp: int) -> list[range]:
    """Divide micro-batches into groups of at least `pp`, if there are as many, the larger groups first."""
    count = max(1, micro_batches // pp)
    groups, first = [], 0
    for i in range(count):
        size = micro_batches // count + (i < micro_batches % count)
        groups.append(range(first, first + size))
        first += size
    return groups


def list_passes(micro_batches: int, pp: int, vpp: int, stage: int, *, trains: bool = True) -> list[Pass]:
    """List the passes of a stage in order."""
    groups = list_groups(micro_batches, pp)
    forward = [Pass("F", turn, i) for group in groups for turn in range(vpp) for i in group]
    if not trains:
        return forward
    backward = [Pass("B", turn, i) for group in groups for turn in reversed(range(vpp)) for i in group]
    ahead = pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * len(groups[0])
    order = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        order += [one, other]
    return order + backward[len(forward[ahead:]) :]


def run_schedule(
    micro_batches: int,
    vpp: int,
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    *,
    hop: float = 0.0,
    waits: bool = False,
) -> float:
    """Return the seconds of a step.

    `forward` and `backward`: seconds of a micro-batch on each stage, all turns together. A message takes `hop`
    seconds, in which a stage that `waits` computes nothing.
    """
    pp = len(forward)
    orders = [list_passes(micro_batches, pp, vpp, stage, trains=backward is not None) for stage in range(pp)]
    ends: dict[tuple[str, int, int], float] = {}
    clock, done = [0.0] * pp, [0] * pp
    while any(done[stage] < len(orders[stage]) for stage in range(pp)):
        before = sum(done)
        for stage in range(pp):
            while done[stage] < len(orders[stage]):
                kind, turn, i = orders[stage][done[stage]]
                place, last = turn * pp + stage, pp * vpp - 1
                needed = None if place == 0 else ("F", place - 1, i)
                if kind == "B":
                    needed = ("F", place, i) if place == last else ("B", place + 1, i)
                if needed is not None and needed not in ends:
                    break
                lag = hop if needed is not None and needed[1] != place else 0.0
                arrives = ends[needed] if needed is not None else 0.0
                start = max(clock[stage], arrives) + lag if waits else max(clock[stage], arrives + lag)
                seconds = forward if kind == "F" or backward is None else backward
                clock[stage] = ends[kind, place, i] = start + seconds[stage] / vpp
                done[stage] += 1
        assert sum(done) > before, "the schedule has no deadlock"
    return max(clock)


def run_actions(
    actions: Sequence[Sequence[Action]], vpp: int, seconds: Mapping[str, Sequence[float]]
) -> float:
    """Return the seconds of a step with these actions of each stage.

    `seconds`: time of a micro-batch on each stage by kind of action, all turns together. Messages take no time.
    """
    pp, ends = len(actions), dict[tuple[str, int, int], float]()
    clock, left = [0.0] * pp, [list(of_stage) for of_stage in actions]
    while any(left):
        before = sum(map(len, left))
        for stage, of_stage in enumerate(left):
            while of_stage:
                action = of_stage[0]
                place, i = action.virtual * pp + stage, action.micro_batch
                needs = {
                    "F": ("F", place - 1, i),
                    "B": ("F", place, i) if place == pp * vpp - 1 else ("B", place + 1, i),
                    "W": ("B", place, i),
                }
                needed = needs[action.kind] if action.kind != "F" or place else None
                if needed is not None and needed not in ends:
                    break
                start = max(clock[stage], 0.0 if needed is None else ends[needed])
                clock[stage] = ends[action.kind, place, i] = start + seconds[action.kind][stage] / vpp
                of_stage.pop(0)
        assert sum(map(len, left)) < before, "the schedule has no deadlock"
    return max(clock)


def count_most(micro_batches: int, pp: int, stage: int, sizes: Sequence[int]) -> int:
    """Count the most that a stage keeps at a time. `sizes`: what a pass of each turn keeps."""
    held = most = 0
    for one in list_passes(micro_batches, pp, len(sizes), stage):
        held += sizes[one.turn] if one.kind == "F" else -sizes[one.turn]
        most = max(most, held)
    assert held == 0
    return most
