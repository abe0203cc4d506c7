"""Generation: what is drawn depends on nothing but seed, step, sequence and parameters."""

import dataclasses
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from realrl.data.batch import Batch, Ragged
from realrl.engine.finite import NotFiniteError
from realrl.engine.generation import generator
from realrl.engine.generation.lockstep import Lockstep, Pace
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.huggingface import model_files
from realrl.model.packing import Packing
from realrl.recipe.generation import GenerationConfig
from tests.conftest import World

NEVER = ()
"""Nothing ends a sequence."""

SEED = SamplingSeed(seed=1, step=2)


def load(world: World, temperature: float = 1.0) -> Model:
    shape = model_files.read_shape(world.actor)
    model = make_unsharded_model(
        shape, "lm", dtype=torch.float32, device=torch.device("cpu"), temperature=temperature
    )
    model_files.load(world.actor, shape, model.layout.specs, model.parameters)
    return model


@pytest.fixture(scope="module")
def model(world: World) -> Model:
    return load(world)


def prompts(count: int = 32) -> Batch:
    """Random prompts of 1 to 20 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 320, (1 + i * 7 % 20,), generator=generator) for i in range(count)]
    return Batch(tuple(range(count)), {"prompts": Ragged.of(rows)})


def generate(
    model: Model,
    batch: Batch,
    *,
    kv_capacity: int = 100_000,
    eos: int | tuple[int, ...] = NEVER,
    seed: SamplingSeed = SEED,
    **sampling: object,
) -> Batch:
    settings = GenerationConfig.model_validate({"max_new_tokens": 12, **sampling})
    ends = (eos,) if isinstance(eos, int) else eos
    return generator.generate(
        model, batch, "prompts", sampling=settings, stop_token_ids=ends, seed=seed, kv_capacity=kv_capacity
    )


def continuations(batch: Batch) -> list[list[int]]:
    rows = zip(batch["sequences"].rows(), batch["prompts"].lengths, strict=True)
    return [row[length:].tolist() for row, length in rows]


@pytest.fixture(scope="module")
def common(model: Model) -> int:
    """A token that ends some sequences early, some late and some not at all."""
    drawn = [token for row in continuations(generate(model, prompts())) for token in row]
    return max(set(drawn), key=drawn.count)


@pytest.fixture(scope="module")
def whole(model: Model, common: int) -> Batch:
    """All prompts continued at once."""
    return generate(model, prompts(), eos=common)


def assert_rows(got: Batch, expected: Batch, positions: list[int]) -> None:
    """`got` has the rows of `expected` at these positions."""
    for key in ("sequences", "prompt_length", "finished"):
        assert [r.tolist() for r in got[key].rows()] == [expected[key].row(i).tolist() for i in positions]
    ours, theirs = got["logprobs"].values, expected["logprobs"].select(positions).values
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_capacity", [1, 40, 100])
def test_batch_split_does_not_change_generated_tokens(
    model: Model, common: int, whole: Batch, kv_capacity: int
) -> None:
    assert_rows(generate(model, prompts(), eos=common, kv_capacity=kv_capacity), whole, list(range(32)))


@pytest.mark.parametrize("kv_capacity", [100, 100_000])
def test_rows_of_other_ranks_change_no_tokens(
    model: Model, common: int, whole: Batch, kv_capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that decode in step add rows that count nowhere. Each asks only for the rows that it has itself."""
    asked: list[int] = []
    left = iter(range(5))

    def agree(_: Lockstep, own: Pace) -> Pace:
        asked.append(own.width)
        # The other ranks go on for five turns more.
        goes_on = own.goes_on or next(left, None) is not None
        return Pace(goes_on, prefills=True, steps=1, width=max(own.width, 4))

    monkeypatch.setattr(Lockstep, "agree", agree)
    monkeypatch.setattr(Lockstep, "joint", True)
    monkeypatch.setattr(Lockstep, "agree_on_rows", lambda _, most: max(most, 4))
    assert_rows(generate(model, prompts(), eos=common, kv_capacity=kv_capacity), whole, list(range(32)))
    assert asked[-6:] == [0] * 6
    assert len(set(asked)) > 2


@pytest.mark.parametrize("positions", [list(range(31, -1, -1)), [4], [17, 3, 29]])
def test_order_and_neighbours_do_not_change_generated_tokens(
    model: Model, common: int, whole: Batch, positions: list[int]
) -> None:
    assert_rows(generate(model, prompts().select(positions), eos=common), whole, positions)


def test_the_numbering_of_sequences_can_start_anywhere(model: Model, common: int, whole: Batch) -> None:
    positions = list(range(20, 32))
    part = dataclasses.replace(prompts().select(positions), ids=tuple(range(12)))
    assert_rows(
        generate(model, part, eos=common, seed=SamplingSeed(1, 2, first_sequence=20)), whole, positions
    )


