"""Compare predicted and measured steps of diverse plans on two local CPU processes, for PPO and other algorithms.

The bench profiles this machine (`realrl profile`), searches a plan for each model size (`realrl plan`), and runs
that plan and the plans of `make_plans` for a few steps each (`realrl train`). The prediction, made from the profile
alone, and the measurement come from the run's `costs.json`. Figures:

- errors of step seconds and of peak memory (predicted / measured - 1);
- rank correlation of step seconds, over all runs and within each size;
- share of runs whose step lies in the predicted 90 % interval;
- how much slower the searched plan is than the fastest plan of its size. For this figure, the searched plan and the
  two fastest other plans run again in turns, because the fastest of many runs is also the least disturbed run;
- how much slower than the fastest plan the best of the three plans is that `realrl plan --try 3` would run.

A round of PPO takes about 35 minutes and profiles the machine again. Figures are medians over rounds. GRPO, ReMax
and DPO have fewer plans. All answers have one length, so that all runs do the same work. `--keep` keeps the
directory; measurements found there are not repeated.

    python bench/reality.py [--json FILE] [--steps 5] [--sizes small medium large windows experts]
        [--rounds 1] [--turns 7] [--algorithms ppo grpo remax dpo] [--plans NAME ...] [--keep DIR]
"""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from harness import Results, make_parser, realrl
from scipy.stats import spearmanr

from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.huggingface.tokenizers import train_bpe
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.profile.profile import Profile
from realrl.planner.report.comparison import Comparison
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.uncertainty.ranking import StepSampler
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import Measured, make_scenario

CLUSTER = Cluster(1, 2)
VOCABULARY, BUDGET = 2048, 2048
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 4},
    "medium": {"hidden_size": 256, "intermediate_size": 768, "layers": 4, "heads": 8, "kv_heads": 4},
    "large": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "kv_heads": 6},
    "windows": {
        "family": "gemma2",
        **{"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 2},
        **{"window": 32, "windowed_layers": [0, 2]},
    },
    "experts": {
        "family": "qwen3_moe",
        **{"hidden_size": 128, "intermediate_size": 128, "layers": 4, "heads": 4, "kv_heads": 2},
        "mixture": {"experts": 16, "per_token": 4},
    },
}
"""Shapes of the actor and the reference. Critic and reward model have half the layers. `windows` is a small Gemma 2
in which half of the layers see an eighth of the longest sequence. `experts` is a small Qwen3-MoE."""
USUAL_LENGTHS = 24, 40
"""Tokens of prompts and of answers."""
LENGTHS = {"windows": (32, 224)}
"""Tokens of prompts and of answers, for the sizes that do not have `USUAL_LENGTHS`."""
SEARCHED = "searched"
FINALISTS = 2
"""Number of plans that run again in addition to the searched plan."""
TRIED = 3
"""Number of plans that `--try` would measure."""
FINAL = "final "
"""Prefix of the names of turns in which the finalists run again."""


def place(mesh: str, dp: int = 1, tp: int = 1, pp: int = 1, **options: Any) -> Placement:
    """Make a placement with the bench's micro-batches. `options` may have further degrees by axis name."""
    strategy = Strategy(**{"dp": dp, "tp": tp, "pp": pp, "micro_batch_tokens": BUDGET, **options})
    return Placement(Mesh.parse(mesh), strategy)


def plan(
    graph: DataflowGraph,
    default: Placement,
    offload: str = "",
    offload_optimizer: str = "",
    **calls: Placement,
) -> Plan:
    """Make a plan that places every call as `default`, except `calls`. `__` stands for the dot in a call's name."""
    chosen = {name.replace("__", "."): placement for name, placement in calls.items()}
    placements = {call.name: default for call in graph.calls} | chosen
    return Plan(CLUSTER, placements, tuple(offload.split()), tuple(offload_optimizer.split()))


