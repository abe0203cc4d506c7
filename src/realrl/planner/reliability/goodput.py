"""Expected step time of a plan if failures end the run, with checkpoints, restarts, and repeated work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from realrl.dataflow.call import Kind
from realrl.plan.communicators import list_rank_sets
from realrl.plan.plan import Plan
from realrl.planner.cluster.failures import DAY, Failures
from realrl.planner.reliability.startup import StartEstimate, predict_start
from realrl.planner.reliability.storage import StorageTraffic, count_saved_bytes, count_traffic
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.scenario import Scenario
from realrl.program.lower import home_placements


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Rate of failures, and the seconds that checkpoints and restarts take."""

    rate: float
    """Failures per second."""
    stop: float
    """Seconds that training waits for a checkpoint."""
    write: float
    """Seconds from the start of a checkpoint until it is complete, `stop` included. If a failure comes earlier, the
    run restarts from the previous checkpoint."""
    restart: float
    """Seconds from a failure until training continues."""

    def __post_init__(self) -> None:
        if self.rate <= 0 or not 0 <= self.stop <= self.write or self.restart < 0:
            raise ValueError(f"{self} is not possible")


def expected_step(of: Interruptions, step: float, every: int) -> float:
    """Compute the expected seconds per step, including lost time, with a checkpoint after every `every` steps.

    Let M be the seconds that the run needs from one checkpoint to the next without a failure: `every` steps and a
    stop. After a failure, the run restarts from the checkpoint, and needs `every` steps and the whole writing time.
    The expected time between two checkpoints is therefore exp(rate (restart + write - stop)) (exp(rate M) - 1) /
    rate. The writing time that training does not wait for counts as a part of the restart. The result is infinite
    if failures come too fast.
    """
    between = of.rate * (every * step + of.stop)
    before = of.rate * (of.restart + of.write - of.stop)
    if before + between > 700:  # exp would overflow
        return math.inf
    return math.exp(before) * math.expm1(between) / (of.rate * every)


def best_interval(of: Interruptions, step: float) -> int:
    """Find the number of steps between checkpoints that minimises the expected step time.

    A checkpoint begins only after the previous one is complete.
    """
    least = max(1, math.ceil((of.write - of.stop) / step - 1e-9))
    # Restart and writing multiply the expected step by the same factor for all intervals. Without them, it is
    # convex in the interval.
    alone = replace(of, restart=0.0, write=of.stop)

    def grows(every: int) -> bool:
        return expected_step(alone, step, every + 1) >= expected_step(alone, step, every)

    low, high = least, 2 * least
    if grows(low):
        return low
    while not grows(high):
        low, high = high, 2 * high
    while high - low > 1:  # the expected step grows at high, but not yet at low
        middle = (low + high) // 2
        if grows(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Prediction of a run with failures and restarts."""

    failures_per_day: float
    undisturbed_seconds: float
    """Seconds of a step without failures and checkpoints."""
    step_seconds: float
    """Expected seconds of a step, including its share of checkpoints, restarts and repeated work."""
    every: int
    """Number of steps between checkpoints (`checkpoint.every`) that minimises `step_seconds`."""
    of: Interruptions
    checkpoint_bytes: float
    """Bytes of a checkpoint, on all ranks together."""
    restart: Mapping[str, float]
    """Seconds of a restart by part."""
    start: StartEstimate

    @property
    def share(self) -> float:
        """Share of the time spent on steps that are not lost. It is 0 if failures come too fast for any
        progress."""
        return self.undisturbed_seconds / self.step_seconds


def predict_goodput(scenario: Scenario, estimate: Estimate) -> Goodput | None:
    """Predict the expected step of a plan. Returns None if the scenario has no failures."""
    if scenario.failures is None:
        return None
    starts = {name: call.start for name, call in estimate.calls.items()}
    return predict_plan_goodput(scenario, scenario.failures, estimate.plan, estimate.step_seconds, starts)


def predict_plan_goodput(
    scenario: Scenario, failures: Failures, plan: Plan, step_seconds: float, starts: Mapping[str, float]
) -> Goodput:
    """Predict the expected step of a plan. `starts`: start of each call, in seconds after the start of the step.

    The model assumes that writing a checkpoint begins at the start of a step. If writing is asynchronous, training
    waits for it only before parameters change, which is at the start of the first train call.
    """
    traffic = count_traffic(scenario, home_placements(scenario.graph, plan))
    start = _predict_start(scenario, plan)
    restart = _restart_parts(failures, start, traffic)
    write = traffic.write_seconds
    hidden = min((starts[call.name] for call in scenario.graph.calls if call.kind is Kind.TRAIN), default=0.0)
    rate = failures.per_day(scenario.spec.size) / DAY
    of = Interruptions(
        rate=rate,
        stop=max(0.0, write - hidden) if failures.asynchronous else write,
        write=write,
        restart=sum(restart.values()),
    )
    every = best_interval(of, step_seconds)
    return Goodput(
        failures_per_day=rate * DAY,
        undisturbed_seconds=step_seconds,
        step_seconds=expected_step(of, step_seconds, every),
        every=every,
        of=of,
        checkpoint_bytes=float(traffic.written.sum()),
        restart=restart,
        start=start,
    )


def compute_expected_seconds(scenario: Scenario, estimate: Estimate) -> float:
    """Compute the seconds of a step for the comparison of plans: the expected seconds if there are failures."""
    goodput = predict_goodput(scenario, estimate)
    return estimate.step_seconds if goodput is None else goodput.step_seconds


def bound_expected_seconds(scenario: Scenario, step_seconds: float) -> float:
    """Bound the expected step of every plan from below, by a bound on steps without failures.

    Under any plan, a checkpoint contains every trained parameter once. Any restart notices the failure, starts
    processes, connects them, and reads the checkpoint. The bound assumes that training never waits for a
    checkpoint.
    """
    failures = scenario.failures
    if failures is None:
        return step_seconds
    spec = scenario.spec
    through = sum(group.nodes * group.storage_bytes_per_s for group in spec.groups)
    moved = count_saved_bytes(scenario) / through
    gpus = not any(group.device.cpu for group in spec.groups)
    start = predict_start({}, spec.size, gpus=gpus, efficiency=scenario.cost.efficiency)
    least = sum(start.seconds.values()) + failures.notice_seconds + moved
    known = failures.restart_seconds
    of = Interruptions(
        rate=failures.per_day(spec.size) / DAY,
        stop=0.0,
        write=moved,
        restart=least if known is None else known,
    )
    return expected_step(of, step_seconds, 1)


def _predict_start(scenario: Scenario, plan: Plan) -> StartEstimate:
    spec = scenario.spec
    models = [plan[call.name] for call in scenario.graph.calls if not call.is_function]
    return predict_start(
        list_rank_sets(models),
        spec.size,
        gpus=not any(group.device.cpu for group in spec.groups),
        efficiency=scenario.cost.efficiency,
    )


def _restart_parts(failures: Failures, start: StartEstimate, traffic: StorageTraffic) -> Mapping[str, float]:
    if failures.restart_seconds is not None:
        return {"as given": failures.restart_seconds}
    return {"notice": failures.notice_seconds, **start.seconds, "read": traffic.read_seconds}
