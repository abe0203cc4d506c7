"""Predicted seconds of a PPO step of four systems beside the published ones of the ReaL paper.

The settings are those of `bench/reference_table.py`: 12 published rows, each with the seconds of DeepSpeed-Chat
(`DSChat`), OpenRLHF, the paper's heuristic plan and its searched one. `predicted` counts what the public code of
DeepSpeed-Chat and OpenRLHF did in mid-2024 (`reference_baselines.py`, which names the sources); `plan` is what the
presets of these names (`plan/zero_systems.py`) would take on this project's engine, with recomputation, the faster
of two micro-batches, and the host of the paper's engine (`ENGINE` of `bench/reference_table.py`). No number is
fitted to, or read from, the published seconds of either system. `!` marks what does not fit into 80 GB.

Beside them stand DeepSpeed-Chat's own figures, which its authors measured with OPT on one node and on eight nodes
of 8 A100 (microsoft/DeepSpeed, `blogs/deepspeed-chat/README.md`, tables 1 and 2): hours for 131,900 sequences of
256 + 256 tokens, of which a step takes 1,024 at most, with critic and reward model of 350M. Llama's sizes stand for
OPT's (34B for 30B, 70B for 66B), and Qwen2.5 0.5B for the critic; there are four mini-batches here, too.

    python bench/reference_systems.py [--json FILE]
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from reference_baselines import Step, predict_deepspeed_chat, predict_openrlhf
from reference_table import ENGINE, HEURISTIC, SEARCHED, Setting, predict, settings

from realrl.config.errors import UserError
from realrl.dataflow.call import Kind
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario

SYSTEMS = {"DSChat": "deepspeed-chat", "OpenRLHF": "openrlhf"}
"""Name in the published rows -> preset."""
PREDICTORS: dict[str, Callable[[Setting], Step | None]] = {
    "DSChat": predict_deepspeed_chat,
    "OpenRLHF": predict_openrlhf,
}
MICRO_BATCHES = (4096, 16384)
OWN_FIGURES = ((8, 7, 4.1), (8, 13, 9.0), (8, 34, 18.0), (64, 13, 1.25), (64, 34, 4.0), (64, 70, 7.5))
"""DeepSpeed-Chat's own: GPUs, the size of the actor, hours."""
OWN_SEQUENCES, OWN_BATCH = 131_900, 1024


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


def predict_plan(setting: Setting, preset: str) -> float | None:
    """Predict the fastest of a preset's plans; None where mini-batches have too few records for its ranks."""
    scenario = setting.scenario(ENGINE)
    try:
        found: list[Estimate] = [
            estimate_plan(scenario, plan) for plan in list_plans(scenario, preset, setting)
        ]
    except UserError:
        return None
    return min(found, key=lambda estimate: (not estimate.fits, estimate.repeated_seconds)).repeated_seconds


def row_of(setting: Setting) -> dict[str, Any]:
    """A row of the table."""
    own = predict(setting, ENGINE, searching=True)
    assert own.found is not None
    predicted = {HEURISTIC: own.heuristic.seconds, SEARCHED: own.found.searched.evaluation.seconds}
    fits = {HEURISTIC: own.heuristic.fits, SEARCHED: True}
    plans, steps = {}, {}
    for system, preset in SYSTEMS.items():
        step, plan = PREDICTORS[system](setting), predict_plan(setting, preset)
        if step is not None and plan is not None:
            predicted[system], fits[system], plans[system], steps[system] = (
                step.seconds,
                step.fits,
                plan,
                step,
            )
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
        "plan": {system: round(seconds, 2) for system, seconds in plans.items()},
        "terms": {
            system: {name: round(seconds, 2) for name, seconds in step.terms.items()}
            for system, step in steps.items()
        },
        "sizes": {system: dict(step.sizes) for system, step in steps.items()},
        "fits": fits,
        "wrong_order": wrong,
    }


def describe_own_figures() -> Iterator[str]:
    """Compare with DeepSpeed-Chat's own figures, a line for each."""
    for gpus, size, hours in OWN_FIGURES:
        sizes = {"actor": size, "ref": size, "critic": 0.5, "reward": 0.5}
        step = predict_deepspeed_chat(
            Setting({"gpus": gpus, **sizes, "prompt": 256, "gen": 256, "batch": OWN_BATCH})
        )
        assert step is not None
        measured = hours * 3600 * OWN_BATCH / OWN_SEQUENCES
        yield (
            f"{size}B, {gpus} GPUs: {measured:8.1f} {step.seconds:6.1f}{' ' if step.fits else '!'}"
            f"{step.seconds / measured - 1:+6.0%}"
        )


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
            kind: [row[kind][system] / row["published"][system] - 1 for row in rows if system in row[kind]]
            for kind in ("predicted", "plan")
        }
        print(
            f"{system}: errors {min(errors['predicted']):+.0%} to {max(errors['predicted']):+.0%}, mean of their"
            f" sizes {np.mean(np.abs(errors['predicted'])):.0%}; of its plan alone"
            f" {np.mean(np.abs(errors['plan'])):.0%}"
        )
    print(
        f"systems are in the published order in {sum(not row['wrong_order'] for row in rows)} of {len(rows)} rows"
    )
    print("DeepSpeed-Chat's own figures, seconds of 1,024 sequences:", *describe_own_figures(), sep="\n  ")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
