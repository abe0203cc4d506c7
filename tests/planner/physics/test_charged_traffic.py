"""Traffic of device memory that calls are charged for, beside what pencil and paper say: at one byte per second."""

from dataclasses import replace

import numpy as np
import pytest

from realrl.dataflow.call import Candidates, Kind
from realrl.layout.sets import TrainablePart
from realrl.planner.cost.generation import split_decode_steps
from realrl.planner.workload.generation import split_generations
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import Sampling, Workload
from tests.planner.unit_device import SHAPE, cost, make_call, make_cluster, place, store

SLOW = make_cluster(memory_bytes_per_s=1.0)
CPU = make_cluster(memory_bytes_per_s=1.0, cpu=True)
PROMPT, ANSWER, ITEMS = 16, 16, 8
STEP = Workload(ITEMS, (PROMPT,), (ANSWER,), ANSWER)
TOKENS, LENGTH, LAYERS = ITEMS * 32, 32, 4
MATRICES = [(256, 64), (64, 128), (320, 64), (64, 160)]
"""Outputs and inputs of the matrices of a layer of `SHAPE`."""
HEAD = (960, 64)
WHOLE_LAYER = sum(outputs * inputs for outputs, inputs in MATRICES) + 2 * 64
PARAMETERS = LAYERS * WHOLE_LAYER + 64 + 2 * 960 * 64


def operands(rows: float, matrix: tuple[int, int]) -> float:
    """Elements of the three matrices of a product."""
    outputs, inputs = matrix
    return rows * inputs + inputs * outputs + rows * outputs


def products(rows: float) -> float:
    """Elements that the products of a layer read and write."""
    return sum(operands(rows, matrix) for matrix in MATRICES)


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4), ("mixed", 4)])
def test_products_read_two_matrices_and_write_one(dtype: str, width: int) -> None:
    model = store(dtype=dtype)  # type: ignore[arg-type]
    moved = LAYERS * products(TOKENS) + operands(TOKENS, HEAD)
    # Logits are written in float32, and so are sums of gradients.
    wider = (4 - width) * TOKENS * 960
    assert cost(Kind.INFERENCE, STEP, place(), SLOW, model=model)["compute"] == width * moved + wider
    # Both products backward are of three matrices as large.
    gradients = (4 - width) * (LAYERS * (WHOLE_LAYER - 2 * 64) + 960 * 64)
    trained = cost(Kind.TRAIN, STEP, place(), SLOW, model=model)["compute"]
    assert trained == 3 * width * moved + wider + gradients


def test_every_micro_batch_reads_the_weights() -> None:
    terms = cost(Kind.INFERENCE, STEP, place(tokens=64), SLOW)
    each = 2 * (LAYERS * products(64) + operands(64, HEAD)) + 2 * 64 * 960
    assert terms["compute"] == 4 * each


def test_the_achieved_fraction_divides_the_bandwidth() -> None:
    whole, half = (cost(Kind.INFERENCE, STEP, place(), SLOW, memory=m)["compute"] for m in (1.0, 0.5))
    assert half == 2 * whole


def charge(
    kind: Kind, placement=None, *, step=STEP, shape=SHAPE, part=None, cluster=SLOW, **values: float
) -> float:
    """Bytes of a call's computation that some constants add to it."""
    model = store(shape) if part is None else store(shape, part=part)
    term = "decode" if kind is Kind.GENERATE else "compute"
    placement = placement or place()
    with_constants, without = (
        cost(kind, step, placement, cluster, model=model, **of)[term] for of in (values, {})
    )
    return with_constants - without


@pytest.mark.parametrize(
    ("constant", "values"),
    [
        ("normal_passes", 64),
        ("rotary_passes", 128 + 64),
        ("attention_passes", 2 * 128 + 2 * 64),
        ("activation_passes", 160),
    ],
)
def test_elementwise_kernels_go_through_vectors_of_every_token(constant: str, values: int) -> None:
    assert charge(Kind.INFERENCE, **{constant: 1.0}) == 2 * LAYERS * TOKENS * values
    assert charge(Kind.GENERATE, **{constant: 1.0}) == 2 * LAYERS * ITEMS * ANSWER * values
    expected = values if constant == "normal_passes" else values / 4
    assert charge(Kind.INFERENCE, place(tp=4), **{constant: 1.0}) == 2 * LAYERS * TOKENS * expected


