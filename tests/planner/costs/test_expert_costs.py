"""Operations and traffic of feed-forward blocks: those that models execute, and those of experts."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from realrl.dataflow.call import Kind
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES as PUBLISHED
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.roofline import Roofline
from realrl.planner.workload.flops import count_pass_flops
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.workload import count_read_weights, count_visited_experts
from realrl.program.memory import StoredModel
from tests.model.small_models import SHAPES, make_theirs

WIDE = {"hidden_size": 192, "intermediate_size": 160}


@pytest.mark.parametrize("name", ["qwen3", "starcoder2", "mixtral", "qwen3_moe"])
def test_operations_are_those_that_transformers_executes(name: str) -> None:
    shape = SHAPES[name].model_copy(update=WIDE)
    theirs, row = make_theirs(shape, "lm"), torch.randint(0, shape.vocab_size, (1, 12))
    model = StoredModel(shape, "lm", "float32", True)
    for kind in (Kind.INFERENCE, Kind.TRAIN):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(kind is Kind.TRAIN):
            logits = theirs(row).logits
            if kind is Kind.TRAIN:
                logits.square().mean().backward()
        ours = count_pass_flops(model, kind, tokens=12, scored=12, squares=12.0 * 12)
        # Attention, little as it is here, is not counted alike.
        assert ours == pytest.approx(counter.get_total_flops(), rel=0.03), kind


def test_experts_that_tokens_visit_are_those_of_random_choices() -> None:
    generator, shape = random.Random(5), PUBLISHED["qwen3-30b-a3b"]
    for tokens in (1, 4, 20, 100):
        found = [
            len({expert for _ in range(tokens) for expert in generator.sample(range(128), 8)})
            for _ in range(200)
        ]
        assert count_visited_experts(shape, tokens) == pytest.approx(sum(found) / len(found), rel=0.03)


def time_decoding(shape: ModelShape, rows: float) -> float:
    device, efficiency = replace(DEVICES["h100"], measured=None), Efficiency(least_kernel_s=0)
    sizes = LocalSizes(shape, "lm", 1)
    return Roofline(device=device, efficiency=efficiency, sizes=sizes, dtype="bfloat16").decode(rows, 1.0)


def test_decode_steps_of_few_rows_read_few_experts() -> None:
    shape = PUBLISHED["qwen3-30b-a3b"]
    one, all_of_it = count_read_weights(shape, 1), shape.layers * LocalSizes(shape, "lm", 1).layer_elements
    assert count_read_weights(shape, 1e4) == pytest.approx(all_of_it, rel=1e-3)
    # Of 128 experts, 8 are read for one row, and nearly all for 64.
    assert time_decoding(shape, 64) / time_decoding(shape, 1) == pytest.approx(all_of_it / one, rel=0.15)
