"""Every part of the memory that calls are predicted to take, to the byte, as it was when counts agreed with it.

The engine's own allocations are compared in `test_memory_on_a_gpu.py` and `test_activations_match_the_engine.py`,
within some percent. A change of the memory model changes `pinned_memory.json`, too, which this writes again:

    PYTHONPATH=. python tests/planner/physics/test_pinned_memory.py
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.dataflow.call import Call, Candidates, Kind, Replay
from realrl.families.adapters import LowRank
from realrl.families.experts import Mixture
from realrl.families.mixtures.llama4 import MIXTURE
from realrl.families.options import LayerOptions
from realrl.families.shape import ModelShape
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.placement import Dtype, Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.memory.memory_model import MemoryModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.planner.unit_device import place

FILE = Path(__file__).with_name("pinned_memory.json")
PINNED: dict[str, list[dict[str, int]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
LLAMA = ModelShape(
    vocab_size=3000, hidden_size=256, intermediate_size=700, layers=6, heads=8, kv_heads=2, head_dim=32
)
EXPERTS = {"family": "qwen3_moe", "mixture": Mixture(experts=24, per_token=6), "intermediate_size": 96}
LLAMA_4 = {"family": "llama4_text", "mixture": MIXTURE.model_copy(update={"experts": 8})}
CAPS = LayerOptions(attention_cap=50.0, logit_cap=30.0, norm_place="around", activation="gelu_tanh")
CHANGES = {
    "llama": {},
    "tied": {"vocab_size": 70000, "tied_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 48},
    "many heads": {"family": "qwen3", "heads": 16, "head_dim": 64, "intermediate_size": 64},
    "wide": {"intermediate_size": 3000},
    "gpt2": {"family": "gpt2", "kv_heads": 8, "tied_embeddings": True},
    "gemma": {"family": "gemma"},
    "gemma2": {"family": "gemma2", "window": 50, "windowed_layers": (0, 2), "layer": CAPS},
    "experts": EXPERTS,
    "llama4": LLAMA_4,
    "adapted": {"lora": LowRank(rank=24, targets=("q_proj", "v_proj", "down_proj"))},
    "dora": {"lora": LowRank(rank=24, dora=True)},
    "uneven": {"heads": 9, "kv_heads": 3},
    "int8": {"quantised": "int8"},
    "int8 experts": {**EXPERTS, "quantised": "int8"},
}
SHAPES = {name: LLAMA.model_copy(update=changes) for name, changes in CHANGES.items()}
KINDS = (Kind.TRAIN, Kind.INFERENCE, Kind.GENERATE)
STEP = Workload(64, tuple(range(20, 148, 2)), tuple(range(10, 74)), 80)
STRATEGIES = {
    "one": place(tokens=800),
    "recomputed": place(tokens=800, recompute=True),
    "data": place(3, tokens=2000),
    "tensor": place(tp=2, tokens=800),
    "sequence": place(1, 2, 2, tokens=800, sp=True),
    "pipeline": place(1, 1, 4, tokens=600),
    "pipeline, recomputed": place(1, 2, 3, tokens=600, recompute=True),
}


def list_cases() -> Iterator[tuple[str, Call, StoredModel, Placement, str, Workload]]:
    """Name, and what a memory need is made of."""

    def case(
        words: str,
        kind: Kind,
        shape: str = "llama",
        placement: str = "one",
        *,
        dtype: Dtype = "bfloat16",
        cluster: str = "h100",
        head: str = "lm",
        part: TrainablePart = WHOLE,
        exact: bool = False,
        step: Workload = STEP,
        candidates: Candidates | None = None,
        replay: bool = False,
        records: bool = False,
    ) -> tuple[str, Call, StoredModel, Placement, str, Workload]:
        key = "prompts" if kind is Kind.GENERATE else "tokens"
        call = Call(
            f"actor.{kind.value}",
            "actor",
            kind,
            (key, "teacher_ids", "sequences", "routed_experts"),
            outputs=("sequences", "routed_experts") if records else (),
            work=(key,),
            minibatches=2 if kind is Kind.TRAIN else 1,
            candidates=candidates,
            replays=(Replay("sequences", "routed_experts"),) if replay else (),
        )
        if SHAPES[shape].lora is not None:
            part = TrainablePart(adapters=True)
        if SHAPES[shape].quantised is not None:
            part = TrainablePart(quantised=True)
        model = StoredModel(SHAPES[shape], head, dtype, True, part, exact)  # type: ignore[arg-type]
        name = f"{kind.value}: {shape}, {placement}, {dtype}, {cluster}{words}"
        return name, call, model, STRATEGIES[placement], cluster, step

    for kind in KINDS:
        for placement in STRATEGIES:
            yield case("", kind, placement=placement)
            yield case("", kind, "gemma2", placement, cluster="cpu", dtype="float32")
        for shape in SHAPES:
            if kind is Kind.TRAIN and SHAPES[shape].quantised is not None:
                continue
            yield case("", kind, shape)
            yield case("", kind, shape, "sequence")
            yield case("", kind, shape, cluster="cpu")
            yield case("", kind, shape, "tensor", cluster="cpu", dtype="float32")
        for shape in ("llama", "gemma2", "qwen3", "experts", "many heads"):
            yield case("", kind, shape, dtype="float32")
            yield case("", kind, shape, "tensor", dtype="mixed", cluster="cpu")
        yield case(", few", kind, placement="data", step=Workload(6, (90,), (40,), 40))
        yield case(", long", kind, step=Workload(6, (900, 30), (40,), 400))
        yield case(", samples", kind, step=replace(STEP, samples=8))
        yield case(", exact", kind, exact=True, cluster="cpu", dtype="float32")
        yield case(", exact", kind, placement="pipeline", exact=True, cluster="cpu", dtype="mixed")
    for kind in KINDS[:2]:
        for cluster in ("h100", "cpu"):
            for placement in ("one", "tensor", "pipeline"):
                yield case(", scalar", kind, placement=placement, head="scalar", cluster=cluster)
                given = Candidates(20, "teacher_ids")
                yield case(", given", kind, placement=placement, candidates=given, cluster=cluster)
                many = Candidates(900, "teacher_ids")
                yield case(", many given", kind, placement=placement, candidates=many, cluster=cluster)
            yield case(", replayed", kind, "experts", replay=True, cluster=cluster)
    for cluster in ("h100", "cpu"):
        for placement in ("one", "tensor", "pipeline"):
            for count in (20, 900):
                found = Candidates(count)
                yield case(
                    f", {count} found", Kind.INFERENCE, placement=placement, candidates=found, cluster=cluster
                )
        yield case(", recorded", Kind.GENERATE, "experts", records=True, cluster=cluster)
    parts = {
        "last": TrainablePart(last_layers=2),
        "head": TrainablePart(last_layers=0),
        "half": TrainablePart(last_layers=4),
        "frozen embeddings": TrainablePart(freeze_embeddings=True),
    }
    for name, part in parts.items():
        for shape in ("llama", "tied"):
            for placement in ("one", "pipeline"):
                for cluster in ("h100", "cpu"):
                    yield case(f", {name}", Kind.TRAIN, shape, placement, part=part, cluster=cluster)
                    yield case(
                        f", scalar, {name}",
                        Kind.TRAIN,
                        shape,
                        placement,
                        head="scalar",
                        part=part,
                        cluster=cluster,
                    )


CASES = {case[0]: case[1:] for case in list_cases()}
MODELS = {cluster: MemoryModel(ClusterSpec.parse(f"{cluster}:1x8")) for cluster in ("h100", "cpu")}


def predict(
    call: Call, model: StoredModel, placement: Placement, cluster: str, step: Workload
) -> list[dict[str, int]]:
    stages = MODELS[cluster].stages(call, model, placement, step)
    return [{name: size for name, size in {**n.static, **n.dynamic}.items() if size} for n in stages]


@pytest.mark.parametrize("case", CASES)
def test_calls_take_the_memory_that_was_compared_with_counts(case: str) -> None:
    assert predict(*CASES[case]) == PINNED[case]


def test_every_pinned_case_is_tested() -> None:
    assert set(PINNED) == set(CASES)


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(predict(*case))}" for name, case in CASES.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
