"""Balance divisible work so that the largest load is as small as possible."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_TOLERANCE = 1e-4
"""Loads that differ by less than this fraction of the largest count as equal."""


@dataclass(frozen=True)
class Task:
    """Work that can be divided among `options` (ranks or nodes) in any proportion. The options in `others` may take
    a part of it if the first ones are too busy."""

    work: float
    options: tuple[int, ...]
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Capacity:
    """Work that options already have, and the speeds of options whose speed is not 1."""

    busy: Mapping[int, float] = field(default_factory=dict)
    speed: Mapping[int, float] = field(default_factory=dict)


def balance(tasks: Sequence[Task], floor: float, capacity: Capacity | None = None) -> list[dict[int, float]]:
    """Distribute each task over its options. Returns a mapping option -> amount for each task, without zeros.

    The largest load (work / speed) is as small as possible, or at most `floor` if that is larger. Loads up to the
    floor cost nothing, so a few large shares are preferred to many equal ones. Tasks with the same options are
    distributed one after the other, so that most tasks go to a single option.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for index, task in enumerate(tasks):
        groups.setdefault((task.options, task.others), []).append(index)
    pools = [Task(sum(tasks[i].work for i in members), *key) for key, members in groups.items()]
    shared = _Shared(pools, floor, capacity or Capacity())
    shared.fill()
    shared.level()
    result: list[dict[int, float]] = [{} for _ in tasks]
    for members, shares in zip(groups.values(), shared.shares, strict=True):
        for index, part in zip(members, _deal([tasks[i].work for i in members], shares), strict=True):
            result[index] = part
    return result


def _deal(works: Sequence[float], shares: dict[int, float]) -> Iterable[dict[int, float]]:
    """Divide the shares of a pool (tasks with the same options) among its tasks, in order."""
    left = [(option, amount) for option, amount in sorted(shares.items(), reverse=True) if amount > 0]
    slack = 1e-9 * sum(works)
    option = left[-1][0] if left else 0
    for work in works:
        part: dict[int, float] = {}
        rest = work
        while rest > slack and left:
            option, amount = left.pop()
            used = amount if amount <= rest + slack else rest
            part[option] = used
            rest -= used
            if amount - used > slack:
                left.append((option, amount - used))
        if work > 0 and not part:
            # Otherwise, rounding would lose a task that is tiny compared with the other tasks.
            part[option] = work
        yield part


class _Shared:
    """Loads of the options, and shares of the pools, while work is balanced."""

    def __init__(self, pools: Sequence[Task], floor: float, capacity: Capacity) -> None:
        self.pools = pools
        self.limit = floor
        options = sorted({o for pool in pools for o in (*pool.options, *pool.others)})
        self.speed = {o: capacity.speed.get(o, 1.0) for o in options}
        self.loads = {o: capacity.busy.get(o, 0.0) / self.speed[o] for o in options}
        self.shares: list[dict[int, float]] = [{} for _ in pools]

    def fill(self) -> None:
        """Distribute the work greedily: pools with the fewest options first, each over its least loaded options."""
        for index in sorted(range(len(self.pools)), key=lambda i: self._freedom(self.pools[i])):
            pool = self.pools[index]
            left = pool.work
            if pool.others:
                room = sum(max(0.0, self.limit - self.loads[o]) * self.speed[o] for o in pool.options)
                left -= self._pour(index, pool.options, min(left, room))
            self._pour(index, pool.options + pool.others, left)

    def level(self) -> None:
        """Move work from loads above the limit to loads below it; raise the limit only if nothing else helps."""
        while True:
            busiest = max(self.loads, key=self.loads.__getitem__, default=None)
            if busiest is None or self.loads[busiest] <= self.limit * (1 + _TOLERANCE):
                return
            reached = self._reach(busiest)
            free = next((o for o in reached if self.loads[o] < self.limit * (1 - _TOLERANCE)), None)
            if free is not None:
                self._move(reached, free)
                continue
            # No option in reach has room, so the limit must rise, at least to the mean load in reach. The
            # step above the old limit keeps the loop going if rounding hides the difference.
            work = sum(self.loads[o] * self.speed[o] for o in reached)
            mean = work / sum(self.speed[o] for o in reached)
            self.limit = max(self.limit * (1 + _TOLERANCE / 2), mean)

    @staticmethod
    def _freedom(pool: Task) -> int:
        return len(pool.options) + len(pool.others)

    def _pour(self, index: int, options: tuple[int, ...], amount: float) -> float:
        """Add `amount` of work to the least loaded options, which raises them to a common level; return the
        amount."""
        if amount <= 0:
            return 0.0
        # Fill the lowest loads first; stop when the common level is below the next higher load.
        order = sorted(options, key=self.loads.__getitem__)
        total = amount
        speed = 0.0
        for count, option in enumerate(order, start=1):
            total += self.loads[option] * self.speed[option]
            speed += self.speed[option]
            level = total / speed
            if count == len(order) or level <= self.loads[order[count]]:
                break
        for option in order[:count]:
            self._give(index, option, (level - self.loads[option]) * self.speed[option])
        return amount

    def _give(self, index: int, option: int, amount: float) -> None:
        self.shares[index][option] = self.shares[index].get(option, 0.0) + amount
        self.loads[option] += amount / self.speed[option]

    def _reach(self, start: int) -> dict[int, tuple[int, int] | None]:
        """Find the options that can take over work of `start`, directly or in a chain. Returns option -> (donor,
        pool), nearest first."""
        reached: dict[int, tuple[int, int] | None] = {start: None}
        queue = deque([start])
        seen: set[int] = set()
        while queue:
            donor = queue.popleft()
            for index, shares in enumerate(self.shares):
                if index in seen or shares.get(donor, 0.0) <= 0:
                    continue
                seen.add(index)
                for option in (*self.pools[index].options, *self.pools[index].others):
                    if option not in reached:
                        reached[option] = (donor, index)
                        queue.append(option)
        return reached

    def _move(self, reached: dict[int, tuple[int, int] | None], free: int) -> None:
        """Move as much work as possible along the chain from the busiest option to `free`."""
        chain: list[tuple[int, int, int]] = []
        taker = free
        while (step := reached[taker]) is not None:
            chain.append((step[0], step[1], taker))
            taker = step[0]
        amount = min(
            (self.loads[taker] - self.limit) * self.speed[taker],
            (self.limit - self.loads[free]) * self.speed[free],
            *(self.shares[index][donor] for donor, index, _ in chain),
        )
        for donor, index, receiver in chain:
            self._give(index, donor, -amount)
            self._give(index, receiver, amount)
