"""Arithmetic that calls are charged for, beside what pencil and paper say: seconds at one operation per second."""

from dataclasses import replace

import pytest

from realrl.dataflow.call import Candidates, Kind
from realrl.families.adapters import LowRank
from realrl.families.shape import Mixture, ModelShape
from realrl.layout.sets import TrainablePart
from realrl.planner.workload.workload import Workload
from tests.planner.unit_device import SHAPE, cost, make_cluster, place, store

SLOW = make_cluster(bf16_flops=1.0, fp32_flops=0.125)
PROMPT, ANSWER, ITEMS = 8, 24, 6
STEP = Workload(ITEMS, (PROMPT,), (ANSWER,), ANSWER)
TOKENS, LENGTH = ITEMS * 32, 32
DECODED = 8 * 32
"""Rows of all decode steps: a GPU has a graph of eight rows, and looks at their tokens every 16 steps."""
QKV, OUT, UP, DOWN, HEAD = 64 * (128 + 2 * 64), 128 * 64, 64 * 2 * 160, 160 * 64, 64 * 960
LAYER = QKV + OUT + UP + DOWN
"""Parameters of the matrices of a layer of `SHAPE`, which has four, and of its head."""
ATTENTION = 2 * LENGTH**2 * 128 * ITEMS
"""Two products of half of the scores, of all sequences in a layer."""


def test_inference_multiplies_by_each_parameter_once() -> None:
    terms = cost(Kind.INFERENCE, STEP, place(), SLOW)
    assert terms["compute"] == 2 * TOKENS * (4 * LAYER + HEAD) + 4 * ATTENTION
    assert sum(terms.values()) == terms["compute"]


def test_training_multiplies_three_times_and_attends_three_and_a_half_times() -> None:
    expected = 3 * 2 * TOKENS * (4 * LAYER + HEAD) + 3.5 * 4 * ATTENTION
    assert cost(Kind.TRAIN, STEP, place(), SLOW)["compute"] == expected


def test_recomputation_runs_the_layers_forward_once_more() -> None:
    plain, again = (cost(Kind.TRAIN, STEP, place(recompute=r), SLOW)["compute"] for r in (False, True))
    assert again - plain == 2 * TOKENS * 4 * LAYER + 4 * ATTENTION


def test_minibatches_and_epochs_are_gone_through_one_after_the_other() -> None:
    once = cost(Kind.TRAIN, STEP, place(), SLOW)["compute"]
    assert cost(Kind.TRAIN, STEP, place(), SLOW, minibatches=3)["compute"] == pytest.approx(once)
    assert cost(Kind.TRAIN, replace(STEP, epochs=2), place(), SLOW)["compute"] == pytest.approx(2 * once)


def test_micro_batches_divide_the_work() -> None:
    whole = cost(Kind.TRAIN, STEP, place(), SLOW)["compute"]
    assert cost(Kind.TRAIN, STEP, place(tokens=64), SLOW)["compute"] == pytest.approx(whole)


def test_long_sequences_attend_more() -> None:
    """Of two lengths, squares are averaged and not lengths."""
    terms = cost(Kind.INFERENCE, replace(STEP, prompts=(8, 40)), place(), SLOW)
    squares = ITEMS * (32**2 + 64**2) / 2
    assert terms["compute"] == pytest.approx(2 * 1.5 * TOKENS * (4 * LAYER + HEAD) + 4 * 2 * squares * 128)


def test_tensor_parallel_ranks_share_heads_blocks_and_vocabulary() -> None:
    whole, quarter = (cost(Kind.TRAIN, STEP, place(tp=tp), SLOW)["compute"] for tp in (1, 4))
    assert quarter == whole / 4


def test_the_busiest_of_uneven_shares_counts() -> None:
    """Of 8 query heads and 160 units, the largest of three ranks has 3 and 54; 3 heads read 2 pairs of keys."""
    layer = 64 * (3 * 16 + 2 * 2 * 16) + 3 * 16 * 64 + 3 * 64 * 54
    attention = 2 * LENGTH**2 * 3 * 16 * ITEMS
    expected = 2 * TOKENS * (4 * layer + 64 * 320) + 4 * attention
    assert cost(Kind.INFERENCE, STEP, place(tp=3), SLOW)["compute"] == expected


def test_the_busiest_data_parallel_rank_counts() -> None:
    """Six sequences over four ranks: two on some."""
    expected = cost(Kind.INFERENCE, STEP, place(), SLOW)["compute"] / 3
    assert cost(Kind.INFERENCE, STEP, place(4), SLOW)["compute"] == pytest.approx(expected)


def test_a_pipeline_is_charged_its_slowest_stage_and_the_bubble() -> None:
    """Two stages of two layers, and the head on the last; six chunks of one sequence or two."""
    terms = cost(Kind.INFERENCE, STEP, place(pp=2, tokens=32), SLOW)
    layers, head = 2 * (2 * LENGTH * LAYER + 2 * LENGTH**2 * 128), 2 * LENGTH * HEAD
    assert terms["compute"] == 6 * (layers + head)
    assert terms["bubble"] == layers
    trained = cost(Kind.TRAIN, STEP, place(pp=2, tokens=32), SLOW)
    backward = 2 * (2 * 2 * LENGTH * LAYER + 2.5 * 2 * LENGTH**2 * 128)
    assert trained["compute"] == 6 * (layers + backward + 3 * head)
    assert trained["bubble"] == layers + backward


