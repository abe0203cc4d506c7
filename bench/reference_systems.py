"""Predicted seconds of a PPO step under the plans of four systems beside the published ones of the ReaL paper.

The settings are those of `bench/reference_table.py`: 12 published rows, each with the seconds of DeepSpeed-Chat
(`DSChat`), OpenRLHF, the paper's heuristic plan and its searched one. Here DeepSpeed-Chat and OpenRLHF are the
presets of these names (`plan/zero_systems.py`), with recomputation and the micro-batch, of a few sizes, that is
fastest; generation takes as many sequences at a time as there are. No number is fitted to, or read from, the
published seconds of either: their engines are taken to have the host of the paper's engine (`ENGINE` of
`bench/reference_table.py`), whose constants were read from the heuristic rows, or that of this project. What the
engines do otherwise (padding to full lengths, generation batch by batch as memory allows, kernels of 2024, data
sent through a controller) is not modelled; what a plan cannot hold in 80 GB is marked.

    python bench/reference_systems.py [--json FILE]
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from reference_table import ENGINE, HEURISTIC, SEARCHED, Setting, predict, settings

from realrl.config.errors import UserError
from realrl.dataflow.call import Kind
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario

SYSTEMS = {"DSChat": "deepspeed-chat", "OpenRLHF": "openrlhf"}
"""Name in the published rows -> preset."""
MICRO_BATCHES = (4096, 16384)


@dataclass(frozen=True)
class Predicted:
    """Prediction of a system on a setting, with one engine."""

    seconds: float
    peak_bytes: int
    fits: bool


def list_plans(scenario: Scenario, preset: str, setting: Setting) -> Iterator[Plan]:
    """List a preset's plans with each size of micro-batch."""
    shapes = {role: model.shape for role, model in scenario.models.items()}
    for tokens in MICRO_BATCHES:
        plan = PRESETS[preset](scenario.graph, scenario.spec.cluster, tokens, shapes)
        plan = plan.recomputing(scenario.graph)
        placements = dict(plan.placements)
        for call in scenario.graph.calls:
            if call.kind is Kind.GENERATE:
                place = plan[call.name]
                each = -(-setting.tokens // place.strategy.dp)
                strategy = replace(place.strategy, micro_batch_tokens=each)
                placements[call.name] = replace(place, strategy=strategy)
        yield replace(plan, placements=placements)


def predict_system(setting: Setting, preset: str, efficiency: Efficiency) -> Predicted | None:
    """Predict the fastest of a preset's plans; None where mini-batches have too few records for its ranks."""
    scenario = setting.scenario(efficiency)
    try:
        found: list[Estimate] = [
            estimate_plan(scenario, plan) for plan in list_plans(scenario, preset, setting)
        ]
    except UserError:
        return None
    best = min(found, key=lambda estimate: (not estimate.fits, estimate.repeated_seconds))
    return Predicted(best.repeated_seconds, best.peak_bytes, best.fits)


def row_of(setting: Setting) -> dict[str, Any]:
    """A row of the table."""
    own = predict(setting, ENGINE, searching=True)
    assert own.found is not None
    predicted = {HEURISTIC: own.heuristic.seconds, SEARCHED: own.found.searched.evaluation.seconds}
    fits = {HEURISTIC: own.heuristic.fits, SEARCHED: True}
    this_engine = {}
    for system, preset in SYSTEMS.items():
        found, own_host = (predict_system(setting, preset, engine) for engine in (ENGINE, Efficiency()))
        if found is not None and own_host is not None:
            predicted[system], fits[system] = found.seconds, found.fits
            this_engine[system] = own_host.seconds
    published = {system: setting.published(system) for system in (*SYSTEMS, HEURISTIC, SEARCHED)}
    wrong = [
        f"{a} and {b}"
        for a, b in combinations(predicted, 2)
        if (published[a] - published[b]) * (predicted[a] - predicted[b]) < 0
    ]
    return {
        "setting": setting.name,
        "published": published,
        "predicted": {system: round(seconds, 2) for system, seconds in predicted.items()},
        "this_engine": {system: round(seconds, 2) for system, seconds in this_engine.items()},
        "fits": fits,
        "wrong_order": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    systems = (*SYSTEMS, HEURISTIC, SEARCHED)
    print(f"{'setting':30} " + " ".join(f"{system:>22}" for system in systems) + "  other order")
    rows = []
    for setting in settings():
        row = row_of(setting)
        rows.append(row)
        cells = [
            f"{row['published'][s]:8.1f} {row['predicted'][s]:6.1f}{' ' if row['fits'][s] else '!'}"
            f"{row['predicted'][s] / row['published'][s] - 1:+6.0%}"
            if s in row["predicted"]
            else f"{row['published'][s] or '-':>8} {'-':>6} {'-':>6}"
            for s in systems
        ]
        print(f"{row['setting']:30} " + " ".join(cells) + f"  {'; '.join(row['wrong_order'])}", flush=True)
    print(
        "published, predicted, error; ! does not fit into 80 GB as predicted; - has fewer records in a mini-batch"
        " than data-parallel ranks"
    )
    for system in SYSTEMS:
        errors = {
            engine: [
                row[engine][system] / row["published"][system] - 1 for row in rows if system in row[engine]
            ]
            for engine in ("predicted", "this_engine")
        }
        print(
            f"{system}: errors {min(errors['predicted']):+.0%} to {max(errors['predicted']):+.0%}, mean of their"
            f" sizes {np.mean(np.abs(errors['predicted'])):.0%}; with this project's host"
            f" {np.mean(np.abs(errors['this_engine'])):.0%}"
        )
    print(
        f"systems are in the published order in {sum(not row['wrong_order'] for row in rows)} of {len(rows)} rows"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