@pytest.mark.parametrize(
    ("constant", "values"),
    [
        ("normal_backward_passes", 64),
        ("rotary_backward_passes", 128 + 2 * 64),
        ("attention_passes", 3 * (2 * 128 + 2 * 64)),
        ("activation_backward_passes", 160),
        ("head_norm_passes", 0),
    ],
)
def test_elementwise_kernels_backward_go_through_vectors_of_every_token(constant: str, values: int) -> None:
    assert charge(Kind.TRAIN, **{constant: 1.0}) == 2 * LAYERS * TOKENS * values
    expected = values if constant == "normal_backward_passes" else values / 4
    assert charge(Kind.TRAIN, place(tp=4), **{constant: 1.0}) == 2 * LAYERS * TOKENS * expected


def test_norms_of_heads_copy_their_gradients() -> None:
    shape = SHAPE.model_copy(update={"family": "qwen3"})
    assert charge(Kind.TRAIN, shape=shape, head_norm_passes=1.0) == 2 * LAYERS * TOKENS * (128 + 2 * 64)
    plain, normed = (cost(Kind.TRAIN, STEP, place(), SLOW, model=store(s))["compute"] for s in (SHAPE, shape))
    # Forward normalised and put together; backward, gradients of norms and copies of both.
    values = 2 * (128 + 64) + 2 * (128 + 2 * 64) + 5 * (128 + 64)
    assert normed - plain == pytest.approx(2 * LAYERS * TOKENS * values)


def test_what_tp_ranks_sum_is_copied() -> None:
    for kind in (Kind.INFERENCE, Kind.TRAIN):
        assert charge(kind, place(tp=4, sp=True), copied_passes=1.0) == 2 * LAYERS * TOKENS * 64
        assert charge(kind, copied_passes=1.0) == 0


def test_sequence_parallelism_divides_norms_and_residual_sums() -> None:
    assert charge(Kind.INFERENCE, place(tp=4, sp=True), normal_passes=1.0) == 2 * LAYERS * TOKENS * 64 / 4


def test_kernels_take_a_while_however_little_they_do() -> None:
    """Those of a layer but for its four products and attention; a CPU has none."""
    numbers = {"least_kernel_s": 1e9, "forward_operations": 11}
    assert charge(Kind.INFERENCE, **numbers) == pytest.approx(LAYERS * 6e9)
    assert charge(Kind.INFERENCE, cluster=CPU, **numbers) == 0
    backward = {"least_kernel_s": 1e9, "forward_operations": 5, "backward_operations": 9 + 4}
    assert charge(Kind.TRAIN, **backward) == pytest.approx(LAYERS * 4e9)
    sampling = charge(Kind.GENERATE, least_kernel_s=1e9, forward_operations=5, sampling_operations=7)
    assert sampling == pytest.approx(ANSWER * 6e9, rel=1e-4)