@pytest.mark.parametrize(
    "seed", [SamplingSeed(1, 3), SamplingSeed(2, 2), SamplingSeed(1, 2, first_sequence=1)]
)
def test_another_seed_step_or_number_draws_other_tokens(
    model: Model, common: int, whole: Batch, seed: SamplingSeed
) -> None:
    other = generate(model, prompts(), eos=common, seed=seed)
    pairs = zip(continuations(whole), continuations(other), strict=True)
    assert sum(a == b for a, b in pairs) <= 3  # two sequences of one token may agree


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7},
        {"min_new_tokens": 6, "temperature": 1.3},
        {"greedy": True, "temperature": 2.0, "min_new_tokens": 12},
    ],
    ids=str,
)
def test_recorded_logprobs_are_those_the_trainer_computes(
    world: World, common: int, sampling: dict[str, float], evaluates: bool
) -> None:
    # Evaluation may sample at another temperature than that of training.
    model = load(world, 1.2 if evaluates else sampling.get("temperature", 1.0))
    batch = generate(model, prompts(), eos=common, **sampling)
    with torch.no_grad():
        rows = batch["sequences"]
        packing = Packing.of(rows.lengths, "cpu")
        output = model.compute_output(model.forward(rows, packing, None), rows, packing)
    assert output.logprobs is not None and batch["logprobs"].lengths == batch["sequences"].lengths
    for recorded, computed, start in zip(
        batch["logprobs"].rows(),
        output.logprobs.split(output.lengths),
        batch["prompts"].lengths,
        strict=True,
    ):
        assert not recorded[:start].any()
        torch.testing.assert_close(recorded[start:], computed[start:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("min_new_tokens", [0, 5])
@pytest.mark.parametrize("count", [1, 3])
def test_greedy_gives_the_tokens_that_transformers_gives(
    world: World, model: Model, count: int, min_new_tokens: int
) -> None:
    greedy = partial(generate, model, prompts(), greedy=True, max_new_tokens=16)
    drawn = [token for row in continuations(greedy()) for token in row]
    ends = tuple(sorted(set(drawn), key=drawn.count)[-count:])
    ours = greedy(eos=ends, min_new_tokens=min_new_tokens)
    theirs = AutoModelForCausalLM.from_pretrained(world.actor)
    last = []
    for row, prompt in zip(ours["sequences"].rows(), prompts()["prompts"].rows(), strict=True):
        expected = theirs.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=min_new_tokens,
            eos_token_id=list(ends),
            pad_token_id=0,
        )
        assert row.tolist() == expected[0].tolist()
        last.append(int(row[-1]))
    assert [bool(row) for row in ours["finished"].rows()] == [token in ends for token in last]
    assert set(ends) & set(last)


def test_none_of_several_end_tokens_comes_before_the_minimum(model: Model) -> None:
    drawn = [token for row in continuations(generate(model, prompts())) for token in row]
    ends = tuple(sorted(set(drawn), key=drawn.count)[-3:])
    rows = continuations(generate(model, prompts(), eos=ends, min_new_tokens=6))
    assert not any(set(row[:6]) & set(ends) for row in rows) and any(row[-1] in ends for row in rows)


@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_not_finite_are_an_error(world: World, greedy: bool) -> None:
    broken = load(world)
    broken.parameters["model.norm.weight"][0] = float("nan")
    with pytest.raises(NotFiniteError, match="token 1 after the prompt of item 1 of this step"):
        generate(broken, prompts(), greedy=greedy)


def test_a_sequence_stops_at_its_first_end(common: int, whole: Batch) -> None:
    finished = [bool(row) for row in whole["finished"].rows()]
    for ended, row in zip(finished, continuations(whole), strict=True):
        assert common not in row[:-1]
        assert (row[-1] == common) == ended and (ended or len(row) == 12)
    assert 0 < sum(finished) < len(finished)


def test_no_sequence_ends_before_the_minimum(model: Model, common: int, whole: Batch) -> None:
    assert min(map(len, continuations(whole))) < 6
    rows = continuations(generate(model, prompts(), eos=common, min_new_tokens=6))
    assert all(common not in row[:6] for row in rows) and any(row[-1] == common for row in rows)


def test_one_new_token_is_the_first_of_many(model: Model) -> None:
    one = generate(model, prompts(), max_new_tokens=1)
    many = generate(model, prompts(), max_new_tokens=12)
    assert continuations(one) == [row[:1] for row in continuations(many)]


def test_top_k_of_one_is_greedy(model: Model) -> None:
    narrow = generate(model, prompts(), top_k=1, temperature=3.0)
    assert continuations(narrow) == continuations(generate(model, prompts(), greedy=True))
