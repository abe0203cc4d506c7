"""Predicted beside measured: diverse plans on two local CPU processes, models of several sizes, PPO and others.

Profiles this machine (`realrl profile`), lets `realrl plan` search a plan for each size, and runs it and the plans
of `reality_settings.py` for some steps each (`realrl train`). What a run was predicted to take, from the profile
alone, and what it took stand in its `costs.json`. Figures: the error of the step's seconds and of the peak memory
(predicted / measured - 1), the rank correlation of step seconds over all runs and within each size, the share of
runs whose step lies in the predicted 90 % interval, by how much the searched plan is slower than the fastest one of
its size, and by how much the fastest of the three plans is that `realrl plan --try 3` would run: those that are
most probably the fastest. For the former, the searched plan and the two others that were fastest run again, taking
turns: the fastest of many runs is also the one that was disturbed least.

A round of all sizes of PPO takes about 35 minutes, and profiles the machine anew; figures are of medians over
rounds. GRPO, ReMax and DPO run under fewer plans. Everything goes to a directory of its own; with `--keep` it
stays, and what is there already is not measured again. Answers have one length, so that all runs do the same work.

    python bench/reality.py [--json FILE] [--steps 5] [--sizes small medium large windows experts]
        [--rounds 1] [--turns 7]
        [--algorithms ppo grpo remax dpo] [--plans NAME ...] [--keep DIR]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml
from reality_settings import (
    BUDGET,
    CLUSTER,
    LENGTHS,
    SETTINGS,
    SIZES,
    USUAL_LENGTHS,
    VOCABULARY,
    make_plans,
)
from scipy.stats import spearmanr

from realrl.dataflow.graph import DataflowGraph
from realrl.huggingface.tokenizers import train_bpe
from realrl.plan.plan import Plan
from realrl.planner.calibration.comparison import Comparison
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.profile.profile import Profile
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.uncertainty.ranking import StepSampler
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import Measured, make_scenario

SEARCHED = "searched"
FINALISTS = 2
"""Plans beside the searched one that run again."""
TRIED = 3
"""Plans that a trial measures."""
FINAL = "final "
"""Begins the name of such a turn."""


@dataclass(frozen=True)
class Row:
    """One run."""

    case: str
    """Size of the models, after the algorithm where that is not PPO."""
    plan: str
    turn: str
    """Its round, or what it ran again for."""
    measured: float
    predicted: float
    measured_bytes: int
    predicted_bytes: int
    low: float
    high: float
    """Seconds between which the step was expected with 90 %."""

    @classmethod
    def of(cls, line: str) -> "Row":
        """As `vars` of it was written."""
        return cls(**json.loads(line))

    def show(self) -> None:
        """A line of the table."""
        print(
            f"{self.case:14} {self.plan:26} {self.measured:9.3f} {self.predicted:9.3f} {self.error:+7.1%}"
            f" {self.measured_bytes / 2**20:7.1f} {self.memory_error:+7.1%}"
            f" {'' if self.inside else 'outside'} {self.low:.3f} to {self.high:.3f}",
            flush=True,
        )

    @property
    def error(self) -> float:
        """Of the step's seconds."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the step took as long as expected with 90 %."""
        return self.low <= self.measured <= self.high

    @property
    def memory_error(self) -> float:
        """Of the peak on the fullest rank."""
        return self.predicted_bytes / self.measured_bytes - 1


