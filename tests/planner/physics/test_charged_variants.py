"""Traffic that models with experts, adapters or quantised matrices are charged for: at one byte per second."""

import pytest

from realrl.dataflow.call import Kind
from realrl.families.adapters import LowRank
from realrl.families.shape import Mixture, ModelShape
from realrl.layout.sets import TrainablePart
from tests.planner.physics.test_charged_traffic import (
    ANSWER,
    CPU,
    HEAD,
    ITEMS,
    LAYERS,
    MATRICES,
    SLOW,
    STEP,
    TOKENS,
    charge,
    list_contexts,
    operands,
)
from tests.planner.unit_device import SHAPE, cost, place, store

EXPERTS = SHAPE.model_copy(update={"family": "qwen3_moe", "mixture": Mixture(experts=16, per_token=2)})


def visit(tokens: float, experts: int = 16, each: int = 2) -> float:
    """Experts that tokens visit on average."""
    return experts * (1 - (1 - each / experts) ** tokens)


def test_experts_are_read_if_a_token_visits_them() -> None:
    terms = cost(Kind.GENERATE, STEP, place(), SLOW, model=store(EXPERTS))
    visited = visit(ITEMS)
    block = visited * sum(operands(2 * ITEMS / visited, matrix) for matrix in ((320, 64), (64, 160)))
    normed = 2 * (128 + 64) + 2 * (128 + 2 * 64)
    moved = ITEMS * (2 * (2 * 64 + 2 * 160 + 3 * 64) + 64 + normed)
    layer = sum(operands(ITEMS, matrix) for matrix in ((256, 64), (64, 128), (16, 64))) + block + moved
    cache = 2 * 64 * ITEMS
    head = operands(ITEMS, HEAD) + ITEMS * 960
    each = [LAYERS * (layer + cache * context) + head for context in list_contexts()]
    assert terms["decode"] == pytest.approx(2 * sum(each))


def test_a_shared_block_is_added_and_weights_of_inputs_are_wider() -> None:
    mixture = Mixture(experts=16, per_token=2, scores="sigmoid", normalised=False, weighed="inputs", shared=1)
    shape = SHAPE.model_copy(update={"family": "llama4_text", "mixture": mixture})
    plain = SHAPE.model_copy(update={"family": "mixtral", "mixture": Mixture(experts=16, per_token=2)})
    theirs, ours = (
        cost(Kind.INFERENCE, STEP, place(), SLOW, model=store(s))["compute"] for s in (shape, plain)
    )
    shared = operands(TOKENS, (320, 64)) + operands(TOKENS, (64, 160)) + 3 * 64 * TOKENS
    weighed = 2 * TOKENS * 2 * (64 - 160)
    normed = TOKENS * (2 * (128 + 64) + 2 * (128 + 2 * 64))
    forward = 2 * LAYERS * (shared + weighed + normed)
    assert theirs - ours == pytest.approx(forward)
    theirs, ours = (cost(Kind.TRAIN, STEP, place(), SLOW, model=store(s))["compute"] for s in (shape, plain))
    # Gradients of weights are written in float32.
    products_backward = 2 * (shared - 3 * 64 * TOKENS) + 320 * 64 + 64 * 160
    apart = TOKENS * (2 * 6 * (64 - 160) + 3 * 64 + 5 * (128 + 64))
    assert theirs - ours == pytest.approx(forward + 2 * LAYERS * (products_backward + apart))
    routed = {"router_passes": 1.0}
    # Probabilities are float32.
    assert charge(Kind.INFERENCE, shape=plain, **routed) == pytest.approx(4 * LAYERS * TOKENS * 16)
    assert charge(Kind.INFERENCE, shape=plain, activation_passes=1.0) == pytest.approx(
        2 * LAYERS * TOKENS * 2 * 160
    )
    assert charge(Kind.INFERENCE, shape=shape, activation_passes=1.0) == pytest.approx(
        2 * LAYERS * TOKENS * 3 * 160
    )


