"""Compare published throughput with the planner's predictions. No constant is fitted to the published figures.

`bench/reference/published_rows.json` has the rows: source, date, and all settings that a prediction takes.
The cost model predicts each row with its default constants, under the row's own strategy, on the row's own
devices:

train: a train call under the stage of ZeRO that the source runs (`zero`). FSDP that reshards parameters
after the forward pass is stage 3; FSDP that keeps them is stage 2. `recompute` is the part of a forward
pass that checkpointing repeats; the prediction averages times with and without recomputation.
`virtual_stages` are those of each pipeline stage (arXiv 2104.04473, section 2.2). If the row has ZeRO above
stage 1, or more virtual stages than layers, the engine has no such plan, and they only divide the bubble.
`balanced` says that the source forces tokens to use all experts equally. `fused_sinks` says that the source
has a fused kernel of attention with sinks; this engine stores scores in memory instead.
generate: a generate call. As many rows are admitted as memory holds at their full lengths. Requests have one
length unless the row says that their lengths vary around a published mean (`varied`).
grpo: a step of GRPO under a plan with the source's layouts, as the planner simulates it in steady state.
`generate_on` and `train_on` are [first device, number of devices]; all devices if they are missing. The devices
that train also run inference, `inferences` times. `ahead` and `span` are the arguments of `run_ahead`. Without
them, calls run one after another. With `ahead: 1`, a step samples the batch that the next step trains on. With
`span`, each answer is spread over this number of steps. With `portions`, the samples of a step are handed on in
this number of portions.

If only the mean length of answers is published, the lengths follow an exponential distribution up to the limit.
The share `at_limit` of answers has the maximum length. A `pair` is a row of mode `sync` with asynchronous rows of
the same setting, whose speed-ups are compared. Attention of training is torch's FlashAttention 2 unless the row
says 3. The host is assumed to need as much time as with this engine.

    python bench/published_rows.py [--json FILE]
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

from harness import Results, make_parser

from realrl.dataflow.asynchrony import hand_on_portions, run_ahead
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.activations import kv_cache_bytes
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.flops import count_flops
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

PUBLISHED = Path(__file__).parent / "reference" / "published_rows.json"
TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))
GENERATE = Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), work=("prompts",))
QUANTILES = 64
FREE_SHARE = 0.95
"""Fraction of the free memory that holds keys and values in TensorRT-LLM's rows."""
SYNC = "sync"
"""Mode of rows whose calls run one after another."""
WEIGHTS = "weights"
"""Term of a step: the seconds in which weights move between devices."""
NO_LIMIT = 1 << 20
"""Stands for no limit on the length of answers."""

