"""Every strategy computes what one process computes: losses, gradients, updates, inference, generation."""

import pytest
import torch

from realrl.families.shape import Head, ModelShape
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.conftest import EVERY_RUN
from tests.engine.learning_on_ranks import Case, Figures, check_learning_on_ranks, learn_alone

MODELS: dict[str, tuple[ModelShape, Head]] = {
    "qwen2, grouped, tied": (
        ModelShape(
            family="qwen2", vocab_size=67, hidden_size=32, intermediate_size=50, layers=5, heads=8, kv_heads=2,
            head_dim=8, tied_embeddings=True, init_std=0.2,
        ),
        "lm",
    ),
    "qwen3, uneven": (
        ModelShape(
            family="qwen3", vocab_size=61, hidden_size=24, intermediate_size=33, layers=4, heads=6, kv_heads=3,
            head_dim=6, init_std=0.2,
        ),
        "lm",
    ),
    "llama, uneven, scalar head": (
        ModelShape(
            vocab_size=61, hidden_size=24, intermediate_size=33, layers=4, heads=6, kv_heads=3, head_dim=4,
            init_std=0.2,
        ),
        "scalar",
    ),
}  # fmt: skip

# (dp, tp, pp), with `c` and the degree of context parallelism, `v` and the number of virtual stages, `s` for
# sequence parallelism, `r` for recomputation, `w` for a zero bubble, and the stage of ZeRO. Every degree alone, and
# mixtures of them.
STRATEGIES = {
    2: [
        "2 1 1",
        "1 2 1",
        "1 2 1 s",
        "1 1 2",
        "2 1 1 r",
        "1 2 1 r",
        "1 2 1 sr",
        "1 1 2 r",
        "2 1 1 2",
        "2 1 1 3",
        "1 1 1 c2",
        "1 1 1 c2 r",
        "1 1 1 c2 2",
        "1 1 1 c2 3",
        "1 1 2 v2",
        "1 1 2 v2 r",
        "1 1 2 w",
        "1 1 2 v2 rw",
    ],
    3: ["3 1 1", "1 3 1 s", "1 3 1", "1 1 3", "3 1 1 3r", "1 1 1 c3 r"],
    4: [
        "4 1 1",
        "1 4 1",
        "1 4 1 s",
        "1 1 4",
        "2 2 1 s",
        "2 1 2",
        "1 2 2",
        "1 2 2 s",
        "2 1 2 r",
        "1 2 2 sr",
        "4 1 1 2",
        "4 1 1 3",
        "2 2 1 2s",
        "2 2 1 3sr",
        "2 1 2 3",
        "2 1 2 2r",
        "2 1 1 c2",
        "2 1 1 c2 3r",
        "1 2 1 c2 s",
        "1 1 2 c2 r",
        "1 1 1 c4 2",
        "2 1 2 v2",
        "2 1 2 w",
        "1 1 4 rw",
        "2 1 2 v2 w",
        "1 2 2 v2 sr",
        "1 1 2 c2 v2",
    ],
    6: ["3 2 1", "2 3 1 s", "1 6 1", "1 3 2", "1 2 3 s", "3 1 2", "2 1 3", "1 2 3 sr"],
    8: [
        "2 2 2",
        "2 2 2 s",
        "1 4 2 s",
        "1 2 4",
        "4 1 2",
        "8 1 1",
        "2 2 2 sr",
        "1 2 4 r",
        "1 2 2 c2 s",
        "2 2 1 c2 3sr",
        "1 2 1 c4 2s",
        "1 1 1 c8",
        "2 2 2 v2 s",
        "1 2 2 c2 v2 r",
        "1 2 2 c2 v2 sw",
    ],
}


def placements(world: int) -> list[Placement]:
    """The placements that are tried on so many ranks."""
    found = []
    for text in STRATEGIES[world]:
        dp, tp, pp, *flags = text.split()
        cp, vpp = (
            next((flags.pop(i)[1:] for i, flag in enumerate(flags) if flag.startswith(axis)), "1")
            for axis in "cv"
        )
        strategy = Strategy(
            dp=int(dp),
            cp=int(cp),
            tp=int(tp),
            pp=int(pp),
            vpp=int(vpp),
            micro_batch_tokens=40,
            sequence_parallel="s" in "".join(flags),
            recompute="r" in "".join(flags),
            zero_bubble="w" in "".join(flags),
            zero=next((stage for stage in (2, 3) if str(stage) in "".join(flags)), 1),
        )
        found.append(Placement(Mesh(0, world), strategy))
    return found


def list_cases(world: int, ordered: bool = False) -> list[Case]:
    """List the models that so many processes compute, and how: where each takes long, models take turns.

    Where messages are `ordered`, strategies with stages alone, which send them.
    """
    models = 1 if not EVERY_RUN else {2: 3, 3: 2}.get(world, 1)
    names = [*MODELS]
    chosen = [placement for placement in placements(world) if placement.strategy.pp > ordered]
    return [
        (names[(turn + i) % len(names)], placement)
        for turn, placement in enumerate(chosen)
        for i in range(models)
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, Figures]:
    return learn_alone(MODELS)


def test_the_update_whose_loss_or_gradient_is_not_finite_is_skipped(alone: dict[str, Figures]) -> None:
    """Every strategy has the same figures, by the test below."""
    for name, (_, head) in MODELS.items():
        (cause,) = [figure for figure in alone[name] if "skipped_for/" in figure]
        expected = "0/skipped_for/the gradient of" if head == "lm" else "0/skipped_for/loss"
        assert cause.startswith(expected)
        assert [int(alone[name][f"{step}/skipped_steps"]) for step in range(2)] == [1, 0]


@pytest.mark.parametrize(
    ("world", "ordered"),
    [
        (2, False), (3, False), pytest.param(4, False, marks=pytest.mark.exhaustive),
        pytest.param(6, False, marks=pytest.mark.exhaustive), (8, False),
        (3, True), pytest.param(4, True, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_every_strategy_learns_and_samples_as_one_process_does(
    world: int, ordered: bool, alone: dict[str, Figures]
) -> None:
    cases = list_cases(world, ordered)
    check_learning_on_ranks(world, MODELS, cases, alone, tolerance=1e-4, ordered=ordered)


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_strategy_on_two_gpus_learns_as_one_process_on_a_cpu_does(alone: dict[str, Figures]) -> None:
    check_learning_on_ranks(2, MODELS, list_cases(2), alone, tolerance=1e-3, device="cuda")