def divide(graph: DataflowGraph, placement: Placement) -> Plan:
    """Make a plan that places every call alike, as far as generation can have the same strategy."""
    samples = Placement(placement.mesh, placement.strategy.for_generation())
    chosen = {call.name: samples for call in graph.calls if call.kind is Kind.GENERATE}
    return Plan(CLUSTER, {call.name: placement for call in graph.calls} | chosen)


DP, TP, PP = place("0-1", 2), place("0-1", 1, 2), place("0-1", 1, 1, 2)
ZERO, ONE = place("0"), place("1")
CRITICS = {"reward__inference": ONE, "critic__inference": ONE, "critic__train": ONE}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"data": {"batch": 64}, "ppo": {"minibatches": 2}},
    "grpo": {"data": {"batch": 8}, "policy": {"samples": 8, "minibatches": 2}},
    "remax": {"data": {"batch": 64}, "policy": {"minibatches": 2}},
    "dpo": {"data": {"batch": 32}},
}
"""Sections of the algorithms' recipes: 64 answers a step, two optimizer steps if the algorithm has mini-batches."""


def make_plans(algorithm: str, graph: DataflowGraph, *, experts: bool = False) -> Mapping[str, Plan]:
    """Make the plans of an algorithm, without the searched one. `experts`: whether models are mixtures."""
    common = {
        "dp": plan(graph, DP),
        "tp": plan(graph, TP),
        "pp": plan(graph, PP),
        "tp, sequence parallel": plan(graph, place("0-1", 1, 2, sequence_parallel=True)),
        "dp, recompute": plan(graph, DP).recomputing(graph),
        "dp, small micro-batches": plan(graph, place("0-1", 2, micro_batch_tokens=512)),
        "one process": plan(graph, ZERO),
        "interleave": make_plan("interleave", graph, CLUSTER, BUDGET),
        "separate": make_plan("separate", graph, CLUSTER, BUDGET),
        "cp": divide(graph, place("0-1", cp=2)),
    }
    if experts:
        common["ep"] = divide(graph, place("0-1", 2, ep=2))
    if algorithm == "dpo":
        return common
    sampled = {
        "generate dp, train tp": plan(graph, TP, actor__generate=DP),
        "generate tp, train dp": plan(graph, DP, actor__generate=TP),
    }
    if algorithm != "ppo":
        return common | sampled
    return {
        **common,
        **sampled,
        "1 + 1": plan(graph, ZERO, **CRITICS),
        "generate dp, train 1 + 1": plan(graph, ZERO, **CRITICS, actor__generate=DP, ref__inference=DP),
        "generate dp, train pp": plan(graph, DP, actor__train=PP, critic__train=PP),
        "generate pp, train dp": plan(graph, DP, actor__generate=PP),
        "dp, frozen offloaded": plan(graph, DP, "ref reward"),
        "dp, all offloaded": plan(graph, DP, "actor critic ref reward", "actor critic"),
    }


@dataclass(frozen=True)
class Row:
    """Measured and predicted figures of a run."""

    case: str
    """Size of the models, preceded by the algorithm unless it is PPO."""
    plan: str
    turn: str
    """Number of the round, or the name of a finalist's turn."""
    measured: float
    predicted: float
    measured_bytes: int
    predicted_bytes: int
    low: float
    high: float
    """Bounds of the predicted 90 % interval, in seconds."""

    def show(self) -> None:
        """Print a line of the table."""
        print(
            f"{self.case:14} {self.plan:26} {self.measured:9.3f} {self.predicted:9.3f} {self.error:+7.1%}"
            f" {self.measured_bytes / 2**20:7.1f} {self.memory_error:+7.1%}"
            f" {'' if self.inside else 'outside'} {self.low:.3f} to {self.high:.3f}",
            flush=True,
        )

    @property
    def error(self) -> float:
        """Relative error of the step's seconds."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the step lies in the predicted interval."""
        return self.low <= self.measured <= self.high

    @property
    def memory_error(self) -> float:
        """Relative error of the peak memory of the fullest rank."""
        return self.predicted_bytes / self.measured_bytes - 1


