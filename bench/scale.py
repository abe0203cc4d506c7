"""Predictions for PPO of a 70B actor on 8 to 10,000 H100, and what of a run's own work grows with its ranks.

`plans` searches a plan for `recipes/reference/ppo-70b.yaml` on each number of nodes, with a batch that grows with
the devices (weak: 8 prompts a device) or stays (strong: 1,024 prompts), and predicts start, checkpoints, failures
at the rate of Llama 3's training, messages, and what slow devices cost. Planning seconds are processor time of one
core. All else is predicted: nothing of it was measured on GPUs.

`host` measures, in processor time of one core, what every rank or the first one does alone in a run
of so many ranks.

    OMP_NUM_THREADS=1 python bench/scale.py [--json FILE] [--cases plans host] [--nodes 16,128]
                                            [--batch weak strong]
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from results_file import ResultsFile

from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.communicators import group_splits, list_communicators, list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.failures import LLAMA_3, Failures
from realrl.planner.evaluate.shortage import DoesNotFit
from realrl.planner.reliability.goodput import bound_expected_seconds, predict_goodput
from realrl.planner.search.plan_search import find_best_plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.stragglers import Stragglers, simulate_stragglers
from realrl.program.instructions import Receive, ShareLengths
from realrl.program.lower import home_placements, kept_copies, lower
from realrl.program.validate import validate
from realrl.recipe.load import load_experiment
from realrl.runtime.measure.step_timer import StepTimes, TimedSpan
from realrl.runtime.measure.timing_log import TimingLog
from realrl.runtime.prepare.scenarios import make_scenario
from realrl.runtime.processes.messages import pack, unpack
from realrl.runtime.worker.store import Store

RECIPE = Path(__file__).parents[1] / "recipes" / "reference" / "ppo-70b.yaml"
NODES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1250)
PER_DEVICE, CONSTANT = 8, 1024
SLOW, JITTER = 1.1, 0.03
GRAPH = train_graph(minibatches=4)


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Processor time of this process for some work."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def plan(nodes: int, batch: str) -> dict[str, Any]:
    """Plan for so many nodes of 8 H100, and predict a run of it."""
    spec = ClusterSpec.parse(f"h100:{nodes}x8")
    prompts = PER_DEVICE * spec.size if batch == "weak" else CONSTANT
    experiment = load_experiment(str(RECIPE), [f"data.batch={prompts}", f"cluster={spec.name}"])
    scenario = replace(make_scenario(experiment, spec), failures=Failures(per_device_day=LLAMA_3 / 1000))
    begin = time.process_time()
    best = find_best_plan(scenario)
    planning = time.process_time() - begin
    found = describe_step(scenario, best.estimate)
    bound = bound_expected_seconds(scenario, best.lower_bound)
    return {
        "devices": spec.size,
        "prompts": prompts,
        "planning_cpu_s": round(planning, 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "gap": round(best.gap, 4),
        "expected_gap": round(max(0.0, 1 - bound / found["expected_step_s"]), 4),
        **found,
    }


def describe_step(scenario: Scenario, estimate: Estimate) -> dict[str, Any]:
    """Step, expected step, messages and slow devices of a plan."""
    found = predict_goodput(scenario, estimate)
    assert found is not None, "there are failures"
    slow = {
        name: simulate_stragglers(scenario, estimate.plan, stragglers).repeated_seconds
        / estimate.repeated_seconds
        for name, stragglers in (
            ("one_slow", Stragglers(slow={0: SLOW})),
            ("jitter", Stragglers(jitter=JITTER)),
        )
    }
    return {
        "step_s": round(estimate.step_seconds, 2),
        "repeated_s": round(estimate.repeated_seconds, 2),
        "tokens_per_s": round(estimate.tokens_per_second),
        "failures_per_day": round(found.failures_per_day, 3),
        "expected_step_s": round(found.step_seconds, 2),
        "goodput": round(found.share, 4),
        "checkpoint_every": found.every,
        "checkpoint_bytes": found.checkpoint_bytes,
        "checkpoint_write_s": round(found.of.write, 2),
        "checkpoint_stop_s": round(found.of.stop, 2),
        "restart_s": round(found.of.restart, 1),
        "restart": {name: round(seconds, 2) for name, seconds in found.restart.items()},
        "sockets": found.start.sockets,
        "communicators": found.start.communicators,
        "store_requests": found.start.store_requests,
        "slower_by": {name: round(factor - 1, 4) for name, factor in slow.items()},
        **describe_messages(scenario, estimate.plan),
        "plan": {name: str(placement) for name, placement in estimate.plan.placements.items()},
    }


def describe_messages(scenario: Scenario, found: Plan) -> dict[str, Any]:
    """Seconds of a step that ranks spend on rows, lengths and times, beside one controller for all rows.

    Through a controller every row passes twice, over the connections of one process, and each rank has a message
    for every call that it takes part in.
    """
    durations = Durations(scenario, found)
    homes = home_placements(scenario.graph, found)
    programs = lower(scenario.graph, found, homes, kept_copies(scenario.graph, found, homes), scenario.parts)
    instructions = {id(one): one for program in programs for one in program.instructions}
    seconds: dict[str, float] = {"rows": 0.0, "lengths": 0.0}
    for instruction in {*instructions.values()}:
        if isinstance(instruction, Receive):
            seconds["rows"] += durations(instruction)
        elif isinstance(instruction, ShareLengths):
            seconds["lengths"] += durations(instruction)
    exchange = scenario.cost.exchange(scenario.graph, scenario.workload)
    asked = sum(placement.mesh.size for placement in found.placements.values())
    volume = sum(exchange.volumes.values())
    controller = 2 * asked * exchange.links.latency_s + 2 * volume / exchange.links.node_bytes_per_s
    return {
        "rows_s": round(seconds["rows"], 3),
        "lengths_s": round(seconds["lengths"], 3),
        "reports_s": round(durations.reporting, 3),
        "controller_s": round(controller, 3),
        "rows_bytes": volume,
    }


def host(ranks: int) -> dict[str, Any]:
    """Measure what a rank does alone in a run of so many ranks, with a batch of 8 prompts for each."""
    whole = Placement(
        Mesh(0, ranks),
        Strategy(
            dp=ranks // 4,
            tp=4,
        ),
    )
    staged = Placement(Mesh(0, ranks), Strategy(dp=ranks // 16, tp=4, pp=4))
    places = {
        call.name: staged if call.role == "actor" and call.name.endswith("train") else whole
        for call in GRAPH.calls
    }
    found = Plan(Cluster(ranks // 8, 8), places)
    homes = home_placements(GRAPH, found)
    programs = lower(GRAPH, found, homes, kept_copies(GRAPH, found, homes))
    sets = list_rank_sets(places.values())
    store = Store(GRAPH, found)
    store.size = PER_DEVICE * ranks
    for key in GRAPH.keys:
        store.lengths[key] = tuple(1024 + i % 1024 for i in range(store.size))
    generate, train = GRAPH.call("actor.generate"), GRAPH.call("actor.train")
    return {
        "groups_s": round(cpu_seconds(lambda: list_rank_sets(places.values())), 3),
        "splits_s": round(cpu_seconds(lambda: group_splits(list_communicators(sets, ranks)[1:])), 3),
        "lower_s": round(
            cpu_seconds(lambda: lower(GRAPH, found, homes, kept_copies(GRAPH, found, homes))), 3
        ),
        "validate_s": round(cpu_seconds(lambda: validate(programs, GRAPH, homes)), 3),
        "divide_items_s": round(
            cpu_seconds(lambda: [store.assignment(call) for call in (generate, train)]), 3
        ),
        "find_receivers_s": round(cpu_seconds(lambda: [*find_receivers(store, ranks)]), 3),
        "reports_s": round(take_reports(ranks), 3),
    }


def find_receivers(store: Store, ranks: int) -> Iterator[int]:
    """Which rows go to which rank, as a sender finds out (`Exchange.send`)."""
    generate, train = store.graph.call("actor.generate"), store.graph.call("actor.train")
    place = store.plan[train.name]
    for receiver in range(ranks):
        there = {*store.items(train, place.item_index(receiver))}
        yield sum(item in there for item in store.items(generate, 0))


def take_reports(ranks: int) -> float:
    """Seconds to read the times of all ranks, and to align them."""
    spans = tuple(TimedSpan(call.name, float(i), i + 1.0, 1 << 30) for i, call in enumerate(GRAPH.calls))
    messages = [pack(StepTimes(0.0, 6.0, spans)) for _ in range(ranks)]

    def take() -> None:
        everyone = [unpack(message) for message in messages]
        TimingLog().add([one for one in everyone if isinstance(one, StepTimes)], [0.0] * ranks)

    return cpu_seconds(take)


def measure_store(clients: int = 2, requests: int = 20_000) -> dict[str, Any]:
    """Processor time of the store's process per request, asked by some processes at once."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60))
    found = {}
    for size in (100, 80_000):
        store.set("value", b"x" * size)
        command = [sys.executable, __file__, "--ask", str(store.port), str(requests)]
        ready = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(clients)
        ]
        for one in ready:
            assert one.stdout is not None and one.stdin is not None, "they are pipes"
            one.stdout.readline()
        begin = time.process_time()
        for one in ready:
            one.communicate(b"go\n")
        found[f"get_{size}_bytes_us"] = round(1e6 * (time.process_time() - begin) / clients / requests, 1)
    return found


