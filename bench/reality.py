"""Predicted beside measured: PPO under diverse plans on two local CPU processes, models of several sizes.

Profiles this machine (`realrl profile`), lets `realrl plan` search a plan for each size, and runs it and the
plans below for some steps each (`realrl train`). What a run was predicted to take, from the profile alone, and
what it took stand in its `costs.json`. Figures: the error of the step's seconds and of the peak memory
(predicted / measured - 1), the rank correlation of step seconds over all runs and within each size, and by how
much the searched plan is slower than the fastest one of its size. For this the searched plan and the two others
that were fastest run again, taking turns: the fastest of many runs is also the one that was disturbed least.

A round of all sizes takes about 35 minutes, and profiles the machine anew; figures are of medians over rounds.
Everything goes to a directory of its own; with `--keep` it stays, and what is there already is not measured again.
Answers have one length, so that all runs do the same work.

    python bench/reality.py [--json FILE] [--steps 5] [--sizes small medium large] [--rounds 1] [--turns 7]
        [--keep DIR]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml
from scipy.stats import spearmanr

from realrl.algorithms.ppo.graph import train_graph
from realrl.data.tokenizer import train_bpe
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from realrl.planner.calibration.comparison import Comparison

GRAPH = train_graph(minibatches=2)
CLUSTER = Cluster(1, 2)
VOCABULARY, PROMPT, ANSWER, BATCH, BUDGET = 2048, 24, 40, 64, 2048
SIZES = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 4},
    "medium": {"hidden_size": 256, "intermediate_size": 768, "layers": 4, "heads": 8, "kv_heads": 4},
    "large": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "kv_heads": 6},
}
"""Actor and reference; critic and reward model have half the layers."""


def place(mesh: str, dp: int = 1, tp: int = 1, pp: int = 1, **options: Any) -> Placement:
    """A placement with the bench's micro-batches."""
    strategy = Strategy(dp, tp, pp, **{"micro_batch_tokens": BUDGET, **options})
    return Placement(Mesh.parse(mesh), strategy)


def plan(default: Placement, offload: str = "", offload_optimizer: str = "", **calls: Placement) -> Plan:
    """All calls as `default`, but for some; `__` stands for the dot."""
    chosen = {name.replace("__", "."): placement for name, placement in calls.items()}
    placements = {call.name: default for call in GRAPH.calls} | chosen
    return Plan(CLUSTER, placements, tuple(offload.split()), tuple(offload_optimizer.split()))


DP, TP, PP = place("0-1", 2), place("0-1", 1, 2), place("0-1", 1, 1, 2)
ZERO, ONE = place("0"), place("1")
CRITICS = {"reward__inference": ONE, "critic__inference": ONE, "critic__train": ONE}
PLANS: Mapping[str, Plan] = {
    "dp": plan(DP),
    "tp": plan(TP),
    "pp": plan(PP),
    "tp, sequence parallel": plan(place("0-1", 1, 2, sequence_parallel=True)),
    "dp, recompute": plan(DP).recomputing(GRAPH),
    "dp, small micro-batches": plan(place("0-1", 2, micro_batch_tokens=512)),
    "one process": plan(ZERO),
    "1 + 1": plan(ZERO, **CRITICS),
    "generate dp, train 1 + 1": plan(ZERO, **CRITICS, actor__generate=DP, ref__inference=DP),
    "generate dp, train tp": plan(TP, actor__generate=DP),
    "generate tp, train dp": plan(DP, actor__generate=TP),
    "generate dp, train pp": plan(DP, actor__train=PP, critic__train=PP),
    "generate pp, train dp": plan(DP, actor__generate=PP),
    "interleave": make_plan("interleave", GRAPH, CLUSTER, BUDGET),
    "separate": make_plan("separate", GRAPH, CLUSTER, BUDGET),
    "dp, frozen offloaded": plan(DP, "ref reward"),
    "dp, all offloaded": plan(DP, "actor critic ref reward", "actor critic"),
}