class World:
    """Directory with the files that all runs share, and with the figures of the runs."""

    def __init__(self, root: Path, steps: int) -> None:
        self.root, self.steps = root, steps
        words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]
        longest = max(map(sum, [USUAL_LENGTHS, *LENGTHS.values()]))
        self._texts = [
            " ".join(words[(i * 7 + k * k * 3) % len(words)] for k in range(longest)) for i in range(400)
        ]
        train_bpe([text[:400] for text in self._texts], VOCABULARY).save_pretrained(str(root / "tokenizer"))

    def records(self, prompt: int, answer: int) -> Path:
        """Write records with prompts and pairs of answers of limited length; most words are one token."""
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
        """Write the recipe of a case."""
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
            # The first step warms up and does not count.
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
        """Build the dataflow graph of a case."""
        return build_graph(load_experiment(str(self.recipe(case)), []))

    def profile(self, case: str, turn: str) -> Path:
        """Profile this machine as it is now."""
        path = self.root / f"{name_files(case)}-profile-{turn}.json"
        if not path.exists():
            realrl("profile", self.recipe(case), "--out", path)
        return path

    def search(self, case: str, profile: Path) -> Plan:
        """Return the plan that `realrl plan` finds for a case. An earlier result in the directory is reused."""
        path = self.root / f"{name_files(case)}-plan.yaml"
        if not path.exists():
            realrl(
                "plan", self.recipe(case), "--cluster", f"cpu:{CLUSTER}", "--profile", profile, "--out", path
            )
        return Plan.load(path, self.graph(case))

    def run(self, case: str, name: str, turn: str, chosen: Plan, profile: Path) -> Row:
        """Train a few steps under a plan, unless the directory already has the figures of this run."""
        row = next((r for r in self.rows(case) if (r.plan, r.turn) == (name, turn)), None)
        if row is None:
            row = self._run(case, name, turn, chosen, profile)
            with self._log.open("a") as file:
                file.write(json.dumps(vars(row)) + "\n")
        row.show()
        return row

    def rows(self, case: str) -> list[Row]:
        """Read all runs of a case so far."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [row for line in lines if (row := Row(**json.loads(line))).case == case]

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


def rounds_of(
    world: World, case: str, rounds: int, turns: int, only: Sequence[str] | None
) -> tuple[list[Row], float, float]:
    """Run all plans of a case.

    Returns a row per plan, and two ratios of step seconds: the searched plan over the fastest plan, and the best of
    three tried plans over the fastest plan. Earlier runs count, even if there are more than `rounds` or `turns`.
    `only` names the plans to run in addition to the searched plan.
    """
    found: list[Row] = []
    profile = world.profile(case, "0")
    algorithm, size = parse_case(case)
    plans = make_plans(algorithm, world.graph(case), experts="mixture" in SIZES[size])
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
    """Merge rounds into one row per case and plan: medians of seconds, maxima of bytes."""
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
    """Find the plans that `realrl plan --try 3` would run, because they are probably the fastest."""
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
    """Compute the figures of all rows."""
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
    """Compute Spearman's rank correlation of predicted and measured seconds."""
    return float(spearmanr([row.measured for row in found], [row.predicted for row in found]).statistic)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7, help="turns of the finalists")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium", "large"])
    parser.add_argument("--plans", nargs="+", help="names of the plans to run beside the searched one")
    parser.add_argument("--algorithms", nargs="+", choices=SETTINGS, default=["ppo"])
    parser.add_argument("--keep", type=Path, help="directory to work in and to keep")
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
    rows = [
        {**vars(row), "error": round(row.error, 4), "memory_error": round(row.memory_error, 4)}
        for row in found
    ]
    Results(arguments.json).add("reality", {**figures, "rows": rows})


if __name__ == "__main__":
    main()