def ask(port: int, requests: int) -> None:
    """Be a client of the store."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(requests):
        store.get("value")


def show(case: str, row: dict[str, Any]) -> None:
    """Print the numbers of a case in one line."""
    figures = (f"{name}={value}" for name, value in row.items() if not isinstance(value, dict))
    print(f"{case}: {' '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    cases = ("host", "plans")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--nodes", type=lambda text: [int(n) for n in text.split(",")], default=NODES)
    parser.add_argument("--batch", nargs="+", choices=("weak", "strong"), default=("weak", "strong"))
    parser.add_argument(
        "--ask", nargs=2, type=int, help="be a client of a store: its port, and how many requests"
    )
    arguments = parser.parse_args()
    if arguments.ask is not None:
        ask(*arguments.ask)
        return
    results = ResultsFile(arguments.json)

    def add(case: str, row: dict[str, Any]) -> None:
        results.add(case, row)
        show(case, row)

    if "host" in arguments.cases:
        add("host/store", measure_store())
        for nodes in (n for n in arguments.nodes if n >= 16):
            add(f"host/{8 * nodes}", host(8 * nodes))
    for batch in arguments.batch if "plans" in arguments.cases else ():
        for nodes in arguments.nodes:
            try:
                add(f"{batch}/{8 * nodes}", plan(nodes, batch))
            except (DoesNotFit, UserError) as error:
                add(f"{batch}/{8 * nodes}", {"refused": str(error)})


if __name__ == "__main__":
    main()
