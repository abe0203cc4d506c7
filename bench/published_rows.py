"""Compare published throughput with the planner's predictions. No constant is fitted to the published figures.

`bench/reference/published_rows.json` has the rows: source, date, and all settings that a prediction takes.
The cost model predicts each row with its default constants, under the row's own strategy, on the row's own
devices:

train: a train call under the stage of ZeRO that the source runs (`zero`). FSDP that reshards parameters after
the forward pass is stage 3; FSDP that keeps them is stage 2. `recompute` is the part of a forward pass that
checkpointing repeats; the prediction averages times with and without recomputation. `virtual_stages` divides
the pipeline bubble, as its interleaved schedule does (arXiv 2104.04473, section 2.2); the planner's schedule
is not interleaved.
generate: a generate call. As many rows are admitted as memory holds at their full lengths. Requests have one
length unless the row says that their lengths vary around a published mean (`varied`).
grpo: generation, two inference calls (old and reference log-probabilities) and training, one after the other.

If only the mean length of answers is published, the lengths follow an exponential distribution up to the
limit. Attention of training is torch's FlashAttention 2 unless the row says 3. The host is assumed to need as much
time as with this engine.

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

from realrl.dataflow.call import Call, Kind
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.activations import kv_cache_bytes
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.workload.flops import count_flops
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

PUBLISHED = Path(__file__).parent / "reference" / "published_rows.json"
TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))
INFER = Call("actor.inference", "actor", Kind.INFERENCE, ("tokens",), work=("tokens",))
GENERATE = Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), work=("prompts",))
QUANTILES = 64
FREE_SHARE = 0.95
"""Fraction of the free memory that holds keys and values in TensorRT-LLM's rows."""
VLLM_SHARE = 0.6
"""Fraction of the memory that vLLM uses in NeMo-RL's rows, parameters included (`gpu_memory_utilization`)."""
NO_LIMIT = 1 << 20
"""Stands for no limit on the length of answers."""

Terms = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """A published figure with its settings."""

    of: dict[str, Any]

    @property
    def name(self) -> str:
        """Name with system, model, devices and lengths."""
        r = self.of
        lengths = f"{r['sequence']:,}" if "sequence" in r else f"{r['prompt']:,} + {r['answer']:,}"
        return f"{r['system']}, {r['model']}, {r['cluster']}, {lengths}"

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
        flash3 = self.of.get("flash3", False)
        return CostModel(self.spec, efficiency=Efficiency(flash2_slower=1.0) if flash3 else Efficiency())

    def place(self, tokens: int, *, recompute: bool = False, tp: int | None = None) -> Placement:
        """Place the row's strategy on all devices. With `tp`, place replicas of this tensor-parallel degree."""
        r, size = self.of, self.spec.size
        strategy = Strategy(
            dp=r["dp"], tp=r["tp"], pp=r["pp"], micro_batch_tokens=tokens, recompute=recompute,
            sequence_parallel=r.get("sequence_parallel", False), zero=r.get("zero", 1),
        )  # fmt: skip
        if tp is not None:
            strategy = Strategy(dp=size // tp, tp=tp, micro_batch_tokens=tokens)
        return Placement(Mesh(0, size), strategy)


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
    terms["bubble"] /= r.get("virtual_stages", 1)
    seconds = sum(terms.values())
    devices = row.spec.size
    if r["unit"] == "MFU":
        model = StoredModel(row.shape, "lm", "bfloat16", trained=True)
        peak = devices * row.spec.groups[0].device.bf16_flops
        return Prediction(count_flops(TRAIN, model, workload) / seconds / peak, terms)
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
    """Predict the seconds of a step of GRPO."""
    r = row.of
    longest = r["longest"] - r["prompt"]
    answers = sample_lengths(r["answer"], longest)
    workload = Workload(r["sequences"], (r["prompt"],), answers, longest, samples=r["samples"])
    trained = StoredModel(row.shape, "lm", "bfloat16", trained=True)
    memory = MemoryModel(row.spec)
    placement = row.place(1, tp=r["generation_tp"])
    share = VLLM_SHARE * row.spec.groups[0].device.memory_bytes
    free = share - memory.parameters(trained, placement)
    each = kv_cache_bytes(
        LocalSizes(row.shape, "lm", r["generation_tp"]), tokens=1, layers=row.shape.layers, element_bytes=2
    )
    terms: Counter[str] = Counter()
    generation = row.place(int(free / each), tp=r["generation_tp"])
    terms["generate"] = row.cost.call(GENERATE, trained, generation, workload).seconds
    train = replace(TRAIN, minibatches=r["minibatches"])
    terms["inference"] = 2 * row.cost.call(INFER, trained, row.place(r["micro_batch"]), workload).seconds
    terms["train"] = sum(_mix(row, train, workload, r["micro_batch"]).values())
    return Prediction(sum(terms.values()), terms)


def sample_lengths(mean: float, longest: int) -> tuple[int, ...]:
    """Compute quantiles of an exponential distribution with this mean, cut at the longest."""
    low, high = 1.0, 1e7
    for _ in range(100):
        scale = (low * high) ** 0.5
        cut = scale * (1 - exp(-longest / scale))
        low, high = (scale, high) if cut < mean else (low, scale)
    return tuple(
        max(1, min(longest, round(-scale * log(1 - (i + 0.5) / QUANTILES)))) for i in range(QUANTILES)
    )


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
    }


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


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    found = [compare(row) for row in read_rows()]
    print("\n".join(render(found)))
    errors = sorted(abs(one["error"]) for one in found)
    print(
        f"{sum(error <= 0.2 for error in errors)} of {len(errors)} within 20 %; median"
        f" {errors[len(errors) // 2]:.1%}, mean {sum(errors) / len(errors):.1%}"
    )
    Results(arguments.json).add("published rows", {"rows": found})


if __name__ == "__main__":
    main()