def test_logits_are_gone_through_by_their_head() -> None:
    assert charge(Kind.INFERENCE, logit_bytes=1.0) == TOKENS * 960
    assert charge(Kind.INFERENCE, place(tp=4), logit_bytes=1.0) == TOKENS * 240
    assert charge(Kind.TRAIN, logit_bytes=1.0) == TOKENS * 960
    assert charge(Kind.TRAIN, logit_backward_bytes=1.0) == TOKENS * 960
    assert charge(Kind.INFERENCE, logit_backward_bytes=1.0) == 0
    assert charge(Kind.GENERATE, sampled_logit_bytes=1.0) == ITEMS * ANSWER * 960
    # Of every TP rank's logits all are gathered.
    assert charge(Kind.GENERATE, place(tp=4), sampled_logit_bytes=1.0) == ITEMS * ANSWER * 960
    assert charge(Kind.GENERATE, place(tp=4), gathered_logit_bytes=1.0) == ITEMS * ANSWER * 960
    assert charge(Kind.GENERATE, gathered_logit_bytes=1.0) == 0
    for kind, constant in ((Kind.INFERENCE, "cpu_logit_bytes"), (Kind.TRAIN, "cpu_logit_backward_bytes")):
        assert charge(kind, cluster=CPU, **{constant: 1.0}) == TOKENS * 960
        assert charge(kind, **{constant: 1.0}) == 0
    restricted = {"minimum_bytes": 1.0, "top_k_bytes": 10.0, "top_p_bytes": 100.0}
    for sampling, each in (
        (Sampling(), 0), (Sampling(minimum=True), 1), (Sampling(top_k=True), 10), (Sampling(top_p=True), 100)
    ):  # fmt: skip
        step = replace(STEP, sampling=sampling)
        assert charge(Kind.GENERATE, step=step, **restricted) == each * ITEMS * ANSWER * 960


def test_a_scalar_head_reads_hidden_states_three_times() -> None:
    bare, scalar = (
        cost(Kind.INFERENCE, STEP, place(), SLOW, model=store(head="scalar")),
        cost(Kind.TRAIN, STEP, place(), SLOW, model=store(head="scalar")),
    )
    assert bare["compute"] == 2 * (LAYERS * products(TOKENS) + TOKENS * 64)
    gradients = 2 * LAYERS * (WHOLE_LAYER - 2 * 64)
    assert scalar["compute"] == 3 * 2 * (LAYERS * products(TOKENS) + TOKENS * 64) + gradients


def test_the_likeliest_tokens_are_selected_of_all_logits() -> None:
    found = [
        cost(Kind.INFERENCE, STEP, place(), SLOW, candidates=candidates, likeliest_bytes=3.0)["compute"]
        for candidates in (None, Candidates(5), Candidates(5, "teacher_ids"))
    ]
    assert found[1] - found[0] == 3 * TOKENS * 960 and found[2] == found[0]


def test_gradients_are_added_up_in_every_micro_batch_and_cleared_in_every_step() -> None:
    each = LAYERS * (WHOLE_LAYER - 2 * 64)
    assert charge(Kind.TRAIN, place(tokens=64), gradient_bytes=1.0) == 4 * (each + 960 * 64)
    assert charge(Kind.TRAIN, place(tokens=64), apart_gradient_bytes=1.0) == 0
    apart = charge(Kind.TRAIN, place(tokens=64), cluster=CPU, apart_gradient_bytes=1.0)
    assert apart == 4 * each
    step = replace(STEP, epochs=2)
    for dp, update in ((1, PARAMETERS), (2, PARAMETERS / 2)):
        terms = cost(Kind.TRAIN, step, place(dp), SLOW, minibatches=3, update_bytes=5.0, clear_bytes=7.0)
        assert terms["optimizer"] == 2 * 3 * (5 * update + 7 * PARAMETERS)


