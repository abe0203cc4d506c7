"""Agreement of the memory model with what the engine allocates on GPUs, counted on one that is not there."""

from collections.abc import Callable

import pytest

from realrl.dataflow.call import Call, Kind
from realrl.families.adapters import LowRank
from realrl.families.built_in.llama import LLAMA4_MIXTURE
from realrl.families.shape import Head, LayerOptions, Mixture, ModelShape
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.conftest import thin
from tests.forked import run_forked
from tests.planner.fake_memory import count_peak
from tests.planner.unit_device import place

TOLERANCE = 0.1
"""Of one layer, what is held at the moments of its peak weighs more than in a whole model, where 2 % are usual."""
GPUS = MemoryModel(ClusterSpec.parse("h100:1x4"))
EVEN = (96,) * 6
PLAIN = ModelShape(
    vocab_size=1200, hidden_size=256, intermediate_size=700, layers=2, heads=8, kv_heads=2, head_dim=32
)
SHAPES = {
    "llama": PLAIN,
    "tied": PLAIN.model_copy(update={"vocab_size": 20000, "tied_embeddings": True}),
    "qwen3": PLAIN.model_copy(update={"family": "qwen3", "head_dim": 48}),
    "gpt2": PLAIN.model_copy(update={"family": "gpt2", "kv_heads": 8, "tied_embeddings": True}),
    "olmo2": PLAIN.model_copy(update={"family": "olmo2"}),
    "gemma": PLAIN.model_copy(update={"family": "gemma"}),
    "mixtral": PLAIN.model_copy(
        update={"family": "mixtral", "mixture": Mixture(experts=4, per_token=2), "intermediate_size": 400}
    ),
    "qwen3_moe": PLAIN.model_copy(
        update={"family": "qwen3_moe", "mixture": Mixture(experts=24, per_token=6), "intermediate_size": 96}
    ),
    "llama4": PLAIN.model_copy(
        update={
            "family": "llama4_text",
            "mixture": LLAMA4_MIXTURE.model_copy(update={"experts": 8}),
            "intermediate_size": 400,
            "unrotated_layers": (1,),
        }
    ),
    "biased experts": PLAIN.model_copy(
        update={
            "family": "mixtral",
            "mixture": Mixture(experts=4, per_token=2),
            "intermediate_size": 400,
            "layer": LayerOptions(mlp_bias=True, activation="clamped_silu"),
        }
    ),
    "adapted": PLAIN.model_copy(update={"lora": LowRank(rank=24)}),
    "adapted experts": PLAIN.model_copy(
        update={
            "family": "qwen3_moe",
            "mixture": Mixture(experts=24, per_token=6),
            "intermediate_size": 96,
            "lora": LowRank(rank=8, targets=("all-linear",)),
        }
    ),
    "uneven": PLAIN.model_copy(update={"heads": 9, "kv_heads": 3}),
}


def check(shape: str, words: str, head: Head = "lm", part: TrainablePart = WHOLE) -> None:
    """`words`: the kind of call, degrees, and s for sequence parallelism, r for recomputation."""
    kind, dp, tp, pp, *flags = words.split()
    placement = place(int(dp), int(tp), int(pp), tokens=300, sp="s" in flags, recompute="r" in flags)
    part = TrainablePart(adapters=True) if SHAPES[shape].lora else part
    model = StoredModel(SHAPES[shape], head, "bfloat16", True, part)
    pairs = ("chosen", "rejected") if head == "scalar" else ("tokens",)
    call = Call(f"actor.{kind}", "actor", Kind(kind), pairs, work=pairs)
    stages = GPUS.stages(call, model, placement, Workload(len(EVEN) // len(pairs), EVEN, (0,), 0))
    for stage in sorted({0, placement.strategy.pp - 1}):
        got = count_peak(kind, model, placement, stage, EVEN)
        predicted = sum(size for name, size in stages[stage].dynamic.items() if name != "fragmentation")
        assert predicted == pytest.approx(got, rel=TOLERANCE), (shape, words, stage)


def check_strategies(_: int) -> None:
    for words in ("train 1 1 1", "train 1 1 1 r", "train 1 2 1 s", "train 1 1 2", "train 1 1 2 r"):
        check("llama", words)
    for words in ("inference 1 1 1", "inference 1 1 2", "inference 1 2 2 s"):
        check("llama", words)


def check_families(_: int) -> None:
    for shape in SHAPES:
        check(shape, "train 1 1 2")
        if shape not in ("gpt2", "gemma", "tied"):
            check(shape, "inference 1 1 2")


def check_split_families(_: int) -> None:
    for shape in ("qwen3", "qwen3_moe", "llama4", "uneven"):
        for words in ("train 1 2 1 s", "inference 1 2 2 s"):
            check(shape, words)


def check_heads_and_parts(_: int) -> None:
    check("llama", "train 1 1 1", head="scalar")
    check("llama", "inference 1 1 1", head="scalar")
    for part in (TrainablePart(last_layers=1), TrainablePart(freeze_embeddings=True)):
        check("tied", "train 1 1 1", part=part)


@pytest.mark.parametrize(
    "cases", thin([check_strategies, check_families, check_split_families, check_heads_and_parts], 2)
)
def test_calls_allocate_the_predicted_bytes_on_a_gpu(cases: Callable[[int], None]) -> None:
    run_forked(cases, 1)