def test_float32_is_computed_at_its_own_rate() -> None:
    narrow = cost(Kind.TRAIN, STEP, place(), SLOW)["compute"]
    assert cost(Kind.TRAIN, STEP, place(), SLOW, model=store(dtype="float32"))["compute"] == 8 * narrow
    mixed = cost(Kind.INFERENCE, STEP, place(), SLOW, model=store(dtype="mixed"))["compute"]
    # Operands of products are rounded, those of attention are not.
    assert mixed == 2 * TOKENS * (4 * LAYER + HEAD) + 8 * 4 * ATTENTION


def test_achieved_fractions_divide_the_peaks() -> None:
    expected = 2 * TOKENS * (4 * LAYER + HEAD) / 0.5 + 4 * ATTENTION / 0.25
    assert cost(Kind.INFERENCE, STEP, place(), SLOW, matmul=0.5, attention=0.25)["compute"] == expected


def test_exact_forward_passes_take_longer_and_backward_passes_do_not() -> None:
    model = replace(store(), exact=True)
    plain, forward = (cost(kind, STEP, place(), SLOW)["compute"] for kind in (Kind.TRAIN, Kind.INFERENCE))
    for kind, whole in ((Kind.INFERENCE, forward), (Kind.TRAIN, plain)):
        exact = cost(kind, STEP, place(), SLOW, model=model, exact_forward=1.5)["compute"]
        assert exact - whole == pytest.approx(forward / 2)
    generated, exactly = (
        cost(Kind.GENERATE, STEP, place(), SLOW, model=one, exact_forward=1.5) for one in (store(), model)
    )
    for term in ("compute", "decode"):
        assert exactly[term] == pytest.approx(1.5 * generated[term])


