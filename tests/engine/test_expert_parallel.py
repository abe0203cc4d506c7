"""Ranks that divide experts compute what one process computes: losses, gradients, updates, inference."""

from collections.abc import Mapping

import pytest
import torch

from realrl.families.adapters import LowRank
from realrl.families.shape import Head, Mixture, ModelShape
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.engine.learning_on_ranks import Case, Figures, check_learning_on_ranks, learn_alone

MODELS: dict[str, tuple[ModelShape, Head]] = {
    "qwen3_moe": (
        ModelShape(
            family="qwen3_moe", vocab_size=61, hidden_size=24, intermediate_size=13, layers=4, heads=4,
            kv_heads=2, head_dim=6, init_std=0.2, mixture=Mixture(experts=8, per_token=3),
        ),
        "lm",
    ),
    "llama4, shared block": (
        ModelShape(
            family="llama4_text", vocab_size=61, hidden_size=24, intermediate_size=14, layers=4, heads=4,
            kv_heads=2, head_dim=6, init_std=0.2,
            mixture=Mixture(
                experts=8, per_token=1, scores="sigmoid", normalised=False, weighed="inputs", shared=1
            ),
        ),
        "lm",
    ),
    "mixtral, scalar head": (
        ModelShape(
            family="mixtral", vocab_size=61, hidden_size=24, intermediate_size=13, layers=4, heads=4,
            kv_heads=2, head_dim=6, init_std=0.2, mixture=Mixture(experts=8, per_token=2),
        ),
        "scalar",
    ),
    "gpt_oss, biases": (
        ModelShape(
            family="gpt_oss", vocab_size=61, hidden_size=24, intermediate_size=12, layers=4, heads=4, kv_heads=2,
            head_dim=6, init_std=0.2, mixture=Mixture(experts=8, per_token=2), window=5, windowed_layers=(0, 2),
        ),
        "lm",
    ),
    # With two pipeline stages, the first one has no experts.
    "glm4_moe, dense layers": (
        ModelShape(
            family="glm4_moe", vocab_size=61, hidden_size=24, intermediate_size=10, layers=4, heads=4,
            kv_heads=2, head_dim=6, init_std=0.2, dense_layers=(0, 1), dense_size=17,
            mixture=Mixture(
                experts=8, per_token=3, scores="sigmoid", correction=True, groups=4, groups_per_token=2,
                scale=1.5, shared=1,
            ),
        ),
        "lm",
    ),
}  # fmt: skip

TARGETS = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
ADAPTED: dict[str, tuple[ModelShape, Head]] = {
    name: (shape.model_copy(update={"lora": lora}), head)
    for (name, (shape, head)), lora in zip(
        MODELS.items(),
        [
            LowRank(rank=3, alpha=3.0, targets=TARGETS),
            LowRank(rank=2, alpha=1.0, targets=("all-linear",)),
            LowRank(rank=4, alpha=4.0, targets=("experts.gate_up_proj",)),
            LowRank(rank=3, alpha=1.0, targets=TARGETS[1:], rslora=True),
            LowRank(rank=3, alpha=3.0, targets=("gate_proj", "experts.down_proj")),
        ],
        strict=True,
    )
}
"""The same models, of which only adapters are trained."""
ADAPTED_STRATEGIES: dict[int, list[dict[str, int]]] = {
    2: [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": 1, "recompute": 1},
        {"tp": 2},
        {"tp": 2},
        {"dp": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "zero": 3, "recompute": 1},
        {"tp": 2, "ep": 2, "sequence_parallel": 1},
    ],
    4: [
        {"dp": 4, "ep": 2},
        {"dp": 2, "tp": 2, "ep": 4, "sequence_parallel": 1},
        {"dp": 2, "pp": 2, "ep": 2},
        {"dp": 4, "ep": 2, "zero": 3},
        {"dp": 2, "tp": 2, "ep": 2, "recompute": 1},
        {"dp": 2, "tp": 2, "zero": 2},
    ],
}

