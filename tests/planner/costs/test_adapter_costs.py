"""Operations and times of training adapters, beside counts of PEFT's own passes and of whole models."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from realrl.dataflow.call import Kind
from realrl.families.adapters import LowRank
from realrl.families.shape import Mixture, ModelShape
from realrl.families.sizes import SHAPES
from realrl.layout.sets import TrainablePart
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.workload.flops import count_adapter_weights, count_pass_flops
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.model.small_models import make_theirs
from tests.planner.problems import call, place

SHAPE = ModelShape(
    vocab_size=300, hidden_size=96, intermediate_size=160, layers=12, heads=6, kv_heads=2, head_dim=16
)
ADAPTED = TrainablePart(adapters=True)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("targets", [TARGETS, ["q_proj", "v_proj"]])
@pytest.mark.parametrize("rank", [4, 64])
def test_operations_are_those_that_peft_executes(rank: int, targets: list[str]) -> None:
    theirs = get_peft_model(make_theirs(SHAPE, "lm"), LoraConfig(r=rank, target_modules=targets))
    row = torch.randint(0, SHAPE.vocab_size, (1, 12))
    counted = {}
    for kind in (Kind.INFERENCE, Kind.TRAIN):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(kind is Kind.TRAIN):
            logits = theirs(row).logits
            if kind is Kind.TRAIN:
                logits.square().mean().backward()
        counted[kind] = counter.get_total_flops()
    lora = LowRank(rank=rank, targets=None if len(targets) > 2 else tuple(targets))
    model = StoredModel(SHAPE.model_copy(update={"lora": lora}), "lm", "float32", True, ADAPTED)
    for kind, theirs_counted in counted.items():
        ours = count_pass_flops(model, kind, tokens=12, scored=12, squares=12.0 * 12)
        # Neither attention, little as it is here, nor the gradient of embeddings is counted alike.
        assert ours == pytest.approx(theirs_counted, rel=0.03 if kind is Kind.INFERENCE else 0.06), kind


def test_a_token_passes_through_the_adapters_of_its_experts_alone() -> None:
    targets, mixture = ("experts.gate_up_proj", "experts.down_proj"), Mixture(experts=8, per_token=3)
    shape = SHAPE.model_copy(
        update={"family": "qwen3_moe", "mixture": mixture, "lora": LowRank(rank=4, targets=targets)}
    )
    hidden, inner = shape.hidden_size, shape.intermediate_size
    each = 4 * (hidden + 2 * inner) + 4 * (inner + hidden)
    assert count_adapter_weights(shape) == shape.layers * 3 * each
    assert count_adapter_weights(shape, 2) == 2 * 3 * each


def test_training_adapters_of_experts_takes_more_than_those_of_attention_and_less_than_all() -> None:
    spec = ClusterSpec.parse("h100:1x8")
    cost, memory, workload = CostModel(spec), MemoryModel(spec), Workload(64, (512,), (512,), 512)
    shape, attention = SHAPES["mixtral-8x7b"], ("q_proj", "k_proj", "v_proj", "o_proj")
    every = (*attention, "experts.gate_up_proj", "experts.down_proj")
    models = [
        StoredModel(
            shape.model_copy(update={"lora": LowRank(targets=targets)}), "lm", "bfloat16", True, ADAPTED
        )
        for targets in (attention, every)
    ]
    train, placement = call("actor.train"), place(1, tp=8)
    whole = StoredModel(shape, "lm", "bfloat16", True)
    seconds = [cost.call(train, model, placement, workload).seconds for model in (*models, whole)]
    assert seconds[0] < seconds[1] < 0.95 * seconds[2]
    needs = [memory.call(train, model, placement, workload) for model in models]
    trained = [sum(spec.numel for spec in model.sets["tuned"].tensors) for model in models]
    assert trained[1] > 10 * trained[0]
    optimizer = [need.static["optimizer"] for need in needs]
    assert optimizer[1] > 5 * optimizer[0]


@pytest.mark.parametrize("dora", [False, True])
def test_training_adapters_takes_less_time_and_memory_than_training_all(dora: bool) -> None:
    spec = ClusterSpec.parse("h100:1x8")
    cost, memory, workload = CostModel(spec), MemoryModel(spec), Workload(64, (512,), (512,), 512)
    shape = SHAPES["llama-2-7b"]
    whole = StoredModel(shape, "lm", "bfloat16", True)
    part = StoredModel(shape.model_copy(update={"lora": LowRank(dora=dora)}), "lm", "bfloat16", True, ADAPTED)
    train = call("actor.train")
    seconds = [cost.call(train, model, place(8), workload).seconds for model in (part, whole)]
    # Two of three products, and those of adapters.
    assert 0.6 < seconds[0] / seconds[1] < (0.85 if dora else 0.75)
    needs = [memory.call(train, model, place(8), workload) for model in (part, whole)]
    states = [sum(size for name, size in need.static.items() if name != "parameters") for need in needs]
    trained = sum(spec.numel for spec in part.sets["tuned"].tensors)
    assert states[0] == pytest.approx(4 * trained + 4 * 4 * trained / 8, rel=0.01)
    assert states[0] < 0.02 * states[1]
    inference = call("ref.inference")
    slower = [cost.call(inference, model, place(8), workload).seconds for model in (part, whole)]
    assert 1 < slower[0] / slower[1] < (1.3 if dora else 1.2)