def test_logits_that_are_not_kept_are_computed_again() -> None:
    """2^28 logits are 279,620 rows of 960, of which 279,552 are a multiple of 128."""
    many = replace(STEP, items=279_552 // 32 + 1)
    few = replace(STEP, items=many.items - 1)
    found = [cost(Kind.TRAIN, step, place(tokens=1 << 30), SLOW)["compute"] for step in (few, many)]
    each = 3 * 2 * LENGTH * (4 * LAYER + HEAD) + 3.5 * 4 * 2 * LENGTH**2 * 128
    assert found[0] == few.items * each
    assert found[1] == many.items * each + 2 * many.items * LENGTH * HEAD


def test_a_scalar_head_multiplies_nothing() -> None:
    model = store(head="scalar")
    assert cost(Kind.TRAIN, STEP, place(), SLOW, model=model)["compute"] == (
        3 * 2 * TOKENS * 4 * LAYER + 3.5 * 4 * ATTENTION
    )


def test_windows_hide_keys_from_attention() -> None:
    """Two of four layers see 10 tokens: of 32² pairs, (32 - 10)² / 2 are hidden, and not 32² / 2 seen."""
    shape = SHAPE.model_copy(update={"family": "mistral", "window": 10, "windowed_layers": (0, 2)})
    attention = 2 * 128 * ITEMS * (2 * 32**2 + 2 * (32**2 - 22**2))
    terms = cost(Kind.INFERENCE, STEP, place(), SLOW, model=store(shape))
    assert terms["compute"] == pytest.approx(2 * TOKENS * (4 * LAYER + HEAD) + attention)


MIXED = SHAPE.model_copy(update={"family": "qwen3_moe", "mixture": Mixture(experts=16, per_token=2)})


def test_tokens_pass_through_their_experts_and_the_router() -> None:
    layer = QKV + OUT + 64 * 16 + 2 * (UP + DOWN)
    inferred, trained = (
        cost(kind, STEP, place(), SLOW, model=store(MIXED))["compute"]
        for kind in (Kind.INFERENCE, Kind.TRAIN)
    )
    assert inferred == pytest.approx(2 * TOKENS * (4 * layer + HEAD) + 4 * ATTENTION)
    assert trained == pytest.approx(3 * 2 * TOKENS * (4 * layer + HEAD) + 3.5 * 4 * ATTENTION)


def test_a_shared_block_is_one_more() -> None:
    mixture = Mixture(experts=16, per_token=1, scores="sigmoid", normalised=False, weighed="inputs", shared=1)
    shape = SHAPE.model_copy(update={"family": "llama4_text", "mixture": mixture})
    layer = QKV + OUT + 64 * 16 + 2 * (UP + DOWN)
    terms = cost(Kind.INFERENCE, STEP, place(), SLOW, model=store(shape))
    assert terms["compute"] == pytest.approx(2 * TOKENS * (4 * layer + HEAD) + 4 * ATTENTION)


def adapt(**settings: object) -> ModelShape:
    return SHAPE.model_copy(update={"lora": LowRank(rank=4, **settings)})  # type: ignore[arg-type]


ADAPTED = (
    (3 * 64 * 4 + 4 * (128 + 64 + 64)) + (128 * 4 + 4 * 64) + (2 * 64 * 4 + 4 * 320) + (160 * 4 + 4 * 64)
)
"""Parameters of adapters of rank 4 of seven matrices."""


def test_adapters_are_multiplied_by_and_frozen_matrices_have_no_gradient() -> None:
    model = store(adapt(), part=TrainablePart(adapters=True))
    inferred, trained = (
        cost(kind, STEP, place(), SLOW, model=model)["compute"] for kind in (Kind.INFERENCE, Kind.TRAIN)
    )
    assert inferred == pytest.approx(2 * TOKENS * (4 * (LAYER + ADAPTED) + HEAD) + 4 * ATTENTION)
    products = 2 * (4 * LAYER + HEAD) + 3 * 4 * ADAPTED
    assert trained == pytest.approx(2 * TOKENS * products + 3.5 * 4 * ATTENTION)


def test_dora_multiplies_factors_to_know_the_norms_of_rows() -> None:
    plain, dora = (
        cost(
            Kind.INFERENCE, STEP, place(), SLOW, model=store(adapt(dora=d), part=TrainablePart(adapters=True))
        )
        for d in (False, True)
    )
    norms = 2 * 4 * ((128 + 64 + 64) * 64 + 64 * 128 + 320 * 64 + 64 * 160)
    assert dora["compute"] - plain["compute"] == pytest.approx(4 * norms)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_frozen_layers_have_no_backward_pass(layers: int) -> None:
    terms = cost(Kind.TRAIN, STEP, place(), SLOW, model=store(part=TrainablePart(last_layers=layers)))
    products = 3 * HEAD + (4 + 2 * layers) * LAYER
    assert terms["compute"] == 2 * TOKENS * products + (4 + 2.5 * layers) * ATTENTION


def test_a_frozen_tied_head_has_no_gradient_of_its_own() -> None:
    shape = SHAPE.model_copy(update={"tied_embeddings": True})
    whole, frozen = (
        cost(Kind.TRAIN, STEP, place(), SLOW, model=store(shape, part=TrainablePart(freeze_embeddings=f)))
        for f in (False, True)
    )
    assert whole["compute"] - frozen["compute"] == 2 * TOKENS * HEAD


def test_generation_prefills_all_but_the_last_token_of_prompts() -> None:
    """The last layer ends with queries, keys and values, which decode steps read."""
    terms = cost(Kind.GENERATE, STEP, place(), SLOW)
    tokens, squares = ITEMS * (PROMPT - 1), ITEMS * (PROMPT - 1) ** 2
    assert terms["compute"] == pytest.approx(2 * tokens * (3 * LAYER + QKV) + 3 * 2 * squares * 128)


def test_decode_steps_multiply_each_row_and_sample_it() -> None:
    """Attention of decode steps is bound by memory, and its operations are not counted."""
    terms = cost(Kind.GENERATE, STEP, place(), SLOW)
    assert terms["decode"] == pytest.approx(2 * DECODED * (4 * LAYER + HEAD))
    half = cost(Kind.GENERATE, STEP, place(tp=2), SLOW)
    assert half["decode"] == pytest.approx(terms["decode"] / 2)


def test_decode_steps_visit_few_experts_of_a_mixture() -> None:
    terms = cost(Kind.GENERATE, STEP, place(), SLOW, model=store(MIXED))
    layer = QKV + OUT + 64 * 16 + 2 * (UP + DOWN)
    assert terms["decode"] == pytest.approx(2 * DECODED * (4 * layer + HEAD))


def test_samples_of_a_prompt_share_its_prefill() -> None:
    alone, shared = (cost(Kind.GENERATE, replace(STEP, samples=n), place(), SLOW)["compute"] for n in (1, 3))
    assert shared == pytest.approx(alone / 3)


def test_a_pipeline_decodes_a_batch_per_stage() -> None:
    """Two batches of three rows, for which there is a graph of four: the slower stage has the head, and the other
    one's time is its bubble."""
    terms = cost(Kind.GENERATE, STEP, place(pp=2), SLOW)
    first, last = (2 * 4 * (2 * LAYER + head) for head in (0, HEAD))
    assert terms["decode"] == pytest.approx(32 * 2 * last)
    passes = terms["bubble"]  # of decode steps there is none: 2 * last is more than first + last
    assert first < last and 0 < passes < first * PROMPT


def test_selection_of_the_likeliest_tokens_and_given_candidates_multiply_nothing() -> None:
    plain = cost(Kind.INFERENCE, STEP, place(), SLOW)
    for candidates in (Candidates(4), Candidates(4, "teacher_ids")):
        assert cost(Kind.INFERENCE, STEP, place(), SLOW, candidates=candidates) == plain