def test_every_chunk_of_logits_adds_to_the_gradient_of_the_whole_table() -> None:
    """Of logits of 960 columns, 279,552 rows are one chunk."""
    rows = 3 * 279_552
    for tokens, chunks in ((rows - 32, 3), (rows, 3), (rows + 32, 4)):
        step, placement = replace(STEP, items=tokens // 32), place(tokens=1 << 30)
        bare, charged = (
            cost(Kind.TRAIN, step, placement, SLOW, gradient_bytes=each)["compute"] for each in (0.0, 8.0)
        )
        assert charged - bare == 8 * (LAYERS * (WHOLE_LAYER - 2 * 64) + chunks * 960 * 64)
    frozen = SHAPE.model_copy(update={"tied_embeddings": True})
    model = store(frozen, part=TrainablePart(freeze_embeddings=True))
    bare, charged = (
        cost(Kind.TRAIN, STEP, place(), SLOW, model=model, gradient_bytes=each)["compute"]
        for each in (0.0, 1.0)
    )
    assert charged - bare == LAYERS * (WHOLE_LAYER - 2 * 64)


def test_optimizer_steps_are_those_of_the_fullest_stage_and_of_what_is_trained() -> None:
    table, norm = 960 * 64, 64
    steps = {
        place(tp=2): (PARAMETERS - LAYERS * 2 * 64 - 64) / 2 + LAYERS * 2 * 64 + 64,
        place(pp=2): 2 * WHOLE_LAYER + table + norm,
    }
    for placement, elements in steps.items():
        assert cost(Kind.TRAIN, STEP, placement, SLOW, update_bytes=1.0)["optimizer"] == elements
    model = store(part=TrainablePart(last_layers=1))
    terms = cost(Kind.TRAIN, STEP, place(), SLOW, model=model, update_bytes=1.0, gradient_bytes=0.0)
    assert terms["optimizer"] == WHOLE_LAYER + norm + table


def test_attention_backward_reads_what_is_computed_in_memory() -> None:
    shape = SHAPE.model_copy(update={"family": "gemma2"})
    scores = LAYERS * ITEMS * LENGTH**2 / 2 * 8
    assert charge(Kind.INFERENCE, shape=shape, score_bytes=1.0) == scores
    assert charge(Kind.TRAIN, shape=shape, score_bytes=1.0) == scores
    assert charge(Kind.TRAIN, shape=shape, score_backward_bytes=1.0) == scores
    assert charge(Kind.TRAIN, score_bytes=1.0, score_backward_bytes=1.0) == 0
    assert charge(Kind.TRAIN, shape=shape, cluster=CPU, score_bytes=1.0) == 0


def list_contexts(prompt: int = PROMPT, answer: int = ANSWER) -> list[int]:
    """Keys that each decode step reads: the prompt, and what came after it."""
    return [prompt + i for i in range(answer)]


def decoded(rows: int, contexts: list[int], *, heads: int = 4, tp: int = 1, layers: int = LAYERS) -> float:
    """Bytes of the decode steps of some rows: weights, activations, keys and values, head."""
    split = [(256 // tp, 64), (64, 128 // tp), (320 // tp, 64), (64, 160 // tp)]
    each = layers * sum(operands(rows, matrix) for matrix in split) + operands(rows, (960 // tp, 64))
    cache = layers * 2 * heads * 16 * rows
    # Logits are written in float32.
    return 2 * sum(each + cache * context + rows * 960 for context in contexts)


def test_decode_steps_read_the_weights_and_the_cache() -> None:
    found = cost(Kind.GENERATE, STEP, place(), SLOW)["decode"]
    assert found == pytest.approx(decoded(ITEMS, list_contexts()))
    split = cost(Kind.GENERATE, STEP, place(tp=2), SLOW)["decode"]
    assert split == pytest.approx(decoded(ITEMS, list_contexts(), heads=2, tp=2))


def test_shared_key_heads_are_read_by_every_rank_and_uneven_groups_for_every_query() -> None:
    """Eight ranks have a query each, and pairs of them the same keys. Of nine queries in three groups, two ranks
    have four and five, for each of which keys are kept."""
    eight = cost(Kind.GENERATE, STEP, place(tp=8), SLOW)["decode"]
    split = [((16 + 2 * 16), 64), (64, 16), (40, 64), (64, 20)]
    each = LAYERS * sum(operands(ITEMS, matrix) for matrix in split) + operands(ITEMS, (120, 64))
    cache = LAYERS * 2 * 16 * ITEMS
    assert eight == pytest.approx(
        2 * sum(each + cache * context + ITEMS * 960 for context in list_contexts())
    )
    uneven = SHAPE.model_copy(update={"heads": 9, "kv_heads": 3})
    short, long = (
        cost(Kind.GENERATE, replace(STEP, prompts=(n,)), place(tp=2), SLOW, model=store(uneven))["decode"]
        for n in (8, 9)
    )
    assert long - short == pytest.approx(2 * LAYERS * 2 * 5 * 16 * ITEMS * ANSWER)


def test_windows_bound_what_decode_steps_read() -> None:
    shape = SHAPE.model_copy(update={"family": "mistral", "window": 4, "windowed_layers": (1,)})
    found = cost(Kind.GENERATE, STEP, place(), SLOW, model=store(shape))["decode"]
    hidden = sum(2 * 2 * 4 * 16 * ITEMS * (context - 4) for context in list_contexts())
    assert found == pytest.approx(decoded(ITEMS, list_contexts()) - hidden)


def test_rows_that_have_ended_are_not_decoded() -> None:
    """Half of the rows end at 16 of 64 tokens, or before: a quarter of the steps have all rows, the rest half."""
    contexts = list_contexts(answer=64)
    expected = decoded(8, contexts[:16]) + decoded(4, contexts[16:])
    for short in (16, 9):
        step = replace(STEP, answers=(short, 60), max_new_tokens=64)
        assert cost(Kind.GENERATE, step, place(), SLOW)["decode"] == pytest.approx(expected)


def test_a_graph_has_more_rows_than_are_left_but_no_keys_for_them() -> None:
    step = replace(STEP, items=6)
    found = cost(Kind.GENERATE, step, place(), SLOW)["decode"]
    keys = 2 * LAYERS * 2 * 64 * 2 * sum(list_contexts())
    assert found == pytest.approx(decoded(8, list_contexts()) - keys)


def test_samples_of_a_prompt_read_its_keys_apart_on_a_gpu_and_together_on_a_cpu() -> None:
    step = replace(STEP, samples=4)
    alone, apart, together = (
        cost(Kind.GENERATE, one, place(), cluster)["decode"]
        for one, cluster in ((STEP, SLOW), (step, SLOW), (step, CPU))
    )
    assert apart == pytest.approx(alone)
    spared = 2 * LAYERS * 2 * 64 * ITEMS * ANSWER * PROMPT * (1 - 1 / 4)
    assert alone - together == pytest.approx(spared)


def test_rows_wait_for_a_cache_that_is_full() -> None:
    """Of nine blocks of 16 tokens four rows of 16 + 16 tokens, which are expected to take two blocks each."""
    step = replace(STEP, items=12)
    terms = cost(Kind.GENERATE, step, place(tokens=9 * 16), SLOW)
    # Eight rows waited, which took four rows at a time 8 * 16 / 4 steps, in which they were met halfway.
    waiting = 8 * ANSWER / 4
    met = decoded(4, list_contexts()) / ANSWER
    assert terms["decode"] == pytest.approx(waiting * met + decoded(4, list_contexts()))


def test_rows_of_several_lengths_are_replaced_when_an_eighth_of_them_has_ended() -> None:
    """So that a sixteenth of the places is empty on average while rows wait; those of one length end together."""
    for answers, places in (((32,), 8.0), ((16, 32, 32, 48), 7.5)):
        work = replace(STEP, items=64, answers=answers, max_new_tokens=48).work(make_call(Kind.GENERATE))
        sizes = split_generations(work, Strategies.of([place(tokens=512).strategy]), cpu=False)
        sizes = replace(sizes, cache=replace(sizes.cache, rows=np.array([8])))
        waiting = next(iter(split_decode_steps(work, sizes, steps_per_look=16, shares=False)))
        assert (waiting.rows, waiting.steps) == (8, (64 - 8) * 32 / places)


def test_pipelines_decode_a_batch_per_stage() -> None:
    """The slower of two stages has two layers and the head, twice, each time for half of the rows."""
    terms = cost(Kind.GENERATE, STEP, place(pp=2), SLOW)
    assert terms["decode"] == pytest.approx(2 * decoded(4, list_contexts(), layers=2))


def test_the_cache_is_allocated_once() -> None:
    """Eight prompts of a block each and eight continuations, and a scratch block: written, not read."""
    terms = cost(Kind.GENERATE, STEP, place(), SLOW)
    cache = (8 * 1 + 8 * 1 + 1) * 16 * LAYERS * 2 * 64 * 2
    rows = ITEMS * (PROMPT - 1)
    forward = 2 * (3 * products(rows) + operands(rows, MATRICES[0]))
    assert terms["compute"] == pytest.approx(forward + cache)