# Degrees by axis, then settings. TP, data-parallel and CP ranks divide experts, alone and together.
STRATEGIES: dict[int, list[dict[str, int]]] = {
    2: [
        {"dp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "recompute": 1},
        {"dp": 2, "ep": 2, "zero": 2},
        {"dp": 2, "ep": 2, "zero": 3, "recompute": 1},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "sequence_parallel": 1, "recompute": 1},
        {"cp": 2, "ep": 2},
    ],
    4: [
        {"dp": 4, "ep": 4},
        {"dp": 4, "ep": 2},
        {"dp": 4, "ep": 2, "zero": 2, "recompute": 1},
        {"dp": 4, "ep": 2, "zero": 3},
        {"dp": 2, "tp": 2, "ep": 4, "sequence_parallel": 1},
        {"dp": 2, "tp": 2, "ep": 2, "zero": 3},
        {"dp": 2, "pp": 2, "ep": 2},
        {"dp": 2, "pp": 2, "vpp": 2, "ep": 2},
        {"cp": 2, "pp": 2, "vpp": 2, "ep": 2, "recompute": 1},
        {"dp": 2, "pp": 2, "ep": 2, "zero_bubble": 1},
        {"tp": 2, "cp": 2, "ep": 4, "sequence_parallel": 1, "zero": 2},
        {"dp": 2, "cp": 2, "ep": 4, "recompute": 1},
        {"tp": 4, "ep": 2},
        {"dp": 2, "tp": 2, "ep": 2},  # experts and all other parameters have copies on the same ranks
    ],
    6: [{"dp": 2, "cp": 3, "ep": 2}],  # a group of ranks with different items
    8: [
        {"dp": 2, "tp": 2, "pp": 2, "ep": 4, "sequence_parallel": 1, "recompute": 1},
        {"dp": 2, "cp": 2, "tp": 2, "ep": 4, "zero": 3},
        {"dp": 2, "cp": 2, "tp": 2, "ep": 8},
        {"dp": 4, "pp": 2, "ep": 2, "zero": 2},
    ],
}


def list_cases(world: int, strategies: Mapping[int, list[dict[str, int]]] = STRATEGIES) -> list[Case]:
    """List models and placements; models take turns."""
    names = [*MODELS]
    cases = []
    for turn, wanted in enumerate(strategies[world]):
        flags = {
            name: bool(wanted[name])
            for name in ("sequence_parallel", "recompute", "zero_bubble")
            if name in wanted
        }
        numbers = {name: value for name, value in wanted.items() if name not in flags}
        strategy = Strategy(micro_batch_tokens=40, **flags, **numbers)
        cases.append((names[turn % len(names)], Placement(Mesh(0, world), strategy)))
    return cases


@pytest.fixture(scope="module")
def alone() -> dict[str, Figures]:
    return learn_alone(MODELS)


@pytest.mark.parametrize("world", STRATEGIES)
def test_ranks_that_divide_experts_learn_as_one_process_does(world: int, alone: dict[str, Figures]) -> None:
    check_learning_on_ranks(world, MODELS, list_cases(world), alone, tolerance=1e-4)


@pytest.fixture(scope="module")
def adapted_alone() -> dict[str, Figures]:
    return learn_alone(ADAPTED)


def test_each_part_of_the_experts_adapters_counts(
    alone: dict[str, Figures], adapted_alone: dict[str, Figures]
) -> None:
    """What the next test compares depends on the adapters."""
    for name, figures in adapted_alone.items():
        assert not torch.allclose(figures["inference"], alone[name]["inference"], rtol=1e-2), name


@pytest.mark.parametrize("world", ADAPTED_STRATEGIES)
def test_adapters_of_experts_learn_on_ranks_as_in_one_process(
    world: int, adapted_alone: dict[str, Figures]
) -> None:
    cases = list_cases(world, ADAPTED_STRATEGIES)
    check_learning_on_ranks(world, ADAPTED, cases, adapted_alone, tolerance=1e-4)