class World:
    """Files that all runs share."""

    def __init__(self, root: Path, steps: int) -> None:
        self.root, self.steps = root, steps
        words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]
        longest = max(map(sum, [USUAL_LENGTHS, *LENGTHS.values()]))
        self._texts = [
            " ".join(words[(i * 7 + k * k * 3) % len(words)] for k in range(longest)) for i in range(400)
        ]
        train_bpe([text[:400] for text in self._texts], VOCABULARY).save_pretrained(str(root / "tokenizer"))

    def records(self, prompt: int, answer: int) -> Path:
        """Records of prompts and pairs of answers of so many tokens at most; nearly every word is a token."""
        path = self.root / f"records-{prompt}-{answer}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for i, text in enumerate(self._texts):
                words = text.split()
                count = prompt - 8 + i % 8
                answers = [" ".join(words[at : at + answer - 4]) for at in (count, count - 4)]
                record = {"prompt": " ".join(words[:count]), "chosen": answers[0], "rejected": answers[1]}
                file.write(json.dumps(record) + "\n")
        return path

    def recipe(self, case: str) -> Path:
        """A recipe for models of one size."""
        algorithm, size = parse_case(case)
        prompt, answer = LENGTHS.get(size, USUAL_LENGTHS)
        actor = {
            "vocab_size": VOCABULARY,
            "head_dim": SIZES[size]["hidden_size"] // SIZES[size]["heads"],
            "tied_embeddings": True,
            **SIZES[size],
        }
        critic = {**actor, "layers": SIZES[size]["layers"] // 2}
        if "windowed_layers" in actor:
            critic["windowed_layers"] = [n for n in actor["windowed_layers"] if n < critic["layers"]]
        tokenizer = str(self.root / "tokenizer")
        recipe = {
            "algorithm": algorithm,
            "run_dir": str(self.root / "run"),
            "overwrite": True,
            "cluster": str(CLUSTER),
            "device": "cpu",
            "micro_batch_tokens": BUDGET,
            "models": {"actor": {"shape": actor, "tokenizer": tokenizer}},
            # The first step warms up and is not counted.
            "training": {"steps": self.steps + 1},
            **SETTINGS[algorithm],
            "data": {
                "train": str(self.records(prompt, answer)),
                "max_prompt_tokens": prompt,
                "max_tokens": prompt + answer,
                **SETTINGS[algorithm]["data"],
            },
        }
        if algorithm != "dpo":
            recipe["models"]["reward"] = {"shape": critic, "tokenizer": tokenizer}
            recipe["generation"] = {"max_new_tokens": answer, "min_new_tokens": answer}
        path = self.root / f"{name_files(case)}.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    def graph(self, case: str) -> DataflowGraph:
        """Its dataflow graph."""
        return build_graph(load_experiment(str(self.recipe(case)), []))

    def profile(self, case: str, turn: str) -> Path:
        """Measure this machine as it is now."""
        path = self.root / f"{name_files(case)}-profile-{turn}.json"
        if not path.exists():
            realrl("profile", self.recipe(case), "--out", path)
        return path

    def search(self, case: str, profile: Path) -> Plan:
        """What `realrl plan` finds."""
        path = self.root / f"{name_files(case)}-plan.yaml"
        if not path.exists():
            realrl(
                "plan", self.recipe(case), "--cluster", f"cpu:{CLUSTER}", "--profile", profile, "--out", path
            )
        return Plan.load(path, self.graph(case))

    def run(self, case: str, name: str, turn: str, chosen: Plan, profile: Path) -> Row:
        """Train a few steps."""
        row = next((r for r in self.rows(case) if (r.plan, r.turn) == (name, turn)), None)
        if row is None:
            row = self._run(case, name, turn, chosen, profile)
            with self._log.open("a") as file:
                file.write(json.dumps(vars(row)) + "\n")
        row.show()
        return row

    def rows(self, case: str) -> list[Row]:
        """All runs so far."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [row for row in map(Row.of, lines) if row.case == case]

    @property
    def _log(self) -> Path:
        return self.root / "rows.jsonl"

    def _run(self, case: str, name: str, turn: str, chosen: Plan, profile: Path) -> Row:
        path = self.root / "plan.yaml"
        chosen.save(path, self.graph(case))
        realrl("train", self.recipe(case), f"plan={path}", f"profile={profile}")
        found = Comparison.load(self.root / "run")
        span = found.predicted_interval
        assert found.predicted_step_seconds is not None and span is not None
        measured, predicted = zip(
            *((call.bytes, call.predicted_bytes) for call in found.calls if call.bytes), strict=True
        )
        seconds = (found.step.median, found.predicted_step_seconds)
        return Row(case, name, turn, *seconds, max(measured), max(predicted), span.low, span.high)


def parse_case(case: str) -> tuple[str, str]:
    """Split a case into algorithm and size."""
    algorithm, _, size = case.rpartition(" ")
    return algorithm or "ppo", size


def name_files(case: str) -> str:
    """Name the files of a case."""
    return case.replace(" ", "-")


def realrl(*arguments: object) -> None:
    """Run the command; what it prints is shown only when it fails."""
    command = [sys.executable, "-m", "realrl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def rounds_of(
    world: World, case: str, rounds: int, turns: int, only: Sequence[str] | None
) -> tuple[list[Row], float, float]:
    """A row per plan, and what the searched plan, and the best of three that are tried, take over the fastest.

    What is there already counts, even if it is more than is asked for. `only`: the plans beside the searched one;
    None for all.
    """
    found: list[Row] = []
    profile = world.profile(case, "0")
    plans = make_plans(parse_case(case)[0], world.graph(case))
    plans = {name: plans[name] for name in only or plans} | {SEARCHED: world.search(case, profile)}
    before = {row.turn for row in world.rows(case)}
    for i in range(max(rounds, sum(turn.isdecimal() for turn in before))):
        profile = world.profile(case, str(i))
        found += [world.run(case, name, str(i), chosen, profile) for name, chosen in plans.items()]
    rows = merged(found)
    fastest = sorted((row for row in rows if row.plan != SEARCHED), key=lambda row: row.measured)
    finalists = [SEARCHED, *(row.plan for row in fastest[:FINALISTS])]
    again = [
        world.run(case, name, f"{FINAL}{i}", plans[name], profile)
        for i in range(max(turns, sum(turn.startswith(FINAL) for turn in before)))
        for name in finalists
    ]
    seconds = {row.plan: row.measured for row in merged(again)}
    first = {row.plan: row.measured for row in rows}
    tried = find_tried(world, case, plans, profile)
    best_tried = min(first[name] for name in tried) / min(first.values())
    return rows, seconds[SEARCHED] / min(seconds.values()), best_tried


def merged(found: list[Row]) -> list[Row]:
    """One row per case and plan: medians over the rounds."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.case, row.plan), []).append(row)
    return [
        Row(
            *key,
            f"median of {len(group)}",
            statistics.median(row.measured for row in group),
            statistics.median(row.predicted for row in group),
            max(row.measured_bytes for row in group),
            max(row.predicted_bytes for row in group),
            statistics.median(row.low for row in group),
            statistics.median(row.high for row in group),
        )
        for key, group in groups.items()
    ]


def find_tried(world: World, case: str, plans: Mapping[str, Plan], profile: Path) -> list[str]:
    """Find the plans that `realrl plan --try 3` would run of these: those that are most probably the fastest."""
    experiment = load_experiment(str(world.recipe(case)))
    spec = ClusterSpec.parse(f"cpu:{CLUSTER}")
    scenario = make_scenario(experiment, spec, Measured(Profile.load(profile)))
    estimates = {name: estimate_plan(scenario, plan) for name, plan in plans.items()}
    outlooks = StepSampler(scenario).compare(estimates)
    ordered = sorted(outlooks, key=lambda name: (-outlooks[name].fastest, estimates[name].step_seconds))
    return ordered[:TRIED]


def summary(
    found: list[Row], searched_over_fastest: Mapping[str, float], tried_over_fastest: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of all rows."""
    errors, memory = [abs(row.error) for row in found], [abs(row.memory_error) for row in found]
    by_case = {
        case: [row for row in found if row.case == case] for case in dict.fromkeys(row.case for row in found)
    }
    return {
        "runs": len(found),
        "mean_error": round(statistics.mean(errors), 4),
        "worst_error": round(max(errors), 4),
        "mean_error_by_case": {
            case: round(statistics.mean(abs(row.error) for row in part), 4) for case, part in by_case.items()
        },
        "rank_correlation": round(correlation(found), 4),
        "rank_correlation_by_case": {case: round(correlation(part), 4) for case, part in by_case.items()},
        "mean_memory_error": round(statistics.mean(memory), 4),
        "worst_memory_error": round(max(memory), 4),
        "inside_interval": round(statistics.mean(row.inside for row in found), 4),
        "tried_over_fastest": {case: round(ratio, 4) for case, ratio in tried_over_fastest.items()},
        "searched_over_fastest": {case: round(ratio, 4) for case, ratio in searched_over_fastest.items()},
    }


def correlation(found: list[Row]) -> float:
    """Spearman's, of predicted and measured seconds."""
    return float(spearmanr([row.measured for row in found], [row.predicted for row in found]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7, help="of the searched plan and the fastest ones")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium", "large"])
    parser.add_argument("--plans", nargs="+", help="some of the plans alone, beside the searched one")
    parser.add_argument("--algorithms", nargs="+", choices=SETTINGS, default=["ppo"])
    parser.add_argument("--keep", type=Path, help="work in this directory, and leave everything there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        print(
            f"{'case':14} {'plan':26} {'measured':>9} {'predicted':>9} {'error':>7} {'MiB':>7} {'error':>7}"
        )
        world, found, ratios, tried = World(root, arguments.steps), [], {}, {}
        cases = [
            size if algorithm == "ppo" else f"{algorithm} {size}"
            for algorithm in arguments.algorithms
            for size in arguments.sizes
        ]
        for case in cases:
            rows, ratios[case], tried[case] = rounds_of(
                world, case, arguments.rounds, arguments.turns, arguments.plans
            )
            found += rows
    figures = summary(found, ratios, tried)
    print(json.dumps(figures, indent=1))
    if arguments.json is not None:
        result = {
            "date": date.today().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            **figures,
            "rows": [
                {**vars(row), "error": round(row.error, 4), "memory_error": round(row.memory_error, 4)}
                for row in found
            ],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
