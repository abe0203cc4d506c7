"""Rows that wait for an environment keep their keys and values, and go on as if the whole row had been computed at
once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.generation.turns import TurnReply
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import LayerOptions, Mixture, ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.model.arithmetic.ops import PLAIN, Products
from realrl.model.packing import Packing
from realrl.recipe.generation import GenerationConfig

SHAPES = {
    "grouped": ModelShape(
        vocab_size=64, hidden_size=48, intermediate_size=40, layers=3, heads=6, kv_heads=2, head_dim=8
    ),
    "windows-and-caps": ModelShape(
        family="gemma2", vocab_size=64, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, tied_embeddings=True, window=7, windowed_layers=(0,),
        layer=LayerOptions(attention_cap=2.0, logit_cap=3.0, attention_scale=0.25),
    ),
    "experts": ModelShape(
        family="qwen3_moe", vocab_size=64, hidden_size=32, intermediate_size=20, layers=2, heads=4, kv_heads=2,
        head_dim=8, mixture=Mixture(experts=6, per_token=2),
    ),
}  # fmt: skip
PROMPTS = (1, 17, 30)
SAMPLES = 4
TURNS = 5
TURN_TOKENS = 12
NEW_TOKENS = 150
ENDS = tuple(range(9))
EVERYTHING = 1 << 20
"""More tokens than the cache needs."""
ONE_ROW = 1
"""As many tokens as the cache must have at least: one row."""


@dataclass
class Answers:
    """Environment whose rows wait for different numbers of looks, and which sometimes starts a row again."""

    asked: list[tuple[int, int]] = field(default_factory=list)
    """Row, and number of looks that it still waits."""
    turns: dict[int, int] = field(default_factory=dict)
    restarted: set[int] = field(default_factory=set)
    given: int = 0
    """Number of tokens that it has given."""

    def __post_init__(self) -> None:
        self.asked = [(row, row % 3) for row in range(len(PROMPTS) * SAMPLES)]

    def note(self, row: int, count: int, token: int, logprob: float) -> bool:
        return count == TURN_TOKENS

    def end(self, row: int, tokens: Sequence[int]) -> None:
        assert 1 <= len(tokens) <= TURN_TOKENS
        self.turns[row] = self.turns.get(row, 0) + 1
        self.asked.append((row, (row + self.turns[row]) % 4))

    def collect(self, seconds: float) -> list[TurnReply]:
        due = [row for row, looks in self.asked if not looks]
        self.asked = [(row, looks - 1) for row, looks in self.asked if looks]
        return [self.reply(row) for row in due]

    def reply(self, row: int) -> TurnReply:
        turn = self.turns.get(row, 0)
        if turn == TURNS:
            return TurnReply(row, done=True)
        restart = row % 5 == 1 and turn == 2 and row not in self.restarted
        if restart:
            self.restarted.add(row)
            self.turns[row] = 0
        tokens = [10 + (3 * row + turn + i) % 50 for i in range(turn * 7 % 23)]
        self.given += len(tokens)
        return TurnReply(row, tokens, kept=0 if restart else None)


def make_model(name: str, *, exact: bool = False) -> Model:
    shape = SHAPES[name].model_copy(update={"init_std": 0.2})
    device = torch.device("cpu")
    products = Products(exact=True) if exact else PLAIN
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=device, products=products)
    initialise(model.parameters, model.layout.specs, shape, 1)
    return model


def play(
    model: Model, kv_capacity: int, answers: Answers | None = None, *, record_experts: bool = False
) -> Batch:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(9, 64, (length,), generator=generator) for length in PROMPTS]
    rows = Ragged.of([prompt for prompt in prompts for _ in range(SAMPLES)])
    return generate(
        model,
        Batch(tuple(range(len(rows))), {"prompts": rows}),
        "prompts",
        sampling=GenerationConfig(max_new_tokens=NEW_TOKENS),
        stop_token_ids=ENDS,
        seed=SamplingSeed(1, 2),
        kv_capacity=kv_capacity,
        samples=SAMPLES,
        turns=answers or Answers(),
        record_experts=record_experts,
    )


def count_prefilled(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens in the model's coming prefill passes."""
    counts: list[int] = []
    prefill = model.transformer.prefill

    def count(x: torch.Tensor, *rest: object) -> torch.Tensor | None:
        counts.append(len(x))
        return prefill(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model.transformer, "prefill", count)
    return counts


@pytest.mark.parametrize("kv_capacity", [EVERYTHING, 600, ONE_ROW], ids=["everything", "some", "one-row"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_sampler_computes_what_the_trainer_computes(name: str, kv_capacity: int) -> None:
    model = make_model(name)
    played = play(model, kv_capacity)
    sequences = played["sequences"]
    packing = Packing.of(sequences.lengths, "cpu")
    found = model.compute_output(model.forward(sequences, packing, None), sequences, packing).logprobs
    assert found is not None
    sampled = played["action_mask"].values.bool()
    assert sampled.sum() > len(sequences) * TURNS
    torch.testing.assert_close(played["logprobs"].values[sampled], found.detach()[sampled], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_exact_models_sample_the_same_bits_whether_rows_are_kept_or_not(name: str) -> None:
    model = make_model(name, exact=True)
    kept, evicted = play(model, EVERYTHING), play(model, ONE_ROW)
    for key in ("sequences", "logprobs", "action_mask"):
        assert torch.equal(kept[key].values, evicted[key].values)


def test_only_new_tokens_are_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("grouped")
    counts = count_prefilled(model, monkeypatch)
    answers = Answers()
    play(model, EVERYTHING, answers)
    kept = sum(counts)
    assert kept == answers.given + sum(length - 1 for length in PROMPTS)
    counts.clear()
    play(model, ONE_ROW)
    assert sum(counts) > 2 * kept


def test_experts_of_kept_rows_are_those_of_sampling() -> None:
    model = make_model("experts", exact=True)
    kept, evicted = (play(model, capacity, record_experts=True) for capacity in (EVERYTHING, ONE_ROW))
    assert torch.equal(kept["sequences"].values, evicted["sequences"].values)
    assert torch.equal(kept["routed_experts"].values, evicted["routed_experts"].values)
