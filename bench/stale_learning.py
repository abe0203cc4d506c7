"""Measure what the demos' PPO and GRPO learn if they train on samples of earlier weights.

Each case trains the demo's model with several seeds under a staleness, and with one of these objectives:

corrected: log-probabilities are recomputed, and importance weights correct for the sampler's older weights.
clipped: ratios are clipped around the weights that sampled.
uncorrected: log-probabilities are recomputed, and nothing corrects. `realrl` refuses this objective; the files
    in `bench/uncorrected` allow it.

The trained models then answer the held-out prompts several times. The output has the mean score of the judge
(PPO) or the percentage of right answers (GRPO) over all seeds, and the results of the seeds. All runs have as many
training steps as the demo. Samples do not depend on the plan, so each run has one process, and `--at-once` runs are
trained side by side.

    make demo demo-grpo      # their SFT and reward models are enough
    python bench/stale_learning.py [--demos ppo grpo] [--objectives corrected clipped uncorrected] [--seeds 1 2 3]
        [--settings KEY=VALUE ...] [--at-once 2] [--runs DIR] [--json FILE]

Runs that FILE already holds are not measured again.
"""

import os
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from harness import Results, make_parser, read_lines, realrl

STALENESS = {
    "1 step": ["staleness=1"],
    "2 steps, partial": ["staleness=2", "partial=true"],
}
"""Settings of asynchrony by name."""
OBJECTIVES = {
    "corrected": ["recompute_logprobs=true", "sampler_correction=truncate"],
    "clipped": [],
    "uncorrected": ["recompute_logprobs=true"],
}
"""Settings of the algorithm by name."""
ANSWERS = 4
"""Answers to each held-out prompt."""


@dataclass(frozen=True)
class Demo:
    """A demo with an algorithm that samples."""

    recipe: str
    section: str
    """Section of the algorithm's settings in a recipe."""
    metric: str
    """Metric of the evaluation that tells what the model has learnt."""
    scale: float = 1.0
    """Factor of this metric in the output."""


DEMOS = {
    "ppo": Demo("recipes/demo/ppo.yaml", "ppo", "judge"),
    "grpo": Demo("recipes/demo_grpo/grpo.yaml", "policy", "score", scale=100),
}


def list_cases(name: str, objectives: Iterable[str]) -> dict[str, list[str]]:
    """List the overrides of a demo's recipe by the name of the case."""
    section = DEMOS[name].section
    cases: dict[str, list[str]] = {"synchronous": []}
    for objective in objectives:
        for stale, settings in STALENESS.items():
            own = OBJECTIVES[objective]
            changed = [f"asynchrony.{one}" for one in settings] + [f"{section}.{one}" for one in own]
            if objective == "uncorrected":
                changed.append(f"algorithm=bench/uncorrected/{name}.py")
            cases[f"{stale}, {objective}"] = changed
    return cases


def measure(name: str, changed: Sequence[str], seed: int, run: Path) -> float:
    """Train a demo's model with changed settings; return what its last evaluation says."""
    demo = DEMOS[name]
    common = ["cluster=1x1", f"seed={seed}", "evaluation.every=null", f"evaluation.samples={ANSWERS}"]
    realrl("train", demo.recipe, f"run_dir={run}", *common, *changed)
    evaluations = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"]
    found = [
        value for key, value in evaluations[-1]["metrics"].items() if key.rpartition("/")[2] == demo.metric
    ]
    return demo.scale * float(found[0])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--demos", nargs="+", choices=DEMOS, default=[*DEMOS])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=["corrected", "uncorrected"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--settings", nargs="*", default=[], help="further settings of all runs, as KEY=VALUE"
    )
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/stale-learning"))
    arguments = parser.parse_args()
    results = Results(arguments.json)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(arguments.at_once) as pool:
        runs: dict[Future[float], str] = {}
        for name in arguments.demos:
            for case, changed in list_cases(name, arguments.objectives).items():
                for seed in arguments.seeds:
                    full = f"{name}, {case}, seed {seed}"
                    run = arguments.runs / full.replace(", ", "-").replace(" ", "-")
                    if full not in results.cases:
                        runs[pool.submit(measure, name, [*changed, *arguments.settings], seed, run)] = full
        for done in as_completed(runs):
            results.add(runs[done], {"value": done.result()})
    for name in arguments.demos:
        before = None
        for case in list_cases(name, arguments.objectives):
            found = [results.cases[f"{name}, {case}, seed {seed}"]["value"] for seed in arguments.seeds]
            mean = statistics.mean(found)
            before = mean if before is None else before
            of_seeds = ", ".join(f"{value:.3f}" for value in found)
            print(f"{name:<5} {case:<30} {mean:8.3f} {mean - before:+8.3f}   {of_seeds}")


if __name__ == "__main__":
    main()