def test_training_moves_rows_to_experts_and_back() -> None:
    """Beside a dense model: products of experts, the router, and rows that are gathered, weighted and added up."""
    plain = SHAPE.model_copy(update={"family": "mixtral", "mixture": Mixture(experts=16, per_token=2)})
    experts, dense = (
        cost(Kind.TRAIN, STEP, place(), SLOW, model=store(s))["compute"] for s in (plain, SHAPE)
    )
    visited, matrices, router = visit(TOKENS), ((320, 64), (64, 160)), (16, 64)
    block = visited * sum(operands(2 * TOKENS / visited, matrix) for matrix in matrices)
    products = block + operands(TOKENS, router) - sum(operands(TOKENS, matrix) for matrix in matrices)
    # Gradients are written in float32: of the router and of experts that are visited.
    wider = 16 * 64 + (visited - 1) * (320 * 64 + 64 * 160)
    moved = TOKENS * (2 * (5 * 64 + 2 * 160) + 64) + TOKENS * (2 * (7 * 64 + 6 * 160) + 4 * 64)
    assert experts - dense == pytest.approx(2 * LAYERS * (3 * products + wider + moved))


def test_gradients_of_experts_are_added_up_if_a_token_visits_them() -> None:
    visited = visit(TOKENS)
    each = 256 * 64 + 64 * 128 + 16 * 64 + visited * (320 * 64 + 64 * 160)
    assert charge(Kind.TRAIN, shape=EXPERTS, apart_gradient_bytes=1.0) == 0
    expected = LAYERS * each + 960 * 64
    assert charge(Kind.TRAIN, shape=EXPERTS, gradient_bytes=1.0) == pytest.approx(expected)


def adapt(**settings: object) -> ModelShape:
    return SHAPE.model_copy(update={"lora": LowRank(rank=4, **settings)})  # type: ignore[arg-type]


ADAPTED = TrainablePart(adapters=True)


def test_adapters_are_added_to_products() -> None:
    """Of q, k and v, of out, of gate and up, and of down: A of all blocks is one product, B one of each."""
    model = store(adapt(targets=("q_proj", "down_proj")), part=ADAPTED)
    terms = cost(Kind.INFERENCE, STEP, place(), SLOW, model=model)
    factors = [(4, 64), (128, 4), (4, 160), (64, 4)]
    added = sum(operands(TOKENS, factor) for factor in factors) + 2 * TOKENS * (128 + 64)
    plain = cost(Kind.INFERENCE, STEP, place(), SLOW)["compute"]
    assert terms["compute"] - plain == pytest.approx(2 * LAYERS * added)


def test_dora_reads_weights_and_scales_products() -> None:
    plain, dora = (
        cost(
            Kind.INFERENCE, STEP, place(), SLOW, model=store(adapt(targets=("o_proj",), dora=d), part=ADAPTED)
        )
        for d in (False, True)
    )
    added = 64 * 128 + 2 * TOKENS * 64 + operands(64, (4, 128))
    assert dora["compute"] - plain["compute"] == pytest.approx(2 * LAYERS * added)


def test_gradients_of_adapters_alone_are_added_up() -> None:
    shape = adapt(targets=("q_proj", "down_proj"))
    elements = 4 * (64 + 128) + 4 * (160 + 64)
    assert charge(Kind.TRAIN, shape=shape, part=ADAPTED, gradient_bytes=1.0) == pytest.approx(
        LAYERS * elements
    )


def test_quantised_matrices_are_widened_for_every_pass() -> None:
    """Read as a byte, written, and on a GPU read and written once more with their scales."""
    weights = sum(outputs * inputs for outputs, inputs in MATRICES)
    for cluster, passes, slower in ((SLOW, 3, 1.0), (CPU, 1, 2.5)):
        for kind in ("int8", "fp8"):
            shape = SHAPE.model_copy(update={"quantised": kind})
            plain, narrow = (
                cost(Kind.INFERENCE, STEP, place(), cluster, model=store(s), cpu_fp8_widening=2.5)["compute"]
                for s in (SHAPE, shape)
            )
            factor = slower if kind == "fp8" else 1
            assert narrow - plain == pytest.approx(factor * LAYERS * weights * (1 + passes * 2))


def test_prefilling_widens_the_matrices_that_it_multiplies_by() -> None:
    shape = SHAPE.model_copy(update={"quantised": "int8"})
    plain, narrow = (cost(Kind.GENERATE, STEP, place(), SLOW, model=store(s)) for s in (SHAPE, shape))
    weights = sum(outputs * inputs for outputs, inputs in MATRICES)
    assert narrow["compute"] - plain["compute"] == pytest.approx((3 * weights + 256 * 64) * 7)
    assert narrow["decode"] - plain["decode"] == pytest.approx(ANSWER * LAYERS * weights * 7)