SEARCHED = "searched"
FINALISTS = 2
"""Plans beside the searched one that run again."""
FINAL = "final "
"""Begins the name of such a turn."""


@dataclass(frozen=True)
class Row:
    """One run."""

    size: str
    plan: str
    turn: str
    """Its round, or what it ran again for."""
    measured: float
    predicted: float
    measured_bytes: int
    predicted_bytes: int

    @classmethod
    def of(cls, line: str) -> "Row":
        """As `vars` of it was written."""
        return cls(**json.loads(line))

    def show(self) -> None:
        """A line of the table."""
        print(
            f"{self.size:8} {self.plan:26} {self.measured:9.3f} {self.predicted:9.3f} {self.error:+7.1%}"
            f" {self.measured_bytes / 2**20:7.1f} {self.memory_error:+7.1%}",
            flush=True,
        )

    @property
    def error(self) -> float:
        """Of the step's seconds."""
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        """Of the peak on the fullest rank."""
        return self.predicted_bytes / self.measured_bytes - 1


class World:
    """Files that all runs share."""

    def __init__(self, root: Path, steps: int) -> None:
        self.root, self.steps = root, steps
        words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]
        texts = [" ".join(words[(i * 7 + k * k * 3) % len(words)] for k in range(60)) for i in range(400)]
        train_bpe(texts, VOCABULARY).save_pretrained(str(root / "tokenizer"))
        with (root / "prompts.jsonl").open("w", encoding="utf-8") as file:
            # Nearly every word is a token.
            prompts = (" ".join(text.split()[: PROMPT - 8 + i % 8]) for i, text in enumerate(texts))
            file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)

    def recipe(self, size: str) -> Path:
        """A PPO recipe for models of one size."""
        actor = {
            "vocab_size": VOCABULARY,
            "head_dim": SIZES[size]["hidden_size"] // SIZES[size]["heads"],
            "tied_embeddings": True,
            **SIZES[size],
        }
        critic = {**actor, "layers": SIZES[size]["layers"] // 2}
        tokenizer = str(self.root / "tokenizer")
        recipe = {
            "algorithm": "ppo",
            "run_dir": str(self.root / "run"),
            "overwrite": True,
            "cluster": str(CLUSTER),
            "device": "cpu",
            "micro_batch_tokens": BUDGET,
            "models": {
                "actor": {"shape": actor, "tokenizer": tokenizer},
                "reward": {"shape": critic, "tokenizer": tokenizer},
            },
            "data": {
                "train": str(self.root / "prompts.jsonl"),
                "batch": BATCH,
                "max_prompt_tokens": PROMPT,
                "max_tokens": PROMPT + ANSWER,
            },
            "generation": {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER},
            "ppo": {"minibatches": 2},
            # The first step warms up and is not counted.
            "training": {"steps": self.steps + 1},
        }
        path = self.root / f"{size}.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    def profile(self, size: str, turn: str) -> Path:
        """Measure this machine as it is now."""
        path = self.root / f"{size}-profile-{turn}.json"
        if not path.exists():
            realrl("profile", self.recipe(size), "--out", path)
        return path

    def search(self, size: str, profile: Path) -> Plan:
        """What `realrl plan` finds."""
        path = self.root / f"{size}-plan.yaml"
        if not path.exists():
            realrl(
                "plan", self.recipe(size), "--cluster", f"cpu:{CLUSTER}", "--profile", profile, "--out", path
            )
        return Plan.load(path, GRAPH)

    def run(self, size: str, name: str, turn: str, chosen: Plan, profile: Path) -> Row:
        """Train a few steps."""
        row = next((r for r in self.rows(size) if (r.plan, r.turn) == (name, turn)), None)
        if row is None:
            row = self._run(size, name, turn, chosen, profile)
            with self._log.open("a") as file:
                file.write(json.dumps(vars(row)) + "\n")
        row.show()
        return row

    def rows(self, size: str) -> list[Row]:
        """All runs so far."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [row for row in map(Row.of, lines) if row.size == size]

    @property
    def _log(self) -> Path:
        return self.root / "rows.jsonl"

    def _run(self, size: str, name: str, turn: str, chosen: Plan, profile: Path) -> Row:
        path = self.root / "plan.yaml"
        chosen.save(path, GRAPH)
        realrl("train", self.recipe(size), f"plan={path}", f"profile={profile}")
        found = Comparison.load(self.root / "run")
        assert found.predicted_step_seconds is not None
        measured, predicted = zip(
            *((call.bytes, call.predicted_bytes) for call in found.calls if call.bytes), strict=True
        )
        seconds = (found.step.median, found.predicted_step_seconds)
        return Row(size, name, turn, *seconds, max(measured), max(predicted))


def realrl(*arguments: object) -> None:
    """Run the command; what it prints is shown only when it fails."""
    command = [sys.executable, "-m", "realrl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def rounds_of(world: World, size: str, rounds: int, turns: int) -> tuple[list[Row], float]:
    """A row per plan, and what the searched plan takes over the fastest one. What is there already counts, even if
    it is more than is asked for."""
    found: list[Row] = []
    profile = world.profile(size, "0")
    plans = {**PLANS, SEARCHED: world.search(size, profile)}
    before = {row.turn for row in world.rows(size)}
    for i in range(max(rounds, sum(turn.isdecimal() for turn in before))):
        profile = world.profile(size, str(i))
        found += [world.run(size, name, str(i), chosen, profile) for name, chosen in plans.items()]
    rows = merged(found)
    fastest = sorted((row for row in rows if row.plan != SEARCHED), key=lambda row: row.measured)
    finalists = [SEARCHED, *(row.plan for row in fastest[:FINALISTS])]
    again = [
        world.run(size, name, f"{FINAL}{i}", plans[name], profile)
        for i in range(max(turns, sum(turn.startswith(FINAL) for turn in before)))
        for name in finalists
    ]
    seconds = {row.plan: row.measured for row in merged(again)}
    return rows, seconds[SEARCHED] / min(seconds.values())


def merged(found: list[Row]) -> list[Row]:
    """One row per size and plan: medians over the rounds."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.size, row.plan), []).append(row)
    return [
        Row(
            *key,
            f"median of {len(group)}",
            statistics.median(row.measured for row in group),
            statistics.median(row.predicted for row in group),
            max(row.measured_bytes for row in group),
            max(row.predicted_bytes for row in group),
        )
        for key, group in groups.items()
    ]


def summary(found: list[Row], searched_over_fastest: Mapping[str, float]) -> dict[str, Any]:
    """The figures of all rows."""
    errors, memory = [abs(row.error) for row in found], [abs(row.memory_error) for row in found]
    by_size = {
        size: [row for row in found if row.size == size] for size in dict.fromkeys(row.size for row in found)
    }
    return {
        "runs": len(found),
        "mean_error": round(statistics.mean(errors), 4),
        "worst_error": round(max(errors), 4),
        "rank_correlation": round(correlation(found), 4),
        "rank_correlation_by_size": {size: round(correlation(part), 4) for size, part in by_size.items()},
        "mean_memory_error": round(statistics.mean(memory), 4),
        "worst_memory_error": round(max(memory), 4),
        "searched_over_fastest": {size: round(ratio, 4) for size, ratio in searched_over_fastest.items()},
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
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--keep", type=Path, help="work in this directory, and leave everything there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        print(f"{'size':8} {'plan':26} {'measured':>9} {'predicted':>9} {'error':>7} {'MiB':>7} {'error':>7}")
        world, found, ratios = World(root, arguments.steps), [], {}
        for size in arguments.sizes:
            rows, ratios[size] = rounds_of(world, size, arguments.rounds, arguments.turns)
            found += rows
    figures = summary(found, ratios)
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
