"""Exact models: tokens and log-probabilities are the same bits in every batch, and those that training computes."""

from collections.abc import Sequence

import pytest
import torch

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.adapters import ADAPTERS, LowRank
from realrl.families.shape import Mixture, ModelShape
from realrl.huggingface import model_files
from realrl.huggingface.initial_weights import initialise
from realrl.model.arithmetic.ops import Products
from realrl.model.packing import Packing
from realrl.recipe.generation import GenerationConfig
from tests.conftest import World

ROWS = 300


EXPERTS = ModelShape(
    family="qwen3_moe", vocab_size=320, hidden_size=32, intermediate_size=20, layers=2, heads=4, kv_heads=2,
    head_dim=8, mixture=Mixture(experts=6, per_token=2), init_std=0.2,
)  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        None,
        LowRank(rank=4, targets=("k_proj", "o_proj", "down_proj"), dora=True),
        EXPERTS,
        EXPERTS.model_copy(update={"lora": LowRank(rank=4, alpha=4.0, targets=("all-linear",))}),
    ],
    ids=["alone", "adapters", "experts", "adapted experts"],
)
def model(world: World, request: pytest.FixtureRequest) -> Model:
    """A model alone, one with adapters, and a mixture, alone and with adapters."""
    given = request.param
    shape = given
    if not isinstance(given, ModelShape):
        shape = model_files.read_shape(world.actor).model_copy(update={"lora": given})
    model = make_unsharded_model(
        shape,
        "lm",
        dtype=torch.float32,
        device=torch.device("cpu"),
        temperature=0.7,
        products=Products(exact=True),
    )
    torch.manual_seed(3)
    if shape is given:
        initialise(model.parameters, model.layout.specs, shape, 1)
        for spec in model.layout.specs:
            if spec.parameter in ADAPTERS:
                model.parameters[spec.name].uniform_(0.1, 0.3)
        return model
    for missing in model_files.load(world.actor, shape, model.layout.specs, model.parameters):
        model.parameters[missing].uniform_(0.1, 0.3)
    return model


def sample(model: Model, positions: Sequence[int], kv_capacity: int = 10**6, samples: int = 3) -> Batch:
    """Continue prompts of 1 to 60 tokens, each of which has three rows next to each other."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 320, (1 + i * 7 % 60,), generator=generator) for i in range(ROWS // 3)]
    batch = Batch(tuple(range(ROWS)), {"prompts": Ragged.of([prompts[i // 3] for i in range(ROWS)])})
    return generate(
        model,
        batch.select(positions),
        "prompts",
        sampling=GenerationConfig(max_new_tokens=20, temperature=0.7, top_p=0.95),
        stop_token_ids=(5, 6, 7, 8),
        seed=SamplingSeed(1, 2),
        kv_capacity=kv_capacity,
        samples=samples,
    )


@pytest.fixture(scope="module")
def whole(model: Model) -> Batch:
    return sample(model, range(ROWS))


@pytest.mark.parametrize(
    ("positions", "kv_capacity", "samples"),
    [
        (range(ROWS), 700, 3),  # rows are admitted, and preempted, as blocks come free
        (range(ROWS), 10**6, 1),  # every row has a prompt of its own
        (range(ROWS - 1, -1, -2), 10**6, 1),
        (range(7, 12), 10**6, 1),
    ],
)
def test_tokens_and_log_probabilities_are_the_same_bits_in_every_batch(
    model: Model, whole: Batch, positions: range, kv_capacity: int, samples: int
) -> None:
    part = sample(model, positions, kv_capacity, samples)
    for key in ("sequences", "logprobs"):
        assert torch.equal(part[key].values, whole[key].select(list(positions)).values)


@pytest.mark.parametrize("rows", [1, 7, ROWS])
def test_training_computes_the_log_probabilities_of_the_sampler(
    model: Model, whole: Batch, rows: int
) -> None:
    for start in range(0, ROWS if rows > 1 else 20, rows):
        part = whole.select(range(start, min(start + rows, ROWS)))
        sequences = part["sequences"]
        packing = Packing.of(sequences.lengths, "cpu")
        hidden = model.forward(sequences, packing, None)
        found = model.compute_output(hidden, sequences, packing).logprobs
        assert found is not None
        answered = packing.positions >= part["prompt_length"].values[packing.rows]
        assert torch.equal(found.detach()[answered], part["logprobs"].values[answered])
