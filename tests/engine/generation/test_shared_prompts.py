"""Samples that share the prefill and the cached keys and values of their prompt are those drawn without sharing."""

import pytest
import torch

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.decode_memory import KeptDecoding
from realrl.engine.generation.generator import generate, group_samples
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.recipe.generation import GenerationConfig

SAMPLES = 6
ENDS = tuple(range(9))
"""Tokens that end about one answer in seven at each step."""
SHAPES = {
    "one-key-head-per-query": ModelShape(
        vocab_size=64, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=4, head_dim=8
    ),
    "grouped-queries": ModelShape(
        vocab_size=64, hidden_size=48, intermediate_size=40, layers=3, heads=6, kv_heads=2, head_dim=8
    ),
    "one-key-head": ModelShape(
        family="qwen3", vocab_size=64, hidden_size=24, intermediate_size=20, layers=2, heads=3, kv_heads=1,
        head_dim=16,
    ),
}  # fmt: skip


def make_model(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    shape = SHAPES[name].model_copy(update={"init_std": 0.2})
    model = make_unsharded_model(shape, "lm", dtype=dtype, device=torch.device(device))
    initialise(model.parameters, model.layout.specs, shape, 1)
    return model


def make_items(lengths: tuple[int, ...], samples: int = SAMPLES) -> Batch:
    """Each of several random prompts `samples` times."""
    generator = torch.Generator().manual_seed(0)
    prompts = Ragged.of([torch.randint(9, 64, (n,), generator=generator) for n in lengths])
    rows = prompts.select([i // samples for i in range(len(lengths) * samples)])
    return Batch(tuple(range(len(rows))), {"prompts": rows})


def draw(
    model: Model,
    items: Batch,
    samples: int,
    *,
    kv_capacity: int = 1 << 20,
    kept: KeptDecoding | None = None,
    **sampling: object,
) -> Batch:
    settings = GenerationConfig.model_validate({"max_new_tokens": 20, **sampling})
    return generate(
        model,
        items,
        "prompts",
        sampling=settings,
        stop_token_ids=ENDS,
        seed=SamplingSeed(1, 2),
        kv_capacity=kv_capacity,
        samples=samples,
        kept=kept,
    )


def assert_same(got: Batch, expected: Batch, atol: float = 1e-5) -> None:
    for key in ("sequences", "prompt_length", "finished"):
        assert [row.tolist() for row in got[key].rows()] == [row.tolist() for row in expected[key].rows()]
    torch.testing.assert_close(got["logprobs"].values, expected["logprobs"].values, rtol=0, atol=atol)


LENGTHS = {"equal": (17, 17, 17), "unequal": (5, 33, 1, 12), "one prompt": (9,)}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize("name", SHAPES)
def test_samples_of_shared_prompts_equal_samples_of_separate_prompts(
    name: str, lengths: tuple[int, ...]
) -> None:
    model, items = make_model(name), make_items(lengths)
    apart = draw(model, items, 1)
    assert_same(draw(model, items, SAMPLES), apart)
    # Rows end at different steps, so that finished ones were removed on the way.
    assert len(set(apart["sequences"].lengths)) >= 3


@pytest.mark.parametrize("kv_capacity", [1, 60, 90, 200, 400])
def test_groups_that_the_cache_cuts_give_the_same_samples(kv_capacity: int) -> None:
    model, items = make_model("grouped-queries"), make_items(LENGTHS["unequal"])
    assert_same(draw(model, items, SAMPLES, kv_capacity=kv_capacity), draw(model, items, 1))


@pytest.mark.parametrize(
    "sampling", [{"min_new_tokens": 5}, {"top_k": 4}, {"greedy": True}, {"max_new_tokens": 1}]
)
def test_settings_of_sampling_hold_for_shared_prompts(sampling: dict[str, object]) -> None:
    model, items = make_model("one-key-head-per-query"), make_items(LENGTHS["unequal"])
    assert_same(draw(model, items, SAMPLES, **sampling), draw(model, items, 1, **sampling))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_samples_of_shared_prompts_on_a_gpu_have_the_log_probabilities_of_separate_ones(
    lengths: tuple[int, ...],
) -> None:
    model, items = make_model("grouped-queries", device="cuda"), make_items(lengths)
    assert_same(draw(model, items, SAMPLES), draw(model, items, 1), atol=1e-3)


def test_log_probabilities_in_bfloat16_agree_with_those_of_separate_prompts() -> None:
    model, items = make_model("grouped-queries", torch.bfloat16), make_items(LENGTHS["unequal"])
    # The first tokens follow from the prompts alone; later ones part where rounding changes a token.
    shared, apart = (draw(model, items, n, max_new_tokens=3)["logprobs"] for n in (SAMPLES, 1))
    near = [
        torch.allclose(a, b, atol=0.05)
        for a, b in zip(shared.rows(), apart.rows(), strict=True)
        if len(a) == len(b)
    ]
    assert sum(near) > 0.8 * len(apart)


def test_some_samples_of_a_prompt_in_any_order_equal_those_of_all() -> None:
    model, items = make_model("grouped-queries"), make_items(LENGTHS["unequal"])
    positions = [20, 3, 7, 4, 0, 19, 13]
    expected = draw(model, items, 1)
    for key, field in draw(model, items.select(positions), SAMPLES).fields.items():
        torch.testing.assert_close(field.values, expected[key].select(positions).values, rtol=0, atol=1e-5)


def test_only_equal_rows_of_one_prompts_samples_are_grouped() -> None:
    rows = Ragged.of([torch.tensor(row) for row in ([1, 2], [1, 2], [1, 3], [1, 2], [1, 2], [1, 2])])
    assert group_samples((0, 1, 2, 3, 4, 5), rows, 3) == [[0, 1], [2], [3, 4, 5]]
    assert group_samples((5, 0, 4, 1, 2, 3), rows, 3) == [[0, 5], [1, 3, 4], [2]]
    assert group_samples((0, 1, 2, 3, 4, 5), rows, 1) == [[0], [1], [2], [3], [4], [5]]
