"""Coverage of 90 % intervals over the stored rows of `bench/reality.py`, measured before there were intervals.

The profiles of those runs are gone. So intervals are computed relative to the prediction: errors are those of
profiled times, and the shares of a step's terms those that the data sheet of a CPU predicts. A row counts as
inside if measured over predicted seconds are. Also, of each case, by how much the fastest of the three plans with
the shortest predictions is slower than the fastest of all. Takes seconds, and measures nothing.

    python bench/intervals.py
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

from reality import CLUSTER, SEARCHED, TRIED, World, make_plans

from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.uncertainty import sampled_steps
from realrl.planner.uncertainty.ranking import StepSampler, find_interval
from realrl.planner.uncertainty.sources import CallErrors
from realrl.planner.uncertainty.spreads import SPREADS
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import make_scenario

RESULTS = Path(__file__).parent / "results"
FILES = {"EPYC": "reality.json", "Xeon": "reality-xeon.json"}
LIKE_SEARCHED = "dp"
"""Plan whose relative interval counts for the searched one, which was not kept."""


def find_relative_intervals(world: World, size: str) -> dict[str, tuple[float, float]]:
    """Find the intervals of all plans of a size, relative to their predictions, with errors of profiled times."""
    experiment = load_experiment(str(world.recipe(size)), ["device=cpu"])
    scenario = make_scenario(experiment, ClusterSpec.parse(f"cpu:{CLUSTER}"))
    sampler, found = StepSampler(scenario), {}
    profiled = CallErrors("profile", SPREADS["profile"])
    with patch.object(sampled_steps, "find_call_errors", lambda *_: profiled):
        for name, plan in make_plans("ppo", scenario.graph).items():
            interval = find_interval(sampler(plan).repeated)
            predicted = estimate_plan(scenario, plan).repeated_seconds
            found[name] = (interval.low / predicted, interval.high / predicted)
    return {**found, SEARCHED: found[LIKE_SEARCHED]}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        world, intervals = World(Path(scratch), 1), {}
        for machine, file in FILES.items():
            cases = defaultdict(list)
            for row in json.loads((RESULTS / file).read_text())["rows"]:
                cases[row.get("size", "small")].append(row)
            for size, rows in cases.items():
                if size not in intervals:
                    intervals[size] = find_relative_intervals(world, size)
                ratios = [(row["measured"] / row["predicted"], *intervals[size][row["plan"]]) for row in rows]
                inside = sum(low <= ratio <= high for ratio, low, high in ratios)
                tried = sorted(rows, key=lambda row: row["predicted"])[:TRIED]
                best, best_tried = (min(row["measured"] for row in some) for some in (rows, tried))
                print(
                    f"{machine} {size}: {inside} of {len(rows)} inside; best of {TRIED} tried"
                    f" {best_tried / best - 1:.1%} slower than the fastest"
                )


if __name__ == "__main__":
    main()
