"""Arithmetic that calls are charged for, beside what the engine executes, counted by torch: equal to the unit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from realrl.dataflow.call import Kind
from realrl.families.adapters import LowRank
from realrl.families.built_in.llama import LLAMA4_MIXTURE
from realrl.families.shape import Head, Mixture, ModelShape
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.placement import Placement
from realrl.planner.workload.flops import count_pass_flops
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.conftest import thin
from tests.forked import run_forked
from tests.planner.fake_flops import count_on_a_gpu, count_packed_products
from tests.planner.lone_rank import LoneRank, Sequences, nobody_else
from tests.planner.unit_device import SHAPE, cost, make_cluster, place

LENGTHS = (32,) * 6
SLOW = make_cluster(bf16_flops=1.0, fp32_flops=1.0)
SHAPES: dict[str, ModelShape] = {
    "llama": SHAPE,
    "gpt2": SHAPE.model_copy(update={"family": "gpt2", "kv_heads": 8, "tied_embeddings": True}),
    "qwen3": SHAPE.model_copy(update={"family": "qwen3"}),
    "olmo2": SHAPE.model_copy(update={"family": "olmo2"}),
    "mixtral": SHAPE.model_copy(update={"family": "mixtral", "mixture": Mixture(experts=4, per_token=2)}),
    "llama4": SHAPE.model_copy(
        update={"family": "llama4_text", "mixture": LLAMA4_MIXTURE.model_copy(update={"experts": 4})}
    ),
    "adapted": SHAPE.model_copy(update={"lora": LowRank(rank=8, targets=("q_proj", "o_proj", "down_proj"))}),
    "adapted experts": SHAPE.model_copy(
        update={
            "family": "mixtral",
            "mixture": Mixture(experts=4, per_token=2),
            "lora": LowRank(rank=8, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj")),
        }
    ),
}


def store(name: str, head: Head = "lm", part: TrainablePart = WHOLE) -> StoredModel:
    part = TrainablePart(adapters=True) if SHAPES[name].lora else part
    return StoredModel(SHAPES[name], head, "bfloat16", True, part)


def count_unpredicted(kind: str, model: StoredModel, tp: int) -> int:
    """Operations of the head at last tokens, after which no other comes: the engine spares them."""
    if model.head == "scalar":
        return 0
    times = {"inference": 1, "train": 3}[kind]
    times -= kind == "train" and (
        model.part.adapters or (model.part != WHOLE and model.shape.tied_embeddings)
    )
    return times * 2 * len(LENGTHS) * model.shape.vocab_size // tp * model.shape.hidden_size


def count_unneeded(kind: str, model: StoredModel) -> int:
    """Operations of the gradient of the first layer's input where nothing below needs it: they are charged, too."""
    if kind == "inference" or not model.part.adapters:
        return 0
    return 2 * sum(LENGTHS) * (256 * 64 + 8 * 64)


ONE = place()


def check(kind: str, model: StoredModel, placement: Placement = ONE, stage: int = 0) -> None:
    charged = cost(Kind(kind), Workload(len(LENGTHS), LENGTHS), placement, SLOW, model=model)["compute"]
    counted = count_on_a_gpu(kind, model, placement, stage, LENGTHS)
    spared = count_unpredicted(kind, model, placement.strategy.tp) + count_unneeded(kind, model)
    if placement.strategy.pp > 1:
        # What is charged is that of the slowest stage, the last one.
        assert stage == placement.strategy.pp - 1
    assert charged - spared == pytest.approx(counted, rel=1e-12), (model, placement)


def check_families(_: int) -> None:
    for name in SHAPES:
        for kind in ("train", "inference"):
            check(kind, store(name))


def check_strategies(_: int) -> None:
    for placement in (
        place(tp=2),
        place(tp=4, sp=True),
        place(recompute=True),
        place(tp=2, tokens=64, recompute=True),
    ):
        check("train", store("llama"), placement)
        check("inference", store("mixtral"), placement)
    check("train", store("llama"), place(pp=2, tokens=64), 1)


def check_parts(_: int) -> None:
    for part in (TrainablePart(last_layers=2), TrainablePart(last_layers=0)):
        check("train", store("llama", part=part))
    check("train", store("gpt2", part=TrainablePart(freeze_embeddings=True)))


@pytest.mark.parametrize("cases", thin([check_strategies, check_families, check_parts], 2))
def test_train_and_inference_calls_are_charged_the_products_that_a_gpu_executes(
    cases: Callable[[int], None],
) -> None:
    run_forked(cases, 1)


@pytest.mark.parametrize(("samples", "name"), [(1, "llama"), (3, "llama"), (1, "qwen3")])
def test_generation_is_charged_the_products_that_prefill_and_decode_steps_execute(
    samples: int, name: str
) -> None:
    """On a CPU, whose decode steps multiply by packed weights."""
    prompts, answer = (9,) * 4, 12
    model = replace(store(name), dtype="float32")
    rows = len(prompts) * samples
    lone = LoneRank(model, place(), 0)
    sequences = Sequences.of(prompts, model, samples)
    with nobody_else(), FlopCounterMode(display=False) as counter, count_packed_products() as packed:
        lone.generate(sequences, answer, samples)
    step = Workload(rows, (9,), (answer,), answer, samples=samples)
    cpu = make_cluster(fp32_flops=1.0, cpu=True)
    terms = cost(Kind.GENERATE, step, place(), cpu, model=model)
    shape = model.shape
    attention = 2 * 8**2 * shape.heads * shape.head_dim * (shape.layers - 1) * len(prompts)
    assert terms["compute"] - attention == pytest.approx(counter.get_total_flops(), rel=1e-12)
    assert terms["decode"] == pytest.approx(packed.flops, rel=1e-12)


@pytest.mark.parametrize("name", ["llama", "mixtral", "llama4", "adapted", "adapted experts"])
def test_model_flops_are_what_calls_are_charged_for_but_attentions_unseen_half(name: str) -> None:
    """As in the papers that define them, half of attention's scores are not left out, and nothing is recomputed."""
    model, tokens = store(name), sum(LENGTHS)
    squares = sum(n * n for n in LENGTHS)
    attention = 2 * squares * 128 * 4
    for kind, times in ((Kind.INFERENCE, 1), (Kind.TRAIN, 3.5)):
        charged = cost(kind, Workload(len(LENGTHS), LENGTHS), place(), SLOW, model=model)["compute"]
        found = count_pass_flops(model, kind, tokens=tokens, scored=tokens, squares=squares)
        # The attention of model FLOPs has no recomputed scores in its backward pass.
        assert found == pytest.approx(charged - times * attention + {1: 1, 3.5: 3}[times] * attention)
