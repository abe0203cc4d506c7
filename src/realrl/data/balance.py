"""Assignment of items to data-parallel ranks, mini-batches and micro-batches.

All functions are pure functions of costs, so every rank computes the same assignment by itself. An item is named by
its position in `costs`. A cost is a number of tokens, or the time of some tokens in units of one token. It is never
negative.
"""

import heapq
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np


def partition(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Split items into `parts` of nearly equal cost. Positions ascend within a part.

    Items are taken longest first, and each goes to the cheapest part so far (Graham 1969, "Bounds on
    multiprocessing timing anomalies"). With at least `parts` items, no part is empty. Raises ValueError if `parts`
    is below 1.
    """
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    members: list[list[int]] = [[] for _ in range(parts)]
    emptiest = [(0, 0, part) for part in range(parts)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, count, part = emptiest[0]
        members[part].append(item)
        heapq.heapreplace(emptiest, (load + costs[item], count + 1, part))
    return [sorted(part) for part in members]


def partition_samples(costs: Sequence[int], samples: int, parts: int) -> list[list[int]]:
    """Split items into `parts` by whole prompts. Items i * samples to (i + 1) * samples - 1 share a prompt.

    Every part gets the same number of whole prompts. Prompts are taken longest first, and each goes to the cheapest
    part with room. The remaining, shortest prompts are cut into runs of samples. So the numbers of items of two
    parts differ by at most one, which matters most because generated lengths are unknown. With fewer items than
    parts, some parts are empty.
    """
    prompts = [range(i, min(i + samples, len(costs))) for i in range(0, len(costs), samples)]
    prompts.sort(key=lambda items: (-len(items), -sum(costs[i] for i in items)))
    complete = sum(len(items) == samples for items in prompts)
    each = complete // parts
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for items in prompts[: each * parts]:
        part = min((p for p in range(parts) if len(members[p]) < each * samples), key=lambda p: (loads[p], p))
        members[part].extend(items)
        loads[part] += sum(costs[i] for i in items)
    rest = [item for items in prompts[each * parts :] for item in items]
    # The cheapest parts come last and get the longer runs.
    emptiest_last = sorted(range(parts), key=lambda p: (-loads[p], p))
    for part, run in zip(emptiest_last, minibatch_slices(len(rest), parts), strict=True):
        members[part].extend(rest[i] for i in run)
    return [sorted(part) for part in members]


def partition_shared(
    costs: Sequence[int], parts: int, shared: Sequence[int], prompts: Sequence[int]
) -> list[list[int]]:
    """Split items like `partition`, if a part computes the tokens that samples of a prompt share only once.

    shared: the tokens of an item that it shares with the other items of its prompt. prompts: the number of each
    item's prompt, ascending. The samples of a prompt stay together in runs: whole, halves, quarters, and so on to
    single samples. The length of runs with the lowest cost of the most expensive part is chosen.
    """
    groups = [[*items] for _, items in groupby(range(len(costs)), key=lambda i: prompts[i])]
    size = max(map(len, groups), default=1)
    found: list[list[int]] = []
    lowest = -1
    while True:
        runs = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
        if len(runs) >= parts or size == 1:
            loads = [_count_cost(run, costs, shared, prompts) for run in runs]
            split = [sorted(i for run in part for i in runs[run]) for part in partition(loads, parts)]
            highest = max(_count_cost(part, costs, shared, prompts) for part in split)
            if lowest < 0 or highest < lowest:
                found, lowest = split, highest
        if size == 1:
            return found
        size = -(-size // 2)


def _count_cost(
    items: Sequence[int], costs: Sequence[int], shared: Sequence[int], prompts: Sequence[int]
) -> int:
    """Add up the costs of ascending items; what neighbours share counts once."""
    once = sum(shared[i] for before, i in pairwise(items) if prompts[before] == prompts[i])
    return sum(costs[i] for i in items) - once


def minibatch_slices(n: int, minibatches: int) -> list[range]:
    """Divide the positions 0 to n - 1 into consecutive mini-batches whose sizes differ by at most one."""
    return [range(n * i // minibatches, n * (i + 1) // minibatches) for i in range(minibatches)]


def assign(
    costs: Sequence[int],
    *,
    minibatches: int,
    dp: int,
    shared: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Assign positions to data-parallel ranks and mini-batches: [dp][minibatch] -> positions.

    Each mini-batch is partitioned over dp separately, so its content does not depend on dp. For `shared` and
    `prompts`, see `partition_shared`; by default, each item has a prompt of its own. Raises ValueError if a
    mini-batch has fewer items than dp.
    """
    shared, prompts = shared or [0] * len(costs), prompts or range(len(costs))
    out: list[list[list[int]]] = [[] for _ in range(dp)]
    for positions in minibatch_slices(len(costs), minibatches):
        if len(positions) < dp:
            raise ValueError(f"a mini-batch of {len(positions)} items cannot be split over dp={dp}")
        of_items, *of_prompts = ([values[i] for i in positions] for values in (costs, shared, prompts))
        for rank, part in enumerate(partition_shared(of_items, dp, *of_prompts)):
            out[rank].append([positions[i] for i in part])
    return out


def join_neighbours(costs: Sequence[int], joined: Sequence[bool], most: int) -> list[range]:
    """Join items to runs of at most `most` tokens. `joined`: whether an item belongs to the one before."""
    runs: list[range] = []
    load = 0
    for item, cost in enumerate(costs):
        if item and joined[item] and load + cost <= most:
            runs[-1] = range(runs[-1].start, item + 1)
            load += cost
        else:
            runs.append(range(item, item + 1))
            load = cost
    return runs


def micro_batches(costs: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items into groups of at most `budget` tokens. Positions ascend within a group.

    Items are taken longest first, and each goes into the youngest group with room. Groups then hold items of
    similar length (attention pads within length buckets), and short items fill gaps before a new group is opened.
    An item above the budget gets a group of its own. Raises ValueError for budget < 1.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens holds nothing")
    groups: list[list[int]] = []
    room = np.zeros(len(costs), dtype=np.int64)
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        fitting = np.flatnonzero(room[: len(groups)] >= costs[item])
        group = int(fitting[-1]) if len(fitting) else len(groups)
        if group == len(groups):
            groups.append([])
            room[group] = budget
        groups[group].append(item)
        room[group] -= costs[item]
    return [sorted(group) for group in groups]


def even_micro_batches(costs: Sequence[int], budget: int, *, stages: int, per_stage: int) -> list[list[int]]:
    """Pack items into micro-batches of nearly equal size, for a pipeline.

    Their number is a multiple of `stages`. It is at least `per_stage` * `stages`, and at least the number of
    `micro_batches` with this budget. It is lower if there are few items, or if one long item determines the size.
    """
    if not any(costs):
        return micro_batches(costs, budget)
    count = max(len(micro_batches(costs, budget)), stages * per_stage)
    count = min(len(costs), -(-count // stages) * stages)
    size = min(budget, max(max(costs), -(-sum(costs) // count)))
    while len(groups := micro_batches(costs, size)) > count:
        size = min(budget, size + max(1, size // 64))
    return groups