Terms = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """A published figure with its settings."""

    of: dict[str, Any]

    @property
    def name(self) -> str:
        """Name with system, mode, model, devices and lengths."""
        r = self.of
        lengths = f"{r['sequence']:,}" if "sequence" in r else f"{r['prompt']:,} + {r['answer']:,}"
        mode = f", {r['mode']}" if "mode" in r else ""
        spec = self.spec
        devices = f"{spec.groups[0].device.name}:{spec.nodes}x{spec.groups[0].devices_per_node}"
        return f"{r['system']}{mode}, {r['model']}, {devices}, {lengths}"

    @property
    def spec(self) -> ClusterSpec:
        """The cluster, with the figures that the row gives for its devices."""
        spec = ClusterSpec.parse(self.of["cluster"])
        group = spec.groups[0]
        device = replace(group.device, **self.of.get("device", {}))
        return replace(spec, groups=(replace(group, device=device),))

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return SHAPES[self.of["model"]]

    @property
    def cost(self) -> CostModel:
        """The planner's cost model for these devices."""
        efficiency = Efficiency()
        if self.of.get("flash3"):
            efficiency = replace(efficiency, flash2_slower=1.0)
        if self.of.get("balanced"):
            efficiency = replace(efficiency, expert_spread=0.0)
        if self.of.get("fused_sinks"):
            efficiency = replace(efficiency, score_bytes=0.0, score_backward_bytes=0.0)
        return CostModel(self.spec, efficiency=efficiency)

    def place(self, tokens: int, *, recompute: bool = False) -> Placement:
        """Place the row's strategy of training, or of its only call, on its devices."""
        r = self.of
        strategy = Strategy(
            dp=r["dp"], cp=r.get("cp", 1), tp=r["tp"], pp=r["pp"], ep=r.get("ep", 1), vpp=self.vpp,
            micro_batch_tokens=tokens, recompute=recompute,
            sequence_parallel=r.get("sequence_parallel", False), zero=r.get("zero", 1),
        )  # fmt: skip
        return Placement(self.mesh("train_on"), strategy)

    @property
    def vpp(self) -> int:
        """Virtual stages of each pipeline stage. 1 if the engine cannot divide the layers like the source."""
        r = self.of
        turns = r.get("virtual_stages", 1)
        return turns if r.get("zero", 1) == 1 and r["pp"] * turns <= self.shape.layers else 1

    def place_generation(self, tokens: int) -> Placement:
        """Place replicas of the row's tensor-parallel degree of generation on its devices."""
        mesh, tp = self.mesh("generate_on"), self.of["generation_tp"]
        return Placement(mesh, Strategy(dp=mesh.size // tp, tp=tp, micro_batch_tokens=tokens))

    def mesh(self, name: str) -> Mesh:
        """Devices of a field of the row, or all devices."""
        return Mesh(*self.of.get(name, (0, self.spec.size)))


@dataclass(frozen=True)
class Prediction:
    """Prediction of a row, in the row's unit."""

    value: float
    terms: Terms
    """Seconds of a step or a run, by term."""

    @property
    def seconds(self) -> float:
        """Sum of all terms."""
        return sum(self.terms.values())


def read_rows() -> list[Row]:
    """Read all rows, in the order of the file."""
    return [Row(of) for of in json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]]


def predict(row: Row) -> Prediction:
    """Predict a row's figure."""
    return {"train": predict_training, "generate": predict_generation, "grpo": predict_grpo}[row.of["work"]](
        row
    )


def predict_training(row: Row) -> Prediction:
    """Predict tokens per second, or model FLOPs utilisation, of optimizer steps."""
    r = row.of
    workload = Workload(r["sequences"], (r["sequence"],))
    terms = _mix(row, TRAIN, workload, r["micro_batch"])
    terms["bubble"] /= r.get("virtual_stages", 1) / row.vpp
    seconds = sum(terms.values())
    devices = row.spec.size
    if r["unit"] == "MFU":
        model = StoredModel(row.shape, "lm", "bfloat16", trained=True)
        peak = devices * row.spec.groups[0].device.bf16_flops
        return Prediction(
            count_flops(TRAIN, model, workload, row.place(r["micro_batch"]).strategy) / seconds / peak, terms
        )
    per = devices if r["unit"] == "tokens/s/GPU" else 1
    return Prediction(r["sequences"] * r["sequence"] / seconds / per, terms)


def _mix(row: Row, call: Call, workload: Workload, tokens: int) -> dict[str, float]:
    """Compute the seconds of a train call by term, with the row's share of recomputation."""
    model = StoredModel(row.shape, "lm", "bfloat16", trained=True)
    share = row.of["recompute"]
    terms: Counter[str] = Counter()
    for again, weight in ((True, share), (False, 1 - share)):
        found = row.cost.call(call, model, row.place(tokens, recompute=again), workload)
        terms.update({name: weight * seconds for name, seconds in found.terms.items()})
    return dict(terms)


def predict_generation(row: Row) -> Prediction:
    """Predict generated tokens per second."""
    r = row.of
    model = StoredModel(row.shape, "lm", "bfloat16", trained=False)
    bare = row.place(1)
    memory = MemoryModel(row.spec)
    free = memory.capacity(0) - memory.parameters(model, bare)
    sizes = LocalSizes(row.shape, "lm", r["tp"])
    each = kv_cache_bytes(sizes, tokens=1, layers=row.shape.layers, element_bytes=2)
    answers = sample_lengths(r["answer"], NO_LIMIT) if r.get("varied") else (r["answer"],)
    rows = int(FREE_SHARE * free / each / (r["prompt"] + r["answer"]))
    # The planner admits rows as if each answer had half of the maximum length.
    tokens = rows * (r["prompt"] + max(answers) // 2 + 16)
    workload = Workload(r["sequences"], (r["prompt"],), answers, max(answers))
    terms = row.cost.call(GENERATE, model, row.place(tokens), workload).terms
    return Prediction(r["sequences"] * r["answer"] / sum(terms.values()), terms)


def predict_grpo(row: Row) -> Prediction:
    """Predict the steady-state seconds of a step of GRPO."""
    r = row.of
    longest = r["longest"] - r["prompt"]
    limited = round(r.get("at_limit", 0.0) * r["sequences"])
    others = r["sequences"] - limited
    mean = (r["answer"] * r["sequences"] - limited * longest) / others
    answers = (*sample_lengths(mean, longest, others), *[longest] * limited)
    # All answers count, not a sample of them: few of them take much of the time.
    workload = Workload(
        r["sequences"],
        (r["prompt"],),
        answers,
        longest,
        samples=r["samples"],
        longest=max(answers),
        shares_prompts=False,
    )
    graph = build_grpo(r["inferences"], 1 if "portions" in r else r["minibatches"])
    if "portions" in r:
        graph = hand_on_portions(graph, r["portions"])
    scenario = Scenario(
        graph=run_ahead(graph, r.get("ahead", 0), r.get("span", 1)),
        models={"actor": StoredModel(row.shape, "lm", "bfloat16", trained=True)},
        spec=row.spec,
        workload=workload,
        cost=row.cost,
        memory=MemoryModel(row.spec),
    )
    trains = row.place(r["micro_batch"], recompute=r["recompute"] > 0)
    placements = {call.name: trains for call in scenario.graph.calls}
    placements[GENERATE.name] = row.place_generation(count_generated_tokens(row, scenario))
    estimate = estimate_plan(scenario, Plan(row.spec.cluster, placements))
    terms = {name: call.seconds for name, call in estimate.calls.items()}
    terms[WEIGHTS] = sum(move.seconds for move in estimate.moves)
    return Prediction(estimate.repeated_seconds, terms)


def build_grpo(inferences: int, minibatches: int) -> DataflowGraph:
    """Build the calls of a step of GRPO. Rewards take no time, so they are left out."""
    names = [f"logprobs {i}" for i in range(inferences)]
    work = ("sequences",)
    calls = [
        replace(GENERATE, outputs=work),
        *(Call(f"actor.{name}", "actor", Kind.INFERENCE, work, (name,), work=work) for name in names),
        Call("actor.train", "actor", Kind.TRAIN, (*work, *names), work=work, minibatches=minibatches),
    ]
    keys = [Key("prompts", "int64"), Key("sequences", "int64")]
    return DataflowGraph(calls, keys + [Key(name, "float32", "sequences") for name in names])


def count_generated_tokens(row: Row, scenario: Scenario) -> int:
    """Count the tokens of a replica's cache, as the planner counts them.

    The planner admits rows as if each answer had half of the maximum length. Other engines admit rows by the tokens
    that they have. So the cache counts as larger if the mean answer is shorter than half of the maximum.
    """
    r = row.of
    model, half = scenario.models["actor"], scenario.workload.max_new_tokens // 2
    share = r["memory_share"] * row.spec.groups[0].device.memory_bytes
    free = share - scenario.memory.parameters(model, row.place_generation(1))
    each = kv_cache_bytes(
        LocalSizes(row.shape, "lm", r["generation_tp"]), tokens=1, layers=row.shape.layers, element_bytes=2
    )
    tokens = int(free / each * max(1.0, half / r["answer"]))
    return min(tokens, r["rows"] * (r["prompt"] + half)) if "rows" in r else tokens


def sample_lengths(mean: float, longest: int, count: int = QUANTILES) -> tuple[int, ...]:
    """Compute quantiles of an exponential distribution with this mean, cut at the longest."""
    low, high = 1.0, 1e7
    for _ in range(100):
        scale = (low * high) ** 0.5
        cut = scale * (1 - exp(-longest / scale))
        low, high = (scale, high) if cut < mean else (low, scale)
    return tuple(max(1, min(longest, round(-scale * log(1 - (i + 0.5) / count)))) for i in range(count))


def compare(row: Row) -> dict[str, Any]:
    """Compare published and predicted figure. `note` is the number of the note on an error above 20 %."""
    prediction = predict(row)
    return {
        "row": row.name,
        "published": row.of["value"],
        "unit": row.of["unit"],
        "predicted": round(prediction.value, 3),
        "error": round(prediction.value / row.of["value"] - 1, 4),
        "terms": {name: round(seconds, 3) for name, seconds in prediction.terms.items() if seconds},
        "note": row.of.get("note"),
        "pair": row.of.get("pair"),
        "mode": row.of.get("mode"),
        "plans": row.of.get("plans"),
    }


def order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each asynchronous row with the synchronous row of its pair."""
    sync = {one["pair"]: one for one in found if one["mode"] == SYNC}
    return [
        {
            "pair": one["pair"],
            "mode": one["mode"],
            **{name: round(sync[one["pair"]][name] / one[name], 3) for name in ("published", "predicted")},
        }
        for one in found
        if one["pair"] and one["mode"] != SYNC
    ]


def correlate(found: list[dict[str, Any]]) -> dict[str, float]:
    """Compute the rank correlation of published and predicted figures, for each group of rows that differ in their
    plans alone."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        if one["plans"]:
            groups.setdefault(one["plans"], []).append(one)
    return {
        plans: round(correlation([one["published"] for one in rows], [one["predicted"] for one in rows]), 2)
        for plans, rows in groups.items()
    }


def correlation(first: list[float], second: list[float]) -> float:
    """Compute Spearman's rank correlation of two lists without equal values."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    n, squares = len(first), sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def render(found: list[dict[str, Any]]) -> list[str]:
    """Format the table of docs/notes/other-systems.md, which has the notes."""
    lines = ["| row | published | predicted | error |", "|---|---|---|---|"]
    for one in found:
        digits = 2 if one["unit"] == "MFU" else 1 if one["published"] < 1000 else 0
        published, predicted = (f"{one[name]:,.{digits}f}" for name in ("published", "predicted"))
        mark = f" ({one['note']})" if one["note"] else ""
        error = f"{100 * one['error']:+.0f} %".replace("-", "−")
        lines.append(f"| {one['row']} | {published} {one['unit']} | {predicted} | {error}{mark} |")
    return lines


def render_order(ordered: list[dict[str, Any]]) -> list[str]:
    """Format the table of speed-ups by asynchrony."""
    lines = [
        "| setting | asynchrony | published speed-up | predicted speed-up | order |",
        "|---|---|---|---|---|",
    ]
    for one in ordered:
        right = (one["published"] > 1) == (one["predicted"] > 1)
        speeds = f"{one['published']:.2f} × | {one['predicted']:.2f} ×"
        lines.append(f"| {one['pair']} | {one['mode']} | {speeds} | {'right' if right else 'wrong'} |")
    return lines


def share_weights(found: list[dict[str, Any]]) -> float:
    """Find the largest share of an asynchronous step in which weights move between devices."""
    return max(
        one["terms"][WEIGHTS] / one["predicted"] for one in found if one["pair"] and one["mode"] != SYNC
    )


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    found = [compare(row) for row in read_rows()]
    ordered = order(found)
    print("\n".join(render(found)))
    print("\n".join(["", *render_order(ordered), ""]))
    errors = sorted(abs(one["error"]) for one in found)
    print(
        f"{sum(error <= 0.2 for error in errors)} of {len(errors)} within 20 %; median"
        f" {errors[len(errors) // 2]:.1%}, mean {sum(errors) / len(errors):.1%}"
    )
    for plans, found_correlation in correlate(found).items():
        print(f"plans of {plans}: rank correlation {found_correlation}")
    print(f"weights move in at most {share_weights(found):.2%} of an asynchronous step")
    Results(arguments.json).add("published rows", {"rows": found, "order": ordered})


if __name__ == "__main__":
    main()
